"""Ranks, condition numbers and leverage against the definition, head by head and row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.core import core_oracle as oracle
from tests.core import make
from whence.core.attention.leverage import leverage
from whence.core.attention.null_space import null_space
from whence.errors import InputError


def check(values: Tensor, visible: Tensor | None) -> None:
    """values (b, n, d), visible (n_query, n) or None."""
    space = null_space(values, visible=visible)
    found = {c: leverage(values, constraint=c, visible=visible) for c in ("output", "simplex")}
    masks = torch.ones(1, values.shape[1], dtype=torch.bool) if visible is None else visible
    eps = oracle.eps_of(values.dtype)
    for b in range(len(values)):
        for i, seen in enumerate(masks):
            at = (b,) if visible is None else (b, i)
            assert int(space.length[at]) == int(seen.sum())
            if not bool(seen.any()):
                assert int(space.rank[at]) == int(space.simplex_rank[at]) == 0
                continue
            for simplex, rank, condition in (
                (False, space.rank, space.condition),
                (True, space.simplex_rank, space.simplex_condition),
            ):
                r, s, q = oracle.spectrum(values[b][seen], simplex=simplex, eps=eps)
                assert int(rank[at]) == r
                kept = r - 1 if simplex else r
                if kept:
                    assert float(condition[at]) == pytest.approx(float(s[0] / s[kept - 1]), rel=6e-2)
                else:
                    assert torch.isnan(condition[at])
                h = found["simplex" if simplex else "output"][at]
                assert torch.allclose(h[seen], q.square().sum(1), atol=1e-7)
                assert not h[~seen].any()


@given(
    n=st.integers(1, 20),
    d_v=st.integers(1, 8),
    kind=st.sampled_from(["full", "causal", "window", "random", "padded"]),
    duplicates=st.integers(0, 10),
    zeros=st.integers(0, 2),
    exponent=st.sampled_from([-20, 0, 20]),
    double=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_equals_the_oracle(
    n: int, d_v: int, kind: str, duplicates: int, zeros: int, exponent: int, double: bool, seed: int
) -> None:
    dtype = torch.float64 if double else torch.float32
    values = make.values(
        2,
        n,
        d_v,
        seed=seed,
        scale=10.0**exponent,
        duplicates=min(duplicates, n // 2),
        zeros=min(zeros, n - 1),
        dtype=dtype,
    )
    masks = {
        "full": None,
        "causal": make.causal(n),
        "window": make.window(n, 1 + seed % 7),
        "random": torch.rand(n, n, generator=make.generator(seed)) < 0.5,
        "padded": (torch.arange(n) < max(1, n - 2)).expand(3, n),
    }
    check(values, masks[kind])


@pytest.mark.parametrize("repeated", [0, 50])
def test_long_causal_prefixes(repeated: int) -> None:
    values = make.values(2, 150, 16)
    values[:, 3 : 3 + repeated] = values[:, :1]
    check(values, make.causal(150))


def test_a_combination_is_dependent_up_to_the_rounding_of_its_dtype() -> None:
    values = make.values(12, 20, dtype=torch.float64)
    values[11] = values[:11].mean(0)
    assert int(null_space(values).rank) == 11
    assert int(null_space(values.float()).rank) == 11  # float32 rounding hides the dependence from float64's eps
    assert int(null_space(values.float().double()).rank) == 12
    assert int(null_space(values.bfloat16()).rank) == 12  # rounded far beyond float32: no longer dependent


def test_identical_rows_have_rank_one_and_nothing_else_on_the_simplex() -> None:
    values = make.values(1, 8).expand(50, 8) + torch.zeros(50, 8)
    space = null_space(values)
    assert (int(space.rank), int(space.simplex_rank), int(space.simplex_null_dimension)) == (1, 1, 49)


def test_every_head_has_its_own_rank_and_leverage_adds_up() -> None:
    values = torch.stack([make.values(30, 8), 1e-6 * make.values(30, 8, duplicates=15)])
    values[1, :, 4:] = 0.0
    space = null_space(values)
    assert space.rank.tolist() == [8, 4]
    assert torch.allclose(leverage(values).sum(-1), space.simplex_rank.double())


def test_frame_has_one_line_for_each_head_and_row() -> None:
    frame = null_space(make.values(3, 10, 4), visible=make.causal(10)).to_frame()
    assert len(frame) == 30
    assert frame["null_dimension"].max() == 6
    assert list(frame["axis_1"][:10]) == list(range(10))
    assert len(null_space(make.values(10, 4)).to_frame()) == 1


def test_errors_say_what_to_do() -> None:
    with pytest.raises(InputError, match="add a query dimension"):
        null_space(make.values(5, 2), visible=torch.ones(5, dtype=torch.bool))
    with pytest.raises(InputError, match="broadcastable"):
        leverage(make.values(5, 2), visible=torch.ones(3, 4, dtype=torch.bool))
    with pytest.raises(InputError, match="at least one key"):
        null_space(torch.zeros(0, 4))
    with pytest.raises(InputError, match="broadcast"):
        null_space(make.values(2, 5, 2), visible=torch.ones(3, 5, 5, dtype=torch.bool))


@pytest.mark.parametrize("mask", ["none", "shared", "by head", "by layer and head", "one row"])
def test_a_part_is_what_its_values_give(mask: str) -> None:
    values = make.values(2, 3, 9, 4, duplicates=2)
    visible = {
        "none": None,
        "shared": make.causal(9),
        "by head": torch.stack([make.causal(9), make.window(9, 3), torch.ones(9, 9, dtype=torch.bool)]),
        "by layer and head": torch.rand(2, 3, 5, 9, generator=make.generator(2)) < 0.7,
        "one row": torch.rand(2, 3, 1, 9, generator=make.generator(3)) < 0.7,
    }[mask]
    space = null_space(values, visible=visible)
    for i in range(2):
        own = None if visible is None else visible[i] if visible.dim() == 4 else visible
        expected, part = null_space(values[i], visible=own), space[i]
        for name, tensor in expected.to_dict().items():
            torch.testing.assert_close(getattr(part, name), tensor, equal_nan=True, rtol=1e-5, atol=0)
        assert part[1].rank.equal(expected.rank[1])
