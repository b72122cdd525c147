"""Does the computation fix the explanation? What it says when the attention is replaced by another with the same outputs.

A doppelganger has other attention and the same head outputs, states and logits. Three kinds of method: invariant by theorem
(effective attention is a function of A·T and T), functions of the model's map (gradients, occlusion, …: they never see
attention), and those that read single weights A_ij. The change under one doppelganger is a *lower* bound on what could
change: it was not aimed at the explanation. `contribution_bounds` gives the other end for chosen rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from whence import method_table
from whence.attention.doppelganger import Doppelganger, doppelganger
from whence.core.numerics.tolerances import SAME_ROW
from whence.errors import InputError
from whence.faithful.contribution_bounds import RowBounds, contribution_bounds
from whence.mixing.contributions import contributions
from whence.reading.rerun.substitution import Replace, substitute
from whence.reading.trace import Trace
from whence.results.short_repr import short_repr

if TYPE_CHECKING:
    import pandas as pd

TOP = 10
LEFT_OUT = ("flow", "alti-logit")  # n² flows; one prediction's, not a state's


@dataclass(frozen=True)
class Agreement:
    """One method before and after: mean Spearman over rows, mean overlap of the top 10, rows whose largest *other* token
    stays. None where the method cannot see the change (`kind` "map") or every row is constant."""

    method: str
    kind: str
    spearman: float | None
    overlap: float | None
    kept: int | None
    rows: int


@dataclass(frozen=True)
class Determined:
    """How far explanations survive another attention with the same outputs."""

    __repr__ = short_repr

    agreements: tuple[Agreement, ...]
    total_variation: float
    """How far the attention was moved, mean over rows of all heads."""
    logit_change: float | None
    """The largest change of a logit (relative): the computation is the same."""
    bounds: tuple[RowBounds, ...]

    def table(self) -> pd.DataFrame:
        """One line per method, the most stable first."""
        import pandas as pd

        frame = pd.DataFrame([vars(a) for a in self.agreements])
        return frame.sort_values("spearman", ascending=False, na_position="first").reset_index(drop=True)

    def verdict(self) -> tuple[str, ...]:
        """What is fixed by the computation, and what is not."""
        if self.total_variation < SAME_ROW:
            return ("The attention is the only one that gives these outputs: every explanation is determined.",)
        said = [
            f"Another attention (total variation {self.total_variation:.2f} a row) gives the same computation"
            + ("." if self.logit_change is None else f" (logits change by {self.logit_change:.0e}, relative).")
        ]
        for kind, words in (
            ("theorem", "Invariant by theorem"),
            ("map", "Functions of the model's map, not of attention"),
        ):
            names = [a.method for a in self.agreements if a.kind == kind]
            if names:
                said.append(f"{words}: {', '.join(names)}.")
        said += [
            f"{a.method}: mean Spearman {a.spearman:.2f} with itself, the largest other token stays in {a.kept} of "
            f"{a.rows} rows; this bounds the possible change from below."
            for a in self.agreements
            if a.kind == "weights" and a.spearman is not None
        ]
        return (*said, *(b.sentence() for b in self.bounds))

    def plot(self, *, ax: Any = None) -> Any:
        """How far each method agrees with itself under another attention with the same outputs; returns the Axes."""
        from whence.results.plotting import plot_bars

        table = self.table()
        return plot_bars(table["method"].tolist(), table["spearman"].tolist(), "mean Spearman with itself", ax)

    def to_dict(self) -> dict[str, Any]:
        return {
            "total_variation": self.total_variation,
            "logit_change": self.logit_change,
            "methods": [vars(a) for a in self.agreements],
            "bounds": [b.to_dict() for b in self.bounds],
            "verdict": list(self.verdict()),
        }


def determined(
    trace: Trace,
    methods: Sequence[str] | None = None,
    *,
    rows: Sequence[tuple[int, int]] = (),
    budget: float | None = None,
    model: Any = None,
    seed: int = 0,
    other: Doppelganger | None = None,
) -> Determined:
    """What explanations do when the attention is replaced by another with the same outputs.

    methods: names of the method table; None: all but flow. rows: (layer, token) for which ALTI's and the norms'
    contributions are bounded over *every* attention with the same outputs. budget: seconds after which the search for
    other attention stops early; or give one (`other`).
    """
    names = [m.name for m in method_table.explaining()] if methods is None else list(methods)
    entries = [method_table.method(name, ("matrix", "contributions", "scores")) for name in names]
    entries = [m for m in entries if methods is not None or m.name not in LEFT_OUT]
    found = other if other is not None else doppelganger(trace, rounds=1, budget=budget, sample=1, seed=seed)
    if found.values.shape[-1] != len(trace.tokens):
        raise InputError(
            f"the other attention has {found.values.shape[-1]} keys and the trace {len(trace.tokens)} tokens."
        )
    changes = [Replace(layer, weights) for layer, weights in zip(found.layers, found.values, strict=True)]
    changed = substitute(trace, changes, model=model)
    agreements = []
    for entry in entries:
        if entry.gives == "scores" and entry.determined != "map":
            continue  # the last layer's attention: one row of what "attention" compares
        if entry.determined == "map":
            agreements.append(Agreement(entry.name, "map", None, None, None, 0))
            continue
        before, after = (contributions(t, entry.name).rollout().values[-1] for t in (trace, changed.trace))
        agreements.append(_agreement(entry.name, entry.determined, before, after))
    logits = None
    if trace.logits is not None and changed.logits is not None:
        logits = float((changed.logits - trace.logits).abs().max() / trace.logits.abs().max())
    bounds = tuple(contribution_bounds(trace, layer, token) for layer, token in rows)
    return Determined(tuple(agreements), found.total_variation, logits, bounds)


def _agreement(name: str, kind: str, before: Tensor, after: Tensor) -> Agreement:
    a, b = (t.detach().cpu().double().numpy() for t in (before, after))
    n = len(a)
    correlations = [c for c in (spearman(x, y) for x, y in zip(a, b, strict=True)) if c is not None]
    top = min(TOP, n)
    overlaps = [
        len({*np.argsort(-x, kind="stable")[:top]} & {*np.argsort(-y, kind="stable")[:top]}) / top
        for x, y in zip(a, b, strict=True)
    ]
    kept = 0
    for i in range(n):
        others = np.delete(np.arange(n), i)
        kept += int(others[np.argmax(a[i, others])] == others[np.argmax(b[i, others])]) if n > 1 else 1
    return Agreement(
        name, kind, float(np.mean(correlations)) if correlations else None, float(np.mean(overlaps)), kept, n
    )


def spearman(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float | None:
    """Rank correlation; None where either is constant, for which it is undefined."""
    from scipy.stats import rankdata  # a third of a second, and most pages never need it

    first, second = rankdata(x), rankdata(y)
    if first.std() == 0 or second.std() == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])
