"""What is kept of one text: its units, the scores, and the outputs while units are removed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from whence.faithful.ceilings import Ceiling
from whence.faithful.curves import area, comprehensiveness, envelope, sufficiency
from whence.results.declared import check_kinds, listed


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
        """What `to_dict` gave, as it comes back from JSON; a ValueError where its parts do not fit together."""

        def curve(one: Mapping[str, Any]) -> Curve:
            return Curve(listed(one["forward"]), listed(one["reverse"]), one["flip"])

        record = cls(
            **{
                **data,
                "units": listed(data["units"]),
                "scores": {name: listed(values) for name, values in data["scores"].items()},
                "curves": {op: {name: curve(c) for name, c in by.items()} for op, by in data["curves"].items()},
                "random": {op: tuple(map(curve, listed(many))) for op, many in data["random"].items()},
                "ceilings": {op: Ceiling(**c) for op, c in data["ceilings"].items()},
                "marks": None if data["marks"] is None else listed(data["marks"]),
            }
        )
        check_kinds(record)
        record._check()
        return record

    def _check(self) -> None:
        """A ValueError unless there is a score for every unit, and a curve with a point before and after each of them."""
        n = len(self.units)
        if any(
            len(values) != n for values in (*self.scores.values(), self.units if self.marks is None else self.marks)
        ):
            raise ValueError(f"text {self.key} has {n} units, and not as many scores or marks")
        curves = [c for by in self.curves.values() for c in by.values()] + [c for m in self.random.values() for c in m]
        if any(len(values) != n + 1 for c in curves for values in (c.forward, c.reverse)):
            raise ValueError(f"text {self.key} has {n} units, and curves of another length")
        if self.ties.keys() != self.scores.keys() or any(
            by.keys() != self.scores.keys() for by in self.curves.values()
        ):
            raise ValueError(f"text {self.key} has scores of {', '.join(self.scores)}, and curves of other methods")
