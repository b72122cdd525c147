"""Attention itself: the mean over heads of the weights (Vaswani et al. 2017), as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from whence.mixing.layerwise import LayerView


@dataclass(frozen=True)
class RawAttention:
    """C = mean over heads of A; `.rollout()` multiplies the layers without a residual."""

    batched: ClassVar[bool] = True
    by_rows: ClassVar[bool] = True

    def matrix(self, layer: LayerView) -> Tensor:
        """(query, key)"""
        return layer.attention.mean(-3)
