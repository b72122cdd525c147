"""Many programs at once: the minima that cold linear programs give, points that are alternatives, bounds that hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from tests.core import make
from whence.core.attention.interior_point import InteriorPoint
from whence.core.numerics.tolerances import EPS32

N, SIZE = 40, 6


def problem(kind: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """rows (k, n) that sum to 1, values (n, d_v), seen (k, n)."""
    n = N
    visible = None if kind == "full" else make.causal(n)
    attention = make.attention(n, n, visible=visible, seed=seed).double()
    values = make.values(n, SIZE, seed=seed).double()
    if kind == "peaked":
        attention = torch.softmax(12 * torch.randn(n, n, generator=make.generator(seed), dtype=torch.float64), -1)
        visible = None
    seen = torch.ones(n, n, dtype=torch.bool) if visible is None else visible
    rows = attention / attention.sum(-1, keepdim=True)
    return rows.numpy(), values.numpy(), seen.numpy()


def oracle(cost: np.ndarray, row: np.ndarray, values: np.ndarray, seen: np.ndarray) -> float:
    matrix = np.vstack([values[seen].T, np.ones(int(seen.sum()))])
    return float(linprog(cost[seen], A_eq=matrix, b_eq=matrix @ row[seen]).fun)


@pytest.mark.parametrize("kind", ["full", "causal", "peaked"])
def test_minima_are_those_of_cold_programs(kind: str) -> None:
    rows, values, seen = problem(kind)
    solver = InteriorPoint(values, EPS32)
    chosen = np.flatnonzero(solver.roomy(seen))[::2]
    assert len(chosen) > 10
    rng = np.random.default_rng(1)
    costs = np.where(rng.random((len(chosen), N)) < 0.5, rng.choice([-1.0, 1.0], (len(chosen), N)), 0.0)
    costs[:5] = -np.eye(N)[rows[chosen[:5]].argmax(1)]
    found = solver.minima(costs, rows[chosen], seen[chosen])
    assert found.solved.mean() > (0.5 if kind == "peaked" else 0.9)
    for t, i in enumerate(chosen):
        exact = oracle(costs[t], rows[i], values, seen[i])
        assert found.proved[t] <= exact + 5e-7  # a bound, solved or not (the oracle itself is right to 1e-7)
        if found.solved[t]:
            assert found.attained[t] == pytest.approx(exact, abs=5e-7)
            assert found.proved[t] == pytest.approx(exact, abs=5e-7)
        assert found.points[t].min() >= 0.0
        assert not found.points[t][~seen[i]].any()
        if found.feasible[t]:
            assert np.abs((found.points[t] - rows[i]) @ values).max() < 1e-7
            assert found.points[t].sum() == pytest.approx(1.0, abs=1e-8)
        # Every alternative costs at least the bound and the excess of what it uses; so does the row itself.
        assert costs[t] @ rows[i] >= found.proved[t] + found.excess[t] @ rows[i] - 1e-9
        assert found.attained[t] >= found.proved[t] + found.excess[t] @ found.points[t] - 1e-7


def test_a_target_stops_early_at_an_alternative_and_a_bound_still_holds() -> None:
    rows, values, seen = problem("full")
    solver = InteriorPoint(values, EPS32)
    costs = np.eye(N)[rows.argmax(1)]
    whole = solver.minima(costs, rows, seen)
    target = 0.5 * (whole.attained + rows.max(1))  # half-way
    found = solver.minima(costs, rows, seen, target=target)
    assert (found.attained < target).all()
    assert found.feasible.all()
    assert (found.attained >= whole.proved - 1e-9).all()
    assert (found.proved <= whole.attained + 1e-9).all()
    assert (found.attained - whole.attained).max() > 1e-4  # it did leave off


def test_rows_with_exact_zeros_and_repeated_values_are_solved_or_said_not_to_be() -> None:
    rows, values, seen = problem("full")
    rows = np.where(rows < np.median(rows), 0.0, rows)
    rows /= rows.sum(1, keepdims=True)
    values[1::2] = values[::2]
    solver = InteriorPoint(values, EPS32)
    costs = -np.eye(N)[rows.argmax(1)]
    found = solver.minima(costs, rows, seen)
    for t in range(0, N, 5):
        exact = oracle(costs[t], rows[t], values, seen[t])
        assert found.proved[t] <= exact + 5e-7
        if found.solved[t]:
            assert found.attained[t] == pytest.approx(exact, abs=5e-7)
