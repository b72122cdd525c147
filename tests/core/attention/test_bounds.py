"""Closed-form bounds: always valid, exact where unique."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core import make
from whence.core.attention.bounds import weight_bounds
from whence.core.attention.certificate import certify_row
from whence.errors import InputError


@given(n=st.integers(1, 14), d_v=st.integers(1, 6), causal=st.booleans(), seed=st.integers(0, 1000))
def test_bounds_contain_the_row_and_the_exact_interval(n: int, d_v: int, causal: bool, seed: int) -> None:
    visible = make.causal(n) if causal else None
    attention, values = make.attention(n, n, seed=seed, visible=visible), make.values(n, d_v, seed=seed + 1)
    bounds = weight_bounds(attention, values, visible=visible)
    row = attention.double() / attention.double().sum(-1, keepdim=True)
    assert (bounds.lower <= row + 1e-12).all()
    assert (bounds.upper >= row - 1e-12).all()
    last = certify_row(attention[-1], values, top=None)
    assert (bounds.lower[-1][last.keys] <= last.lower + 1e-9).all()
    assert (bounds.upper[-1][last.keys] >= last.upper - 1e-9).all()


def test_bounds_are_exact_for_a_unique_row_and_not_vacuous_otherwise() -> None:
    attention = make.attention(2, 9, 9)
    unique = weight_bounds(attention, make.values(2, 9, 12))
    assert float(unique.width.max()) == 0.0
    loose = weight_bounds(attention, make.values(2, 9, 7))
    assert 0.0 < float(loose.width.mean()) < 0.9


def test_hidden_keys_have_zero_bounds_and_padding_changes_nothing() -> None:
    attention, values = make.attention(5, 12), make.values(12, 4)
    wide = torch.cat([attention, torch.zeros(5, 3)], -1)
    visible = torch.arange(15) < 12
    plain = weight_bounds(attention, values)
    padded = weight_bounds(wide, torch.cat([values, 100 * torch.ones(3, 4)]), visible=visible)
    assert torch.allclose(padded.upper[:, :12], plain.upper, atol=1e-9)
    assert not padded.upper[:, 12:].any()


def test_errors_say_what_to_do() -> None:
    with pytest.raises(InputError, match="sum to 1"):
        weight_bounds(2 * make.attention(3, 5), make.values(5, 2))


def test_equal_to_the_formula_row_by_row() -> None:
    """hi = (e_j − m_j)/(H_jj − m_j) and lo = (e_j − M_j)/(H_jj − M_j), H from a full SVD of [V, 1], head by head."""
    attention, values = make.attention(3, 4, 9, seed=5), make.values(3, 9, 4, seed=6)
    bounds = weight_bounds(attention, values)
    for head in range(3):
        v = torch.cat([values[head].double(), torch.ones(9, 1, dtype=torch.float64)], 1)
        u, s, _ = torch.linalg.svd(v, full_matrices=False)
        projector = u[:, s > 1e-6 * s[0]] @ u[:, s > 1e-6 * s[0]].T
        for query in range(4):
            a = attention[head, query].double() / attention[head, query].double().sum()
            e = projector @ a
            for j in range(9):
                others = torch.cat([projector[j, :j], projector[j, j + 1 :]])
                least, most, own = float(others.min()), float(others.max()), float(projector[j, j])
                high = min(1.0, (float(e[j]) - least) / (own - least)) if own > least else 1.0
                low = max(0.0, (float(e[j]) - most) / (own - most)) if own > most else 0.0
                assert abs(float(bounds.upper[head, query, j]) - high) < 1e-9
                assert abs(float(bounds.lower[head, query, j]) - low) < 1e-9


def test_one_bad_row_among_good_ones_is_refused() -> None:
    attention = make.attention(3, 5)
    for factor in (2.0, -1.0):
        broken = attention.clone()
        broken[1] *= factor
        with pytest.raises(InputError, match="sum to 1"):
            weight_bounds(broken, make.values(5, 2))
