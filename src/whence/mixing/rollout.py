"""Rollout: what every layer did, followed back to the embeddings. Abnar & Zuidema (ACL 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from whence.errors import InputError

if TYPE_CHECKING:
    from whence.mixing.layerwise import LayerView


def rollout(layers: Tensor) -> Tensor:
    """R_0 = I, R_l = C_l R_{l−1}: (layer, token, token) → the same shape, from the embeddings to each layer's output.

    >>> half = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    >>> rollout(torch.stack([half, half]))[-1]
    tensor([[0.2500, 0.7500],
            [0.0000, 1.0000]])
    """
    if layers.dim() != 3 or layers.shape[1] != layers.shape[2]:
        raise InputError(f"rollout takes (layer, token, token), not {tuple(layers.shape)}.")
    out = torch.empty_like(layers)
    for i, layer in enumerate(layers):
        out[i] = layer if i == 0 else layer @ out[i - 1]
    return out


def half_residual(attention: Tensor, crossed: bool = False) -> Tensor:
    """C = ½ A + ½ I, A the mean over heads: the residual counted as half. (…, head, query, key) → (…, query, source).

    crossed: the residual is a column of its own, after the keys.
    """
    mean = 0.5 * attention.mean(-3)
    if crossed:
        return torch.cat([mean, mean.new_full((*mean.shape[:-1], 1), 0.5)], dim=-1)
    return mean + 0.5 * torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)


@dataclass(frozen=True)
class Rollout:
    """C = ½ (mean over heads of A) + ½ I; `.rollout()` is attention rollout."""

    joint: ClassVar[bool] = True
    batched: ClassVar[bool] = True

    def matrix(self, layer: LayerView) -> Tensor:
        """(query, source)"""
        return half_residual(layer.attention, layer.crossed)
