"""A solver's vertex becomes an attention row with the very same output."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from whence.core.attention.polytope import polished


@pytest.mark.parametrize("noise", [1e-8, 1e-10])
@pytest.mark.parametrize("seed", range(3))
def test_a_polished_vertex_has_the_output_to_the_last_digit(seed: int, noise: float) -> None:
    """The vertex comes from another solver and is spoiled: its equalities are off by the noise, and exact afterwards."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(30, 6))
    row = rng.dirichlet(np.ones(30))
    q, _ = np.linalg.qr(np.column_stack([values, np.ones(30)]))
    vertex = linprog(rng.normal(size=30), A_eq=q.T, b_eq=row @ q, bounds=(0, None)).x
    spoiled = np.where(vertex > 1e-6, vertex + noise * rng.normal(size=30), 0.0)
    assert np.abs((spoiled - row) @ q).max() > noise / 10
    exact = polished(spoiled, row, q)
    assert np.abs((exact - row) @ q).max() < 1e-15
    assert exact.min() >= 0
    assert exact.sum() == pytest.approx(1, abs=1e-15)
    assert np.array_equal(exact > 0, vertex > 1e-6)  # the same vertex
