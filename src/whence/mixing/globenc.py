"""GlobEnc: how long is each token's part after the whole block? (Modarressi et al., NAACL 2022)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from whence.mixing.layerwise import LayerView
from whence.mixing.norms import part_norms


@dataclass(frozen=True)
class GlobEnc:
    """‖L₂(T_ij)/σ₂‖₂, rolled out as published, without dividing rows by their sums.

    The feed-forward layer counts only through σ₂. In a pre-norm block nothing comes after the add, and L₂ is left out.
    """

    model: Any = None
    batched: ClassVar[bool] = True
    by_rows: ClassVar[bool] = True

    def matrix(self, layer: LayerView) -> Tensor:
        """(query, source)"""
        return part_norms(layer.after_second_norm(self.model))
