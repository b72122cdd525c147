"""Where a number comes from: the model and its weights, the library versions, the method and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol


class HasWeights(Protocol):
    """What a result comes from, as far as its provenance must know it."""

    @property
    def mark(self) -> int:
        """The fingerprint, which changes when the weights do."""
        ...

    @property
    def hashed(self) -> tuple[str, int]:
        """SHA-256 of the weights, and the fingerprint of what has them."""
        ...


@lru_cache(maxsize=1)
def library_versions() -> dict[str, str]:
    """The versions of what the numbers depend on."""
    versions = {}
    for name in ("whence", "torch", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "unknown"
    return versions


@dataclass(frozen=True)
class Provenance:
    """Carried by every trace and result, and written into every saved file."""

    model: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=library_versions)
    weights: str | None = None  # SHA-256, filled in when it is first needed
    source: HasWeights | None = field(default=None, repr=False, compare=False)
    mark: int | None = field(default=None, repr=False, compare=False)  # the source's fingerprint when it was used
    changed: bool = False  # the model was changed before its weights were hashed: the hash cannot be had any more

    def __post_init__(self) -> None:
        if self.source is not None and self.mark is None and self.weights is None:
            object.__setattr__(self, "mark", self.source.mark)

    @property
    def weights_hash(self) -> str | None:
        """The hash of the weights, computed from the model while it is at hand; None where it has changed since."""
        if self.weights is None and self.source is not None and not self.changed:
            found, mark = self.source.hashed
            if mark == self.mark:
                object.__setattr__(self, "weights", found)
            else:
                object.__setattr__(self, "changed", True)
        return self.weights

    def by(self, method: str, **settings: Any) -> Provenance:
        """The same origin, with another method applied."""
        return replace(self, method=method, settings=settings)

    def to_dict(self) -> dict[str, Any]:
        known = self.weights_hash
        changed = {"changed": True} if self.changed else {}
        return {
            "model": self.model,
            "weights": known,
            "versions": dict(self.versions),
            "method": self.method,
            "settings": dict(self.settings),
            **changed,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Provenance:
        return cls(
            data["model"],
            data["method"],
            data["settings"],
            data["versions"],
            data["weights"],
            changed=bool(data.get("changed", False)),
        )
