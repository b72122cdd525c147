"""Do models that differ only in their training seed get the same explanations? Never without Δ: a constant is stable, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from whence.errors import InputError
from whence.faithful.determined import spearman
from whence.faithful.evaluate import faithfulness
from whence.faithful.result import Faithfulness
from whence.results.short_repr import short_repr

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Robustness:
    """The runs of every model, and the agreement of their explanations on texts with the same prediction."""

    __repr__ = short_repr

    runs: tuple[Faithfulness, ...]

    def table(self) -> pd.DataFrame:
        """Per method: mean Spearman over pairs of models and texts, how often it is undefined, and Δ (mean over models)."""
        import pandas as pd

        rows = []
        for k, method in enumerate(self.runs[0].methods):
            found = [c for pair in combinations(self.runs, 2) for c in self._pair(*pair, method)]
            defined = [c for c in found if c is not None]
            row: dict[str, Any] = {"method": method, "spearman": np.mean(defined) if defined else None}
            row |= {"undefined": len(found) - len(defined), "pairs": len(found)}
            for operator in self.runs[0].operators:
                row[f"delta_{operator}"] = np.mean([r.values("delta", operator)[:, k].mean() for r in self.runs])
            rows.append(row)
        return pd.DataFrame(rows).sort_values("spearman", ascending=False).reset_index(drop=True)

    @staticmethod
    def _pair(first: Faithfulness, second: Faithfulness, method: str) -> list[float | None]:
        """One correlation per text on which the two models predict the same."""
        both = sorted({*first.paired} & {*second.paired})
        return [
            spearman(np.array(first.records[i].scores[method]), np.array(second.records[i].scores[method]))
            for i in both
            if first.records[i].target == second.records[i].target
        ]

    def plot(self, *, ax: Any = None) -> Any:
        """How far models of other seeds agree, by method; returns the Axes."""
        from whence.results.plotting import plot_bars

        table = self.table()
        return plot_bars(table["method"].tolist(), table["spearman"].tolist(), "mean Spearman over pairs of models", ax)

    def to_dict(self) -> dict[str, Any]:
        return {"models": [r.model for r in self.runs], "table": self.table().to_dict("records")}


def robustness(models: Sequence[Any], texts: Any, methods: Any = "fast", **settings: Any) -> Robustness:
    """Explanations of the same texts by models trained with different seeds.

    models: at least two, with the same tokenizer. `settings` go to `whence.faithfulness`; no ceilings unless asked for.
    """
    if isinstance(models, str) or len(models) < 2:
        raise InputError("robustness compares models that were trained with different seeds: give at least two.")
    runs = tuple(faithfulness(m, texts, methods, **{"ceiling": "none", **settings}) for m in models)
    for run in runs[1:]:
        different = [i for i, (a, b) in enumerate(zip(runs[0].records, run.records, strict=True)) if a.units != b.units]
        if different:
            raise InputError(f"text {different[0]} has other units in {run.model}: the models need the same tokenizer.")
    return Robustness(runs)
