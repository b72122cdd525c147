"""What a method that explains one prediction gives: a number per input token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from whence.results.labels import Tokens


@dataclass(frozen=True)
class TokenScores:
    """values [input], and the tokens that they are of; extra: further tensors by name."""

    values: Tensor
    tokens: Tokens
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def absolute(self) -> TokenScores:
        """Without the signs."""
        return replace(self, values=self.values.abs())
