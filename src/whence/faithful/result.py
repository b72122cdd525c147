"""The answer of `whence.faithfulness`: a table, the differences between methods, a verdict, curves, and every text."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whence.errors import InputError
from whence.faithful.records import Curve, TextRecord
from whence.faithful.statistics import Bootstrap, Difference, all_differences
from whence.results.declared import is_kind
from whence.results.records import read_records, write_records
from whence.results.run_identity import RunIdentity
from whence.results.short_repr import short_repr
from whence.results.tensor_file import understood

if TYPE_CHECKING:
    import pandas as pd

METHOD = "faithfulness"
RANDOM = "random"
MEASURES = ("delta", "comp_area", "suff_area", "comp", "suff")
GRID = np.linspace(0, 1, 21)
SETTINGS: dict[str, Any] = {
    "model": str,
    **dict.fromkeys(("methods", "operators", "perturbs"), list[str]),
    "signed": Mapping[str, bool | None],
    **dict.fromkeys(("random", "seed"), int),
}
"""What the identity of a run says at least."""


@dataclass(frozen=True)
class Faithfulness:
    """Removal curves of every method on every text. `identity` says what was run: weights, methods, settings, versions."""

    __repr__ = short_repr

    identity: RunIdentity
    records: tuple[TextRecord, ...]

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.identity.settings

    @property
    def model(self) -> str:
        """The name of the model."""
        return str(self.settings["model"])

    @property
    def operators(self) -> tuple[str, ...]:
        return tuple(self.settings["operators"])

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """The methods that explained at least one text, as they were asked for."""
        return tuple(m for m in self.settings["methods"] if any(m in r.scores for r in self.records))

    @cached_property
    def failures(self) -> dict[str, list[tuple[int, str]]]:
        """Methods that failed, with the number of the text and what they said."""
        failures: dict[str, list[tuple[int, str]]] = {}
        for number, record in enumerate(self.records):
            for name, said in record.failures.items():
                failures.setdefault(name, []).append((number, said))
        return failures

    @cached_property
    def paired(self) -> tuple[int, ...]:
        """The numbers of the texts that every method explained and that have at least two units."""
        return tuple(i for i, r in enumerate(self.records) if r.scored and all(m in r.scores for m in self.methods))

    @cached_property
    def signed(self) -> dict[str, bool]:
        """Whether a method's scores can speak against the target: as its table entry says, else as its scores show."""
        known = self.settings["signed"]
        return {
            m: bool(known[m])
            if known.get(m) is not None
            else any(s < 0 for r in self.records for s in r.scores.get(m, ()))
            for m in self.methods
        }

    def _curves(self, record: TextRecord, operator: str, method: str) -> tuple[Curve, ...]:
        """A method's curve; for `random`, those of every random order and of its reverse."""
        if method != RANDOM:
            return (record.curves[operator][method],)
        return tuple(c for one in record.random[operator] for c in (one, Curve(one.reverse, one.forward, None)))

    def values(self, measure: str, operator: str) -> np.ndarray[Any, Any]:
        """[text, method] of one measure on the paired texts; the last column is a random order's expectation."""
        if measure not in MEASURES:
            raise InputError(f"measure={measure!r} is not one of {', '.join(MEASURES)}.")
        if not self.paired:
            raise InputError("no text was explained by every method: see .failures.")

        def mean(i: int, method: str) -> float:
            curves = self._curves(self.records[i], operator, method)
            if measure == "delta":
                return float(np.mean([c.delta for c in curves]))
            return float(np.mean([c.measures()[measure] for c in curves]))

        return np.array([[mean(i, m) for m in (*self.methods, *self._random)] for i in self.paired])

    @property
    def _random(self) -> tuple[str, ...]:
        return (RANDOM,) if self.settings["random"] else ()

    @cached_property
    def _bootstraps(self) -> dict[tuple[str, str], Bootstrap]:
        return {}

    def bootstrap(self, measure: str, operator: str) -> Bootstrap:
        """The resamples of one measure, drawn once."""
        if (measure, operator) not in self._bootstraps:
            # Texts of one document are not independent: whole documents are drawn.
            groups = [self.records[i].document or f"text {i}" for i in self.paired]
            made = Bootstrap(self.values(measure, operator), groups, self.settings["seed"])
            self._bootstraps[measure, operator] = made
        return self._bootstraps[measure, operator]

    def pairs(self, operator: str, measure: str = "delta") -> list[Difference]:
        """Every pair of methods (and random) under one operator, adjusted after Holm over all of them."""
        return all_differences((*self.methods, *self._random), self.bootstrap(measure, operator))

    def table(self, *, envelope: bool = False) -> pd.DataFrame:
        """One line per method and operator, the largest Δ first.

        delta (with its 95 % interval), its two areas, comp and suff at the published bins, flip (mean share of units until
        the choice changes, texts without a change as 1), wins (how often Δ exceeds a random order's), naopc (texts with an
        exact ceiling) and naopc_beam (at most that much). `envelope=True`: ALTI's own variant of comp and suff, too.
        """
        import pandas as pd

        rows = []
        for operator in self.operators:
            bootstrap = self.bootstrap("delta", operator)
            for k, method in enumerate((*self.methods, *self._random)):
                found = self._means(operator, method)
                delta = bootstrap.estimate(k)
                row: dict[str, Any] = {"method": method, "operator": operator, "signed": self.signed.get(method)}
                row |= {"delta": delta.mean, "low": delta.low, "high": delta.high}
                row |= {name: found[name] for name in ("comp_area", "suff_area", "comp", "suff", "flip")}
                row |= {"wins": self._wins(operator, method)}
                row |= {name: found[name] for name in ("naopc", "naopc_beam")}
                if envelope:
                    row |= {name: found[name] for name in ("envelope_comp", "envelope_suff")}
                rows.append({**row, "texts": len(self.paired)})
        frame = pd.DataFrame(rows)
        best = frame.groupby("method")["delta"].mean().to_dict()
        return frame.assign(_best=frame["method"].map(best)).sort_values(
            ["_best", "method", "operator"], ascending=[False, True, True]
        ).drop(columns="_best").reset_index(drop=True)  # fmt: skip

    def _means(self, operator: str, method: str) -> dict[str, float]:
        texts = []
        for i in self.paired:
            record = self.records[i]
            ceiling = record.ceilings.get(operator)
            of_curves = [c.measures(ceiling) for c in self._curves(record, operator, method)]
            one = {name: [m[name] for m in of_curves] for name in of_curves[0]}
            one["flip"] = [1.0 if f is None else f for f in one["flip"]]
            one["naopc_beam"] = one["naopc"] if ceiling is not None and ceiling.kind == "beam" else [None]
            one["naopc"] = one["naopc"] if ceiling is not None and ceiling.kind == "exact" else [None]
            texts.append({k: np.nan if None in v else float(np.mean(v)) for k, v in one.items()})  # type: ignore[arg-type]
        if method == RANDOM:
            texts = [{**one, "flip": np.nan} for one in texts]  # the reversed orders' flips are not kept
        columns = {name: np.array([one[name] for one in texts]) for name in texts[0]}
        return {name: float(v[~np.isnan(v)].mean()) if (~np.isnan(v)).any() else np.nan for name, v in columns.items()}

    @cached_property
    def _random_deltas(self) -> dict[tuple[str, int], np.ndarray[Any, Any]]:
        """Δ of every random order and of its reverse, by operator and text."""
        deltas = {}
        for operator in self.operators:
            for i in self.paired:
                drawn = np.array([c.delta for c in self.records[i].random[operator]])
                deltas[operator, i] = np.concatenate([drawn, -drawn])
        return deltas

    def _wins(self, operator: str, method: str) -> float:
        """Diagnosticity (Chan et al. 2022): the share of random orders with a smaller Δ, ties counted half."""
        if method == RANDOM or not self._random:
            return np.nan
        shares = []
        for i in self.paired:
            own = self.records[i].curves[operator][method].delta
            others = self._random_deltas[operator, i]
            shares.append(np.mean((own > others) + 0.5 * (own == others)))
        return float(np.mean(shares))

    def differences(self, reference: str = RANDOM, measure: str = "delta") -> pd.DataFrame:
        """Every method minus `reference`, paired by text: mean, 95 % interval, p, and p after Holm over all pairs."""
        import pandas as pd

        names = (*self.methods, *self._random)
        if reference not in names:
            raise InputError(f"{reference!r} is not among the methods compared: {', '.join(names)}.")
        rows = []
        for operator in self.operators:
            for d in self.pairs(operator, measure):
                if reference not in (d.first, d.second):
                    continue
                turn = 1.0 if d.second == reference else -1.0
                ends = sorted((turn * d.estimate.low, turn * d.estimate.high))
                rows.append(
                    {
                        "method": d.first if turn > 0 else d.second,
                        "operator": operator,
                        "difference": turn * d.estimate.mean,
                        "low": ends[0],
                        "high": ends[1],
                        "p": d.p,
                        "holm": d.adjusted,
                    }
                )
        return pd.DataFrame(rows)

    def verdict(self) -> tuple[str, ...]:
        """Sentences: what beats random, what beats what, and what is not separated."""
        from whence.faithful.verdict import sentences

        return sentences(self)

    def curves(self) -> pd.DataFrame:
        """The mean output by share of units removed (21 points, interpolated), most and least important first."""
        import pandas as pd

        rows = []
        for operator in self.operators:
            for method in (*self.methods, *self._random):
                for direction in ("most important first", "least important first"):
                    lines = [
                        np.interp(GRID, np.linspace(0, 1, len(v)), v)
                        for i in self.paired
                        for c in self._curves(self.records[i], operator, method)
                        for v in (c.forward if direction.startswith("most") else c.reverse,)
                    ]
                    mean = np.mean(lines, axis=0)
                    rows += [
                        {"method": method, "operator": operator, "removed": direction, "share": s, "output": o}
                        for s, o in zip(GRID.tolist(), mean.tolist(), strict=True)
                    ]
        return pd.DataFrame(rows)

    def per_text(self) -> pd.DataFrame:
        """One line per text, operator and method: Δ, bins, flip, NAOPC, units, ties; texts of one unit are left out."""
        import pandas as pd

        rows = []
        for number, record in enumerate(self.records):
            for operator, by_method in record.curves.items():
                for method, curve in by_method.items():
                    found = curve.measures(record.ceilings.get(operator))
                    about = {"number": number, "text": record.text, "units": len(record.units), "target": record.target}
                    rows.append({**about, "operator": operator, "method": method, **found, "ties": record.ties[method]})
        return pd.DataFrame(rows)

    def plot(self, operator: str | None = None, *, methods: Sequence[str] | None = None, ax: Any = None) -> Any:
        """Mean removal curves under one operator: solid where the most important units go first, dashed for the reverse."""
        from whence.faithful.plot import plot_curves

        return plot_curves(self, operator or self.operators[0], methods, ax)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """JSON lines: what was run, then a line per text. The file that `save=` writes while it runs is the same."""
        return write_records(path, self.identity, [r.to_dict() for r in self.records])

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, unfinished: bool = False) -> Faithfulness:
        """A saved run; with `unfinished` also what a run that was stopped has done so far."""
        with understood(path, METHOD):
            identity, records = read_records(path, METHOD, unfinished=unfinished)
            if wrong := [
                name for name, kind in SETTINGS.items() if not is_kind(identity.settings.get(name, ...), kind)
            ]:
                raise ValueError(f"its settings do not say {wrong[0]}")
            loaded = cls(identity, tuple(map(TextRecord.from_dict, records)))
            for record in loaded.records:
                operators = {*loaded.operators} if record.scored else set()
                if {*record.curves} != operators or {*record.random} != operators:
                    raise ValueError(f"text {record.key} has curves of other operators than its run")
                if any(len(drawn) != identity.settings["random"] for drawn in record.random.values()):
                    raise ValueError(f"text {record.key} has not as many random orders as its run")
        return loaded

    @classmethod
    def joined(cls, parts: Sequence[Faithfulness]) -> Faithfulness:
        """Shards of one run put together: same model, methods and settings, other texts."""
        first, *others = (part.identity.without("texts", "questions") for part in parts)
        for other in others:
            if different := other.differences(first):
                raise InputError(f"these runs differ in {'; '.join(different)} and cannot be joined.")
        return cls(first, tuple(r for p in parts for r in p.records))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: what was run, the table, the verdict, and plausibility where there are rationales."""
        from whence.faithful.plausibility import of_run

        table = self.table().astype(object)
        plausible = of_run(self)
        return {
            **self.identity.to_dict(),
            "table": table.where(table.notna(), None).to_dict("records"),
            "verdict": list(self.verdict()),
            "plausibility": None if plausible is None else plausible.to_dict(),
            "failures": {name: [list(one) for one in many] for name, many in self.failures.items()},
        }

    def _repr_html_(self) -> str:
        title = html.escape(f"Faithfulness of {len(self.methods)} methods on {self.model}")
        said = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in self.verdict())
        return (
            f"<div><b>{title}</b><ul>{said}</ul>{self.table().to_html(index=False, float_format='{:.3f}'.format)}</div>"
        )
