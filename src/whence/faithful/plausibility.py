"""Would a person mark the same words? Explanations against rationales, with the exact level of chance beside each number.

Plausible is not faithful: a model may rely on other words than people do. Explain the *gold* class, or keep texts that the
model gets right: a signed explanation of a wrong prediction speaks for the wrong class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from whence.core.numerics.arrays import AnyArray
from whence.errors import InputError
from whence.faithful.explainers import scores_of
from whence.faithful.result import Faithfulness
from whence.results.short_repr import short_repr

if TYPE_CHECKING:
    import pandas as pd

MEASURES = ("ap", "f1", "iou", "mrr")


@dataclass(frozen=True)
class Plausibility:
    """Per method and text; texts with no or only marked words are `skipped` (their numbers)."""

    __repr__ = short_repr

    methods: tuple[str, ...]
    values: AnyArray
    """[text, method, measure]"""
    chance: AnyArray
    """[text, measure]: the exact expectation for a random order"""
    numbers: tuple[int, ...]
    """Which text each line is."""
    skipped: tuple[int, ...]

    def table(self) -> pd.DataFrame:
        """Means over texts, with chance as the last line."""
        import pandas as pd

        lines = {m: self.values[:, k].mean(0) for k, m in enumerate(self.methods)} | {"chance": self.chance.mean(0)}
        frame = pd.DataFrame(lines, index=list(MEASURES)).T.rename_axis("method").reset_index()
        return frame.assign(texts=len(self.numbers))

    def plot(self, *, ax: Any = None) -> Any:
        """Mean average precision of every method, and of chance; returns the Axes."""
        from whence.results.plotting import plot_bars

        table = self.table()
        return plot_bars([str(m) for m in table.iloc[:, 0]], table.iloc[:, 1].tolist(), str(table.columns[1]), ax)

    def to_dict(self) -> dict[str, Any]:
        return {"table": self.table().to_dict("records"), "texts": len(self.numbers), "skipped": list(self.skipped)}


def plausibility(attributions: Any, rationales: Sequence[Any] | None = None) -> Plausibility:
    """How well explanations agree with rationales: average precision, F1 and IOU at the marked number, rank of the first.

    attributions: a `Faithfulness` that was run with rationales, or {method: a list of scores per text}. rationales: a list of
    0/1 marks per text, one for each score. AP is step-wise (as in scikit-learn), ties averaged over their orders only where
    chance is; equal scores are ranked together, as scikit-learn does. F1 = precision = recall at k = number of marked
    words; IOU = |top k ∩ marked| / |top k ∪ marked|; MRR = 1/rank of the first marked word.

    >>> plausibility({"mine": [[0.9, 0.1, 0.5]]}, [[1, 0, 0]]).table()[["method", "ap"]].round(3).values.tolist()
    [['mine', 1.0], ['chance', 0.611]]
    """
    given, marks, candidates = _given(attributions, rationales)
    methods = tuple(given)
    values, chances, numbers, skipped = [], [], [], []
    for number in candidates:
        marked = _marks(marks[number], number)
        if marked.all() or not marked.any():
            skipped.append(number)
            continue
        row = []
        for method in methods:
            scores = scores_of(given[method][number])
            if scores.shape != marked.shape:
                raise InputError(
                    f"text {number}: {method} has {len(scores)} scores and the rationale {len(marked)} marks; they must align."
                )
            if not np.isfinite(scores).all():
                raise InputError(f"text {number}: {method} has scores that are not finite.")
            row.append(measures(scores, marked))
        values.append(row)
        chances.append(chance(len(marked), int(marked.sum())))
        numbers.append(number)
    if not values:
        raise InputError(
            f"none of {len(candidates)} texts has both marked and unmarked words: there is nothing to compare."
        )
    return Plausibility(methods, np.array(values), np.array(chances), tuple(numbers), tuple(skipped))


def of_run(run: Faithfulness) -> Plausibility | None:
    """The plausibility of a run with rationales; None where it has none, or none with marked and unmarked words."""
    marked = [run.records[i].marks for i in run.paired]
    if not marked or any(m is None for m in marked) or not any(0 < sum(m or ()) < len(m or ()) for m in marked):
        return None
    return plausibility(run)


def _marks(given: Any, number: int) -> AnyArray:
    marks = np.asarray(given)
    if marks.ndim != 1 or not np.isin(marks, (0, 1)).all():
        raise InputError(
            f"text {number}: its rationale is {str(given)[:60]}: give a list of 0/1 marks, one for each score."
        )
    return marks.astype(bool)


def _given(attributions: Any, rationales: Sequence[Any] | None) -> tuple[dict[str, Any], Sequence[Any], list[int]]:
    if isinstance(attributions, Faithfulness):
        records = attributions.records
        marks = [r.marks for r in records] if rationales is None else list(rationales)
        if any(m is None for m in marks):
            raise InputError("this run has no rationales: run whence.faithfulness(…, rationales=…), or give them here.")
        given = {m: [r.scores.get(m) for r in records] for m in attributions.methods}
        return given, marks, list(attributions.paired)
    if not isinstance(attributions, Mapping) or rationales is None:
        raise InputError("plausibility takes {method: scores of every text} and rationales, or a run with rationales.")
    for method, many in attributions.items():
        if len(many) != len(rationales):
            raise InputError(
                f"{method!r} has scores for {len(many)} texts, and there are {len(rationales)} rationales."
            )
    return dict(attributions), rationales, list(range(len(rationales)))


def measures(scores: AnyArray, marked: AnyArray) -> tuple[float, float, float, float]:
    """AP, F1, IOU and MRR of one text. Ties: AP ranks them together; the others average over their orders."""
    k = int(marked.sum())
    hits = _expected_hits(scores, marked, k)
    return (
        average_precision(scores, marked),
        hits / k,
        _expected_iou(scores, marked, k),
        _expected_first(scores, marked),
    )


def average_precision(scores: AnyArray, marked: AnyArray) -> float:
    """Σ (R_n − R_{n−1}) P_n over distinct thresholds, not the trapezoid."""
    total, seen, right = 0.0, 0, 0
    for value in sorted(set(scores.tolist()), reverse=True):
        at = scores == value
        new = int(marked[at].sum())
        seen, right = seen + int(at.sum()), right + new
        total += new / marked.sum() * right / seen
    return float(total)


def _split(scores: AnyArray, marked: AnyArray, k: int) -> tuple[int, int, int, int]:
    """Above the k-th score: marked ones; at it: how many in all, marked ones, and how many of them are among the top k."""
    cut = np.sort(scores)[::-1][k - 1]
    above, at = scores > cut, scores == cut
    return int(marked[above].sum()), int(at.sum()), int(marked[at].sum()), k - int(above.sum())


def _expected_hits(scores: AnyArray, marked: AnyArray, k: int) -> float:
    sure, tied, tied_marked, taken = _split(scores, marked, k)
    return sure + taken * tied_marked / tied


def _expected_iou(scores: AnyArray, marked: AnyArray, k: int) -> float:
    from scipy.stats import hypergeom

    sure, tied, tied_marked, taken = _split(scores, marked, k)
    more = np.arange(taken + 1)
    weights = hypergeom.pmf(more, tied, tied_marked, taken)
    return float((weights * (sure + more) / (2 * k - sure - more)).sum())


def _expected_first(scores: AnyArray, marked: AnyArray) -> float:
    best = scores[marked].max()
    above, tied, among = int((scores > best).sum()), int((scores == best).sum()), int(marked[scores == best].sum())
    return sum(p / (above + r) for r, p in enumerate(_first(tied, among), 1))


def _first(n: int, marked: int) -> list[float]:
    """P(the first marked one of n in a random order is the r-th), r = 1 … n."""
    ranks, none_yet = [], 1.0
    for r in range(n):
        left = n - r
        ranks.append(none_yet * min(1.0, marked / left))
        none_yet *= max(0.0, 1 - marked / left)
    return ranks


def chance(n: int, marked: int) -> tuple[float, float, float, float]:
    """The exact expectation of each measure for a random order of n words, `marked` of them marked.

    E[AP] = H_n/n + (P − 1)/(n − 1)·(1 − H_n/n).

    >>> round(chance(20, 3)[0], 3)
    0.266
    """
    from scipy.stats import hypergeom

    share = sum(1 / i for i in range(1, n + 1)) / n
    ap = share + (marked - 1) / (n - 1) * (1 - share)
    hits = np.arange(marked + 1)
    iou = float((hypergeom.pmf(hits, n, marked, marked) * hits / (2 * marked - hits)).sum())
    return ap, marked / n, iou, sum(p / r for r, p in enumerate(_first(n, marked), 1))
