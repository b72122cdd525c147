"""The key's role: dimensions by brute force, both theorems, and an honest search."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core import make
from whence.core.attention.reachable_rows import near_tied, reachable_dimension
from whence.core.attention.search_reachable import search_reachable
from whence.errors import InputError


@settings(max_examples=30)
@given(n=st.integers(2, 16), d_k=st.integers(1, 6), d_v=st.integers(1, 6), seed=st.integers(0, 1000))
def test_local_dimension_is_the_kernel_of_the_jacobian(n: int, d_k: int, d_v: int, seed: int) -> None:
    attention = make.attention(3, n, seed=seed, sharpness=1.0, dtype=torch.float64)
    keys, values = (make.values(n, d, seed=seed + i, dtype=torch.float64) for i, d in ((1, d_k), (2, d_v)))
    found = reachable_dimension(attention, keys, values)
    for i, a in enumerate(attention):
        # d(output)/dq and d(row)/dq: directions that move the row and not the output.
        sigma = torch.diag(a) - torch.outer(a, a)
        moves = int(torch.linalg.matrix_rank(sigma @ keys, rtol=1e-10))
        seen = int(torch.linalg.matrix_rank(values.T @ sigma @ keys, rtol=1e-10))
        if bool(found.determined[i]):
            assert int(found.dimension[i]) == moves - seen
        assert int(found.key_rank[i]) == moves
    generic = max(0, min(d_k, n - 1) - min(d_v, n - 1))
    assert (found.dimension[found.determined] == generic).all()


def test_per_row_masks_equal_separate_rows() -> None:
    visible = make.causal(14)
    attention = make.attention(14, 14, visible=visible, sharpness=1.0, dtype=torch.float64)
    keys, values = make.values(14, 6, seed=2, dtype=torch.float64), make.values(14, 3, seed=3, dtype=torch.float64)
    found = reachable_dimension(attention, keys, values, visible=visible)
    for i in range(14):
        one = reachable_dimension(attention[i : i + 1, : i + 1], keys[: i + 1], values[: i + 1])
        assert float(found.dimension[i]) == float(one.dimension[0])
        assert float(found.ratio[i]) == pytest.approx(float(one.ratio[0]), rel=1e-6)


def test_a_peaked_row_is_undetermined_rather_than_guessed() -> None:
    logits = torch.zeros(1, 12, dtype=torch.float64)
    logits[0, 0], logits[0, 1] = 60.0, 30.0
    attention = torch.softmax(logits, -1)
    found = reachable_dimension(attention, make.values(12, 5), make.values(12, 5, seed=4))
    assert not bool(found.determined[0])
    assert bool(torch.isnan(found.dimension[0]))


def test_theorem_1_tied_keys_are_unique() -> None:
    values = make.values(40, 6)
    keys = values @ make.values(6, 9, seed=5) + 0.7
    result = near_tied(keys, values, query_diameter=10.0)
    assert bool(result.tied)
    assert float(result.bound) == 0.0
    search = search_reachable(make.attention(40), keys, values)
    assert search.tied
    assert not search.exists
    assert "unique" in search.verdict


def test_theorem_2_holds_for_what_the_search_finds() -> None:
    checked = 0
    for seed in range(6):
        values = make.values(24, 6, seed=seed, dtype=torch.float64)
        mix = make.values(6, 8, seed=seed + 20, dtype=torch.float64)
        keys = values @ mix + 0.1 * make.values(24, 8, seed=seed + 50, dtype=torch.float64)
        row = make.attention(24, seed=seed, dtype=torch.float64)
        search = search_reachable(row, keys, values, starts=32)
        if search.exists:
            reach = float(search.query_change.norm())
            bound = float(near_tied(keys, values, query_diameter=reach).bound)
            assert search.total_variation <= bound + 1e-9
            checked += 1
    assert checked > 0


def test_a_found_row_is_reachable_and_has_the_same_output() -> None:
    row, keys, values = make.attention(30), make.values(30, 6, seed=7), make.values(30, 3, seed=8)
    search = search_reachable(row, keys, values, starts=16)
    assert search.exists
    x = search.alternative
    assert torch.allclose(x @ values.double(), search.row @ values.double(), atol=1e-12)
    again = torch.softmax(search.row.log() + keys.double() @ search.query_change, -1)
    assert torch.allclose(again, x, atol=1e-9)
    assert search.total_variation > 1e-6


def test_finding_none_is_not_a_proof_of_none() -> None:
    row, keys, values = make.attention(20), make.values(20, 2, seed=7), make.values(20, 6, seed=8)
    search = search_reachable(row, keys, values, starts=12)
    assert not search.exists
    assert search.verdict == "none found in 12 starts"
    assert 0 < search.returned <= 12
    assert search.total_variation == 0.0


def test_queries_give_their_diameter() -> None:
    queries = torch.tensor([[0.0, 0.0], [3.0, 4.0], [1.0, 1.0]])
    assert float(near_tied(make.values(9, 2), make.values(9, 1, seed=3), queries=queries).query_diameter) == 5.0


def test_errors_say_what_to_do() -> None:
    row, keys, values = make.attention(8), make.values(8, 3), make.values(8, 2)
    with pytest.raises(InputError, match="different numbers"):
        reachable_dimension(row[None], keys[:5], values)
    with pytest.raises(InputError, match="either queries"):
        near_tied(keys, values)
    with pytest.raises(InputError, match="one line for each key"):
        search_reachable(row, keys[:4], values)
    with pytest.raises(InputError, match="starts=0"):
        search_reachable(row, keys, values, starts=0)


@pytest.mark.parametrize("size", [0.01, 100.0])
def test_the_residual_is_relative_to_the_output(size: float) -> None:
    """From the definition: how far the head output of the second row is from the first one's, by its length."""
    generator = torch.Generator().manual_seed(0)
    row = torch.softmax(torch.randn(12, generator=generator, dtype=torch.float64), -1)
    keys = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    values = size * torch.randn(12, 2, generator=generator, dtype=torch.float64)
    second = search_reachable(row, keys, values)
    assert second.exists
    output, change = row.numpy() @ values.numpy(), (second.alternative - row).numpy() @ values.numpy()
    assert second.residual == pytest.approx(np.linalg.norm(change) / np.linalg.norm(output), rel=0.5, abs=1e-17)
