"""Areas, bins, flips and ceilings against sums over all orders, written out."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whence.faithful.ceilings import Ceiling, beam_ceiling, exact_ceiling
from whence.faithful.curves import (
    area,
    bin_sizes,
    comprehensiveness,
    envelope,
    flip,
    order_of,
    prefixes,
    sufficiency,
    ties_in,
)

games = st.integers(2, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, 2**32 - 1)))


def game(n: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).random(1 << n)


def slow_area(v: np.ndarray[Any, Any], order: tuple[int, ...]) -> float:
    """F(π) = 1/(N−1) Σ_{k=1}^{N−1} (v(∅) − v(π_1…π_k)), term by term."""
    total, removed = 0.0, 0
    for unit in order[:-1]:
        removed += 1 << unit
        total += v[0] - v[removed]
    return total / (len(order) - 1)


@given(games)
@settings(max_examples=40, deadline=None)
def test_area_and_ceilings_equal_enumeration(drawn: tuple[int, int]) -> None:
    n, seed = drawn
    v = game(n, seed)
    areas = {order: slow_area(v, order) for order in permutations(range(n))}
    some = next(iter(areas))
    assert area(v[prefixes(some)]) == pytest.approx(areas[some])
    found = exact_ceiling(n, lambda sets: v[list(sets)])
    assert found.best == pytest.approx(max(areas.values()))
    assert found.worst == pytest.approx(min(areas.values()))
    wide = beam_ceiling(n, lambda sets: v[list(sets)], width=5000)
    narrow = beam_ceiling(n, lambda sets: v[list(sets)], width=1)
    assert wide.best == pytest.approx(found.best)
    assert wide.worst == pytest.approx(found.worst)
    assert narrow.best <= found.best + 1e-12
    assert narrow.worst >= found.worst - 1e-12


@given(games)
@settings(max_examples=30, deadline=None)
def test_delta_is_antisymmetric(drawn: tuple[int, int]) -> None:
    n, seed = drawn
    v = game(n, seed)
    order = tuple(np.random.default_rng(seed + 1).permutation(n))
    forward, reverse = v[prefixes(order)], v[prefixes(order[::-1])]
    assert area(forward) - area(reverse) == pytest.approx(-(area(reverse) - area(forward)))
    # Keeping the top k is removing the rest: sufficiency of π is comprehensiveness of the reversed order, read from its end.
    kept = [v[0] - v[(1 << n) - 1 - prefixes(order)[k]] for k in bin_sizes(n)]
    assert sufficiency(reverse) == pytest.approx(np.mean(kept))


@given(st.integers(2, 7), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_additive_outputs_have_a_known_optimum(n: int, seed: int) -> None:
    w = np.random.default_rng(seed).normal(size=n)
    v = np.array([5.0 - sum(w[u] for u in range(n) if s >> u & 1) for s in range(1 << n)])
    best = tuple(int(u) for u in np.argsort(-w))
    formula = sum(w[u] * (n - i) / (n - 1) for i, u in enumerate(best, 1))
    found = exact_ceiling(n, lambda sets: v[list(sets)])
    assert area(v[prefixes(best)]) == pytest.approx(formula)
    assert found.best == pytest.approx(formula)
    assert found.worst == pytest.approx(area(v[prefixes(best[::-1])]))
    if n <= 6:
        assert np.mean([area(v[prefixes(o)]) for o in permutations(range(n))]) == pytest.approx(w.sum() / 2)
    assert found.normalise(found.best) == pytest.approx(1.0)
    assert found.normalise(found.worst) == pytest.approx(0.0)


def test_bins_are_the_published_ones() -> None:
    assert bin_sizes(20) == [1, 1, 2, 4, 10]
    assert bin_sizes(3) == [1, 1, 1, 1, 2]
    assert bin_sizes(100) == [1, 5, 10, 20, 50]
    v = np.linspace(1, 0, 21)
    assert comprehensiveness(v) == pytest.approx(np.mean([0.05, 0.05, 0.1, 0.2, 0.5]))


def test_the_envelope_is_altis() -> None:
    forward = np.array([0.9, 0.5, 0.7, 0.2, 0.6, 0.5])  # 5 units: bins at 1 1 1 1 3
    reverse = np.array([0.9, 0.8, 0.4, 0.6, 0.3, 0.5])
    # Lowest so far: .5 ×4, then .2. Highest kept so far: nothing kept .5, top 1 .3, … top 3 .4.
    comp, suff = envelope(forward, reverse)
    assert comp == pytest.approx((4 * 0.4 + 0.7) / 6)
    assert suff == pytest.approx((4 * 0.4 + 0.4) / 6)


def test_flip_is_the_first_change() -> None:
    assert flip([False, False, True, False, True]) == 0.5
    assert flip([False] * 5) is None
    assert flip([True, False]) == 0.0


def test_ties_are_drawn_and_counted() -> None:
    scores = np.array([1.0, 3.0, 1.0, 1.0, 0.0])
    firsts = {order_of(scores, np.random.default_rng(s)) for s in range(60)}
    assert len(firsts) == 6  # every order of the three equal ones
    assert all(o[0] == 1 and o[-1] == 4 for o in firsts)
    assert ties_in(scores) == 3


def test_nothing_to_normalise_is_said() -> None:
    assert Ceiling(0.3, 0.3, "exact").normalise(0.3) is None
