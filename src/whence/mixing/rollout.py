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


_STEP = 512  # rows of a rollout that are worked out together


def roll_on(before: Tensor | None, matrix: Tensor, *, causal: bool = False) -> Tensor:
    """R_l = C_l R_{l−1}, written over R_{l−1}, which is lost; None: R_0 = I, and `matrix` itself is copied.

    causal: no row of either has anything right of the diagonal, so that a third of the work is enough. Rows are made from
    the last to the first: none is needed once it was replaced.

    >>> half = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    >>> roll_on(roll_on(None, half), half)
    tensor([[0.2500, 0.7500],
            [0.0000, 1.0000]])
    """
    if before is None:
        return matrix.clone()
    if not causal:
        return matrix @ before
    n = len(matrix)
    for first in reversed(range(0, n, _STEP)):
        end = min(first + _STEP, n)
        before[first:end, :end] = matrix[first:end, :end] @ before[:end, :end]
    return before


def half_residual(attention: Tensor, crossed: bool = False, first_row: int = 0) -> Tensor:
    """C = ½ A + ½ I, A the mean over heads: the residual counted as half. (…, head, query, key) → (…, query, source).

    crossed: the residual is a column of its own, after the keys. first_row: which key is the first query's own token.
    """
    mean = 0.5 * attention.mean(-3)
    if crossed:
        return torch.cat([mean, mean.new_full((*mean.shape[:-1], 1), 0.5)], dim=-1)
    torch.diagonal(mean, first_row, dim1=-2, dim2=-1).add_(0.5)
    return mean


@dataclass(frozen=True)
class Rollout:
    """C = ½ (mean over heads of A) + ½ I; `.rollout()` is attention rollout."""

    joint: ClassVar[bool] = True
    batched: ClassVar[bool] = True
    by_rows: ClassVar[bool] = True

    def matrix(self, layer: LayerView) -> Tensor:
        """(query, source)"""
        return half_residual(layer.attention, layer.crossed, layer.first_row)
