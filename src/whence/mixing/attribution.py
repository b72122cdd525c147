"""Scores of the inputs for one prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from whence.results.declared import Array
from whence.results.result import Result


@dataclass(frozen=True)
class Attribution(Result):
    """`values` [input]: a score per input token; `signed` says whether a negative one speaks against the prediction."""

    kind: ClassVar[str] = "attribution"
    arrays: ClassVar[Mapping[str, Array]] = {
        "values": Array("input"),
        "rows": Array("token", needed=False),
        "gap": Array("", needed=False),
    }

    def __repr__(self) -> str:
        first = ", ".join(f"{token} {score:.3g}" for token, score in self.ranked()[:3])
        rest = f", … of {len(self.values)} tokens" if len(self.values) > 3 else ""
        return f"Attribution({self.provenance.method} of {self.provenance.model}: {first}{rest})"

    @property
    def signed(self) -> bool:
        return bool(self.provenance.settings.get("signed", False))

    def ranked(self) -> list[tuple[str, float]]:
        """Tokens with their scores, the highest first."""
        tokens = self.key_tokens or self.tokens
        order = self.values.argsort(descending=True).tolist()
        return [(tokens[i], float(self.values[i])) for i in order]
