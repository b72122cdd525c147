"""Witnesses are attention rows with the same output; controls are not."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core import make
from whence.core.attention.alternatives import alternative_attention
from whence.core.attention.certificate import certify_row
from whence.core.attention.witness import random_row_at, witness_row
from whence.errors import InputError


@given(n=st.integers(2, 25), d_v=st.integers(1, 8), exponent=st.sampled_from([-20, 0, 20]), seed=st.integers(0, 1000))
def test_a_witness_is_a_row_with_the_same_output(n: int, d_v: int, exponent: int, seed: int) -> None:
    visible = torch.arange(n) != seed % n
    row = make.attention(n, seed=seed, visible=visible, dtype=torch.float64)
    values = make.values(n, d_v, seed=seed, scale=10.0**exponent, duplicates=n // 4, dtype=torch.float64)
    witness = witness_row(row, values, visible=visible, starts=2)
    x = witness.alternative
    assert float(x.min()) >= 0.0
    assert float(x.sum()) == pytest.approx(1.0, abs=1e-14)
    assert not x[~visible].any()
    assert witness.residual <= 1e-9
    assert witness.total_variation == pytest.approx(0.5 * float((x - witness.row).abs().sum()))
    certificate = certify_row(row, values, visible=visible, top=None, orders=False)
    if certificate.dimension == 0:
        assert witness.total_variation <= 1e-6
    else:
        assert witness.total_variation > 0
    assert (x[certificate.keys] <= certificate.upper + 1e-8).all()


def test_small_polytopes_against_brute_force() -> None:
    # Every basis of [V, 1] that gives a valid row is a vertex, and total variation is largest at one.
    ratios = []
    for seed in range(8):
        row = make.attention(9, seed=seed, dtype=torch.float64)
        values = make.values(9, 2, seed=seed, dtype=torch.float64)
        matrix = torch.cat([values, torch.ones(9, 1, dtype=torch.float64)], 1)
        best = 0.0
        for basis in combinations(range(9), 3):
            x = torch.zeros(9, dtype=torch.float64)
            x[list(basis)] = torch.linalg.solve(matrix[list(basis)].T, row @ matrix)
            if float(x.min()) >= -1e-12:
                best = max(best, 0.5 * float((x - row).abs().sum()))
        ratios.append(witness_row(row, values).total_variation / best)
    assert max(ratios) <= 1 + 1e-9
    assert min(ratios) >= 0.95
    assert sum(ratios) / len(ratios) >= 0.98


@given(n=st.integers(2, 20), share=st.floats(0.0, 1.0), seed=st.integers(0, 100))
def test_a_control_lies_exactly_at_the_distance(n: int, share: float, seed: int) -> None:
    row = make.attention(n, seed=seed, dtype=torch.float64)
    distance = share * (1 - float(row.min()))
    other = random_row_at(row, distance, seed=seed)
    assert 0.5 * float((other - row).abs().sum()) == pytest.approx(distance, abs=1e-9)
    assert float(other.sum()) == pytest.approx(1.0)
    assert float(other.min()) >= 0


def test_a_control_changes_the_output_and_stays_on_visible_keys() -> None:
    visible = torch.arange(30) < 25
    row, values = make.attention(30, visible=visible), make.values(30, 4)
    witness = witness_row(row, values, visible=visible)
    control = random_row_at(row, witness.total_variation, visible=visible)
    assert not control[25:].any()
    assert float(((control - witness.row) @ values.double()).norm()) > 1e-2
    assert not torch.equal(control, random_row_at(row, witness.total_variation, visible=visible, seed=1))


@pytest.mark.parametrize("kind", ["full", "causal", "grouped"])
def test_alternatives_for_all_rows_are_valid_and_close_to_the_witnesses(kind: str) -> None:
    visible = make.causal(40) if kind == "causal" else None
    attention = make.attention(2, 40, 40, visible=visible)
    values = make.values(1 if kind == "grouped" else 2, 40, 8)
    found = alternative_attention(attention, values, visible=visible, rounds=1)
    assert found.rounds == 1
    x = found.attention
    assert float(x.min()) >= 0.0
    assert torch.allclose(x.sum(-1), attention.double().sum(-1), atol=1e-12)
    assert float(found.residual.max()) <= 1e-9
    output = attention.double() @ values.double()
    assert torch.allclose(x @ values.double(), output, atol=1e-9)
    if visible is not None:
        assert not x[:, ~visible].any()
    singles = [
        witness_row(attention[1, i], values[-1], visible=None if visible is None else visible[i]).total_variation
        for i in range(0, 40, 7)
    ]
    assert float(found.total_variation[1, ::7].mean()) >= 0.8 * sum(singles) / len(singles)


def test_an_exhausted_budget_still_gives_valid_rows() -> None:
    attention, values = make.attention(3, 30, 30), make.values(3, 30, 8)
    found = alternative_attention(attention, values, budget=1e-9)
    assert found.stopped
    assert found.rounds == 0
    assert float(found.residual.max()) <= 1e-9
    assert float(found.total_variation.max()) > 0
    enough = alternative_attention(attention, values, budget=600.0)
    assert not enough.stopped
    assert torch.equal(enough.attention, alternative_attention(attention, values).attention)


def test_rounds_give_the_same_map_whatever_the_threads() -> None:
    attention, values = make.attention(3, 70, 70), make.values(3, 70, 8)
    one, four = (alternative_attention(attention, values, rounds=2, workers=w) for w in (1, 4))
    assert torch.equal(one.attention, four.attention)
    assert not one.stopped
    assert one.rounds == 2


def test_errors_say_what_to_do() -> None:
    row, values = make.attention(8), make.values(8, 3)
    with pytest.raises(InputError, match="top=0"):
        witness_row(row, values, top=0)
    with pytest.raises(InputError, match="lightest"):
        random_row_at(row, 1.5)
    with pytest.raises(InputError, match="budget"):
        alternative_attention(row[None], values, budget=0.0)
    with pytest.raises(InputError, match="negative"):
        alternative_attention(-row[None], values)


def test_only_the_rows_asked_for_are_searched() -> None:
    attention, values = make.attention(2, 60, 60), make.values(2, 60, 8)
    asked = torch.zeros(2, 60, dtype=torch.bool)
    asked[0, 5:9] = asked[1, 40] = True
    some, every, none = (
        alternative_attention(attention, values, rounds=rounds, rows_searched=rows)
        for rounds, rows in ((1, asked), (1, None), (0, None))
    )
    assert torch.equal(some.searched, asked)
    assert torch.allclose(some.attention[asked], every.attention[asked], atol=1e-9)
    assert torch.equal(some.attention[~asked], none.attention[~asked])
    assert float(some.total_variation[asked].min()) > float(none.total_variation[asked].min())
