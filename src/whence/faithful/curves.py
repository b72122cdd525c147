"""Removal curves and what is read off them. Nothing here knows a model: v is an array of outputs.

For an order π of N units let v_k = v({π_1 … π_k}), k = 0 … N, the output with the first k removed. Then

    F(π) = 1/(N−1) · Σ_{k=1}^{N−1} (v_0 − v_k)            (MoRF area; comprehensiveness as an area)
    Δ(π) = F(π) − F(reverse π)                            (the headline: antisymmetric, so a random order has mean 0)

Keeping the top k is removing the rest, so the same table gives sufficiency: v(rest removed) = v of the reversed order.
Sources: DeYoung et al. 2020 (bins), Ferrando et al. 2022 (envelope), Achtibat et al. 2024 (area between LeRF and MoRF).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whence.core.numerics.arrays import AnyArray

BINS = (0.01, 0.05, 0.10, 0.20, 0.50)


def order_of(scores: AnyArray, generator: np.random.Generator) -> tuple[int, ...]:
    """Units by descending score; ties in an order drawn from the generator."""
    shuffled = generator.permutation(len(scores))
    return tuple(int(u) for u in shuffled[np.argsort(-np.asarray(scores)[shuffled], kind="stable")])


def ties_in(scores: AnyArray) -> int:
    """How many units share their score with another."""
    _, counts = np.unique(scores, return_counts=True)
    return int(counts[counts > 1].sum())


def prefixes(order: Sequence[int]) -> list[int]:
    """The N + 1 sets {}, {π_1}, {π_1, π_2}, … as integers."""
    sets = [0]
    for unit in order:
        sets.append(sets[-1] | 1 << unit)
    return sets


def area(v: AnyArray) -> float:
    """F(π) from v_0 … v_N."""
    n = len(v) - 1
    return float((v[0] - v[1:n]).sum() / (n - 1))


def bin_sizes(n: int) -> list[int]:
    """k_b = max(1, ⌈b·N⌉) for the published bins."""
    return [max(1, int(np.ceil(b * n - 1e-9))) for b in BINS]


def comprehensiveness(v: AnyArray) -> float:
    """Mean over bins of v_0 − v_k: how much is lost without the top k."""
    n = len(v) - 1
    return float(np.mean([v[0] - v[k] for k in bin_sizes(n)]))


def sufficiency(reverse: AnyArray) -> float:
    """Mean over bins of v_0 − v(only the top k are kept); `reverse` is the curve of the reversed order."""
    n = len(reverse) - 1
    return float(np.mean([reverse[0] - reverse[n - k] for k in bin_sizes(n)]))


def envelope(v: AnyArray, reverse: AnyArray) -> tuple[float, float]:
    """ALTI's table (its `aupc.py`): the lowest output so far for comprehensiveness, the highest for sufficiency.

    Five bins are summed and divided by six, as published. The running minimum starts with the whole text, the running
    maximum with nothing kept. Only for reading beside the published table; not comparable with the means above.
    """
    n = len(v) - 1
    lowest = np.minimum.accumulate([v[k] for k in (0, *bin_sizes(n))])[1:]
    highest = np.maximum.accumulate([reverse[n - k] for k in (0, *bin_sizes(n))])[1:]
    return float((v[0] - lowest).sum() / 6), float((v[0] - highest).sum() / 6)


def flip(other: Sequence[bool]) -> float | None:
    """The least k/N at which the model prefers something else; None where it never does."""
    n = len(other) - 1
    return next((k / n for k in range(n + 1) if other[k]), None)
