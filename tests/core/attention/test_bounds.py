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
