"""Is one method better than another on these texts? Paired bootstrap over texts (or documents), adjusted after Holm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from whence.core.numerics.arrays import AnyArray
from whence.core.numerics.tolerances import DRAW_ROUNDING

RESAMPLES = 10_000
LEVEL = 0.05
FEWEST = 30
"""Under so many texts no method is called better than another."""


@dataclass(frozen=True)
class Estimate:
    """A mean over texts with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """first − second, paired by text; `p` is two-sided, `adjusted` after Holm over all pairs."""

    first: str
    second: str
    estimate: Estimate
    p: float
    adjusted: float


class Bootstrap:
    """One set of resamples for everything that is compared, so that every comparison is paired.

    `columns` [text, method]; `documents`: texts of one document are drawn together.
    """

    def __init__(self, columns: AnyArray, documents: Sequence[Any] | None, seed: int) -> None:
        self.columns = np.asarray(columns, dtype=np.float64)
        texts = len(self.columns)
        names = list(range(texts)) if documents is None else list(documents)
        unique = {name: i for i, name in enumerate(dict.fromkeys(names))}
        member = np.zeros((texts, len(unique)))
        member[np.arange(texts), [unique[name] for name in names]] = 1.0
        pairs = self.columns.shape[1] * (self.columns.shape[1] - 1) // 2
        # The smallest p is 1/(resamples + 1): it must stay below the level after Holm's factor, the number of pairs.
        resamples = max(RESAMPLES, 40 * pairs)
        generator = np.random.default_rng(seed)
        drawn = generator.multinomial(len(unique), np.full(len(unique), 1 / len(unique)), size=resamples)
        weights = drawn @ member.T.astype(np.float64)
        self.means: AnyArray = weights @ self.columns / weights.sum(1, keepdims=True)

    def estimate(self, column: int) -> Estimate:
        """The mean of one column."""
        return _estimate(self.columns[:, column], self.means[:, column])

    def difference(self, first: int, second: int) -> tuple[Estimate, float]:
        """The mean of first − second, and how often chance alone would move it as far (null-centred bootstrap)."""
        estimate = _estimate(
            self.columns[:, first] - self.columns[:, second], drawn := self.means[:, first] - self.means[:, second]
        )
        if not np.any(self.columns[:, first] != self.columns[:, second]):
            return estimate, 1.0
        far = np.abs(drawn - estimate.mean) >= abs(estimate.mean) - DRAW_ROUNDING
        return estimate, float((1 + far.sum()) / (1 + len(drawn)))


def _estimate(values: AnyArray, drawn: AnyArray) -> Estimate:
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Estimate(float(values.mean()), float(low), float(high))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: the i-th smallest of m becomes (m − i)·p, never below the one before it."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    adjusted = [0.0] * len(p)
    highest = 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = highest
    return adjusted


def all_differences(names: Sequence[str], bootstrap: Bootstrap) -> list[Difference]:
    """Every pair of methods; the family for Holm is all of them."""
    pairs = list(combinations(range(len(names)), 2))
    found = [bootstrap.difference(a, b) for a, b in pairs]
    adjusted = holm([p for _, p in found])
    return [
        Difference(names[a], names[b], estimate, p, adjusted[i])
        for i, ((a, b), (estimate, p)) in enumerate(zip(pairs, found, strict=True))
    ]


def separated(by_operator: Sequence[Difference]) -> int:
    """+1: the first beats the second under every operator, −1: the second does, 0: not separated."""
    if any(d.adjusted >= LEVEL for d in by_operator):
        return 0
    signs = {np.sign(d.estimate.mean) for d in by_operator}
    return int(signs.pop()) if len(signs) == 1 else 0
