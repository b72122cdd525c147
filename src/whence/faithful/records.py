"""What is kept of one text, and the file it is kept in: JSON lines, an identity first, then a line per text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from whence.errors import InputError
from whence.faithful.ceilings import Ceiling
from whence.faithful.curves import area, comprehensiveness, envelope, sufficiency
from whence.results.files import write_atomically


@dataclass(frozen=True)
class Curve:
    """Outputs while units are removed in a method's order (`forward`, most important first) and in the reversed one."""

    forward: tuple[float, ...]
    reverse: tuple[float, ...]
    flip: float | None
    """The least share of units whose removal changes the model's choice; None: none does."""

    @property
    def delta(self) -> float:
        """Δ = F(π) − F(reverse π)."""
        return area(np.array(self.forward)) - area(np.array(self.reverse))

    def measures(self, ceiling: Ceiling | None = None) -> dict[str, float | None]:
        """Δ and its two areas, the bins, the flip, ALTI's envelope, and NAOPC where there is a ceiling."""
        forward, reverse = np.array(self.forward), np.array(self.reverse)
        area_forward, area_reverse = area(forward), area(reverse)
        outer = envelope(forward, reverse)
        return {
            "delta": area_forward - area_reverse,
            "comp_area": area_forward,
            "suff_area": area_reverse,
            "comp": comprehensiveness(forward),
            "suff": sufficiency(reverse),
            "flip": self.flip,
            "envelope_comp": outer[0],
            "envelope_suff": outer[1],
            "naopc": None if ceiling is None else ceiling.normalise(area_forward),
        }


@dataclass(frozen=True)
class TextRecord:
    """One text: its units, every method's scores and curves, the random orders, and what failed."""

    key: str
    text: str
    units: tuple[str, ...]
    target: str
    output: float
    """The watched output of the whole text."""
    scores: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    ties: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    curves: Mapping[str, Mapping[str, Curve]] = field(default_factory=dict)
    """By operator, then by method."""
    random: Mapping[str, tuple[Curve, ...]] = field(default_factory=dict)
    """By operator: the random orders, each with its reverse."""
    ceilings: Mapping[str, Ceiling] = field(default_factory=dict)
    marks: tuple[int, ...] | None = None
    """A person's rationale: 1 for a marked unit."""
    document: str | None = None
    """The document that the text comes from, where several texts share one."""

    @property
    def scored(self) -> bool:
        """A text of one unit has no order."""
        return len(self.units) > 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TextRecord:
        def curve(one: Mapping[str, Any]) -> Curve:
            return Curve(tuple(one["forward"]), tuple(one["reverse"]), one["flip"])

        return cls(
            **{
                **data,
                "units": tuple(data["units"]),
                "scores": {name: tuple(values) for name, values in data["scores"].items()},
                "curves": {op: {name: curve(c) for name, c in by.items()} for op, by in data["curves"].items()},
                "random": {op: tuple(map(curve, many)) for op, many in data["random"].items()},
                "ceilings": {op: Ceiling(**c) for op, c in data["ceilings"].items()},
                "marks": None if data["marks"] is None else tuple(data["marks"]),
            }
        )


def write_run(path: str | os.PathLike[str], header: Mapping[str, Any], records: Iterable[TextRecord]) -> Path:
    """A whole run at once, whole or not at all."""
    lines = [header, *(record.to_dict() for record in records)]
    return write_atomically(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())


def append(path: str | os.PathLike[str], record: TextRecord) -> None:
    """One more text, on the disk before this returns: a run that is killed loses at most the text under way."""
    with Path(path).expanduser().open("a", encoding="utf-8") as file:
        file.write(json.dumps(record.to_dict(), ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_run(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[TextRecord]]:
    """The header and the texts; a last line that was cut off by a kill is left out."""
    source = Path(path).expanduser()
    if not source.is_file():
        raise InputError(f"there is no file {str(path)!r} to load.")
    lines = source.read_bytes().split(b"\n")
    whole, rest = lines[:-1], lines[-1]  # what follows the last line end was not finished
    try:
        header = json.loads(whole[0]) if whole else None
        records = [TextRecord.from_dict(json.loads(line)) for line in whole[1:]]
    except (ValueError, KeyError, TypeError) as problem:
        raise InputError(f"{str(path)!r} is not a saved run of whence.faithfulness: {problem}") from problem
    if not isinstance(header, dict) or header.get("kind") != "faithfulness":
        raise InputError(f"{str(path)!r} is not a saved run of whence.faithfulness.")
    if rest:  # make room for the next line
        write_run(path, header, records)
    return header, records
