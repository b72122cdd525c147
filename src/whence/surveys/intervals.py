"""Means and shares over a corpus with 95 % intervals over texts: rows of one text are not independent, texts are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import stdtrit

if TYPE_CHECKING:
    import pandas as pd


def mean_over_texts(frame: pd.DataFrame, column: str) -> dict[str, float]:
    """The mean of `column` over texts, each text counting once, and Student's 95 % interval; NaN is left out."""
    each = frame.groupby("text")[column].mean().dropna().to_numpy(dtype=float)
    n = len(each)
    mean = float(each.mean()) if n else float("nan")
    half = float(stdtrit(n - 1, 0.975) * each.std(ddof=1) / np.sqrt(n)) if n > 1 else float("nan")
    return {"mean": mean, "low": mean - half, "high": mean + half, "texts": n}


def share_over_texts(texts: Any, hits: Any, total: Any) -> dict[str, float]:
    """p = Σ hits / Σ total with a 95 % interval over texts: Var p = Σ_t (hits_t − p·total_t)² / (Σ total)² · T/(T − 1).

    NaN where nothing is counted; no interval from one text, nor from texts that are all 0 or all 1 (Student's would be a
    point: the rule of three gives the other end).

    >>> found = share_over_texts([0, 0, 1], [1, 1, 0], [1, 1, 2])
    >>> found["share"], found["texts"]
    (0.5, 2)
    """
    _, at = np.unique(np.asarray(texts), return_inverse=True)
    counted = np.bincount(at, np.asarray(total, dtype=float))
    hit = np.bincount(at, np.asarray(hits, dtype=float))[counted > 0]
    counted = counted[counted > 0]
    n = len(counted)
    if not n:
        return {"share": float("nan"), "low": float("nan"), "high": float("nan"), "texts": 0}
    share = float(hit.sum() / counted.sum())
    if n == 1:
        return {"share": share, "low": float("nan"), "high": float("nan"), "texts": 1}
    if share in (0.0, 1.0):
        edge = min(1.0, 3 / n)
        return {"share": share, "low": share and 1 - edge, "high": share or edge, "texts": n}
    error = np.sqrt(((hit - share * counted) ** 2).sum() * n / (n - 1)) / counted.sum()
    half = float(stdtrit(n - 1, 0.975) * error)
    return {"share": share, "low": max(0.0, share - half), "high": min(1.0, share + half), "texts": n}
