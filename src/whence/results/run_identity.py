"""Which run is this? What decides a run's numbers, as hashes and settings, so that two runs are never mixed up.

Everything that can be interrupted and go on (training, conversion, surveys) keeps its `RunIdentity` beside its state and
compares it before it goes on. Another identity is refused, and the difference is named.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from whence.errors import InputError
from whence.results.provenance import library_versions


def hash_texts(texts: Iterable[str | Iterable[Any] | None]) -> str:
    """SHA-256 of texts (or tuples of texts and labels) in their order; no two different lists share one.

    >>> hash_texts(["ab", "c"]) == hash_texts(["a", "bc"])
    False
    """
    digest = hashlib.sha256()
    for text in texts:
        entry = text if isinstance(text, str) or text is None else [None if one is None else str(one) for one in text]
        digest.update(json.dumps(entry).encode() + b"\n")  # escaped, so that a line end in a text is no line end here
    return digest.hexdigest()


@dataclass(frozen=True)
class RunIdentity:
    """All that decides a run's numbers. `hashes`: what it reads, by name ("weights", "texts", "tokenizer", …).

    >>> one = RunIdentity("train", {"texts": hash_texts(["a"])}, {"seed": 0})
    >>> one.differences(RunIdentity("train", {"texts": hash_texts(["b"])}, {"seed": 1}))
    ('texts (SHA-256 c531b3dea733 there, ee195db0cd14 here)', 'setting seed (1 there, 0 here)')
    """

    method: str
    hashes: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=library_versions)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as it comes back from JSON."""
        plain = {
            "method": self.method,
            "hashes": dict(self.hashes),
            "settings": dict(self.settings),
            "versions": dict(self.versions),
        }
        return dict(json.loads(json.dumps(plain, default=str)))

    @classmethod
    def from_dict(cls, data: Any) -> RunIdentity:
        """What `to_dict` gave; anything else raises a ValueError that says what is missing."""
        if not isinstance(data, dict) or not isinstance(data.get("method"), str):
            raise ValueError("it names no method")
        for part in ("hashes", "settings", "versions"):
            if not isinstance(data.get(part), dict):
                raise ValueError(f"its {part} are missing")
        return cls(data["method"], data["hashes"], data["settings"], data["versions"])

    def without(self, *names: str) -> RunIdentity:
        """The identity without these hashes: what two shards of one run have in common."""
        return replace(self, hashes={name: digest for name, digest in self.hashes.items() if name not in names})

    @property
    def digest(self) -> str:
        """SHA-256 of the identity: a short name for it."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def differences(self, there: RunIdentity) -> tuple[str, ...]:
        """What differs from the identity that was found `there`, each in words with both values; () if nothing does."""
        ours, theirs = self.to_dict(), there.to_dict()
        if ours["method"] != theirs["method"]:
            return (f"method ({theirs['method']} there, {ours['method']} here)",)
        differences = []
        for part, noun in (("hashes", ""), ("settings", "setting "), ("versions", "version of ")):
            for name in dict.fromkeys((*ours[part], *theirs[part])):
                here, before = ours[part].get(name), theirs[part].get(name)
                if here != before:
                    shown = f"SHA-256 {_short(before)} there, {_short(here)} here" if part == "hashes" else ""
                    differences.append(f"{noun}{name} ({shown or f'{before!r} there, {here!r} here'})")
        return tuple(differences)

    def refuse_other(self, there: RunIdentity, where: str | Path) -> None:
        """Raise an InputError that names the differences, if there are any."""
        if differences := self.differences(there):
            raise InputError(
                f"{str(where)!r} belongs to another run: it differs in {'; '.join(differences)}. Give another place, "
                "remove this one, or start the run as it was."
            )


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]
