"""Where a number comes from: the model and its weights, the library versions, the method and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol


class HasWeights(Protocol):
    """What a result comes from, as far as its provenance must know it."""

    @property
    def weights_hash(self) -> str:
        """SHA-256 of the weights."""
        ...


@lru_cache(maxsize=1)
def library_versions() -> dict[str, str]:
    """The versions of what the numbers depend on."""
    found = {}
    for name in ("whence", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


@dataclass(frozen=True)
class Provenance:
    """Carried by every trace and result, and written into every saved file."""

    model: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=library_versions)
    weights: str | None = None  # SHA-256, filled in when it is first needed
    source: HasWeights | None = field(default=None, repr=False, compare=False)

    @property
    def weights_hash(self) -> str | None:
        """The hash of the weights, computed from the model while it is at hand."""
        if self.weights is None and self.source is not None:
            object.__setattr__(self, "weights", self.source.weights_hash)
        return self.weights

    def by(self, method: str, **settings: Any) -> Provenance:
        """The same origin, with another method applied."""
        return Provenance(self.model, method, settings, self.versions, self.weights, self.source)

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "weights": self.weights_hash,
            "versions": dict(self.versions),
            "method": self.method,
            "settings": dict(self.settings),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Provenance:
        return cls(data["model"], data["method"], data["settings"], data["versions"], data["weights"])
