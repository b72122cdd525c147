"""Two surveys side by side: by layer, and by head where they have the same heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whence.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from whence.surveys.result import Survey

COLUMNS = ("r", "null_share", "raw_start", "effective_start", "raw_end", "effective_end", "entropy", "alti_own")


def compare(one: Survey, other: Survey) -> pd.DataFrame:
    """A line per measure and layer: each survey's mean, and whether their 95 % intervals lie apart.

    Intervals that lie apart say that the means differ; intervals that overlap do not say that they are equal.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for column in COLUMNS:
        if not all(column in {*s.heads.columns, *s.layers.columns} for s in (one, other)):
            continue
        left, right = (s.mean(column, "layer").set_index("layer") for s in (one, other))
        rows += _lines(column, left, right, "mean")
    if all("certain" in s.heads.columns for s in (one, other)):
        left, right = (s.certain("layer").set_index("layer") for s in (one, other))
        rows += _lines("certain", left, right, "share")
    if not rows:
        raise InputError("the two surveys have no measure in common: nothing can be compared.")
    return pd.DataFrame(rows)


def _lines(measure: str, left: pd.DataFrame, right: pd.DataFrame, name: str) -> list[dict[str, Any]]:
    """One line for each layer that both have."""
    lines = []
    for layer in left.index.intersection(right.index):
        a, b = left.loc[layer], right.loc[layer]
        apart = bool(a["low"] > b["high"] or b["low"] > a["high"])  # False where an interval is missing
        lines.append({"measure": measure, "layer": layer, "first": a[name], "second": b[name], "apart": apart})
    return lines
