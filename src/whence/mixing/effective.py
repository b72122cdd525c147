"""Effective attention as a mixing matrix: the part of the weights that the head outputs depend on (Brunner et al. 2020).

It is the same for every attention with the same head outputs, and so is its rollout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from whence.attention.effective_attention import of_layer
from whence.errors import InputError
from whence.mixing.layerwise import LayerView
from whence.mixing.rollout import half_residual


@dataclass(frozen=True)
class Effective:
    """The mean over heads of effective attention. Entries may be negative.

    constraint "simplex": rows keep their sum; "output": the paper's A⊥.
    """

    constraint: str = "simplex"
    by_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.constraint not in ("simplex", "output"):
            raise InputError(f"constraint={self.constraint!r} is not 'simplex' or 'output'.")

    def matrix(self, layer: LayerView) -> Tensor:
        """(query, key)"""
        return self.heads(layer).mean(0)

    def heads(self, layer: LayerView) -> Tensor:
        """(head, query, key): what `whence.effective_attention` gives for this layer."""
        return of_layer(layer.layer, self.constraint).to(layer.attention)  # type: ignore[arg-type]


@dataclass(frozen=True)
class EffectiveRollout(Effective):
    """Rollout with effective attention in place of attention."""

    joint: ClassVar[bool] = True

    def matrix(self, layer: LayerView) -> Tensor:
        """(query, source)"""
        return half_residual(self.heads(layer), layer.crossed, layer.first_row)
