"""Effective attention against a per-row float64 SVD written from the definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.core import core_oracle as oracle
from tests.core import make
from whence.core.attention.effective_attention import effective_attention
from whence.errors import InputError

CONSTRAINTS = ("output", "simplex")


def assert_matches(
    attention: Tensor, values: Tensor, visible: Tensor | None, constraint: str, tolerance: float
) -> None:
    wanted = oracle.effective(attention, values, visible, simplex=constraint == "simplex")
    found = effective_attention(attention, values, constraint=constraint, visible=visible)  # type: ignore[arg-type]
    assert found.dtype == (torch.float64 if attention.dtype == torch.float64 else torch.float32)
    assert torch.isfinite(found).all()
    assert float((found.double() - wanted).abs().max()) <= tolerance
    outputs = (attention.double() @ values.double()).to(attention.dtype)
    if torch.isfinite(outputs).all():
        again = effective_attention(attention, values, constraint=constraint, visible=visible, outputs=outputs)  # type: ignore[arg-type]
        assert float((again.double() - wanted).abs().max()) <= 4 * tolerance


def mask_of(kind: str, n: int, seed: int) -> Tensor | None:
    if kind == "full":
        return None
    if kind == "padded":
        return torch.arange(n) < max(1, n - 1 - seed % 5)
    if kind == "causal":
        return make.causal(n)
    if kind == "window":
        return make.window(n, 1 + seed % 9)
    return torch.rand(n, n, generator=make.generator(seed)) < 0.4


@given(
    n=st.integers(1, 24),
    d_v=st.integers(1, 8),
    kind=st.sampled_from(["full", "padded", "causal", "window", "random"]),
    constraint=st.sampled_from(CONSTRAINTS),
    duplicates=st.integers(0, 12),
    zeros=st.integers(0, 2),
    exponent=st.sampled_from([-20, -7, 0, 6, 20]),
    double=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_equals_the_oracle(
    n: int, d_v: int, kind: str, constraint: str, duplicates: int, zeros: int, exponent: int, double: bool, seed: int
) -> None:
    dtype = torch.float64 if double else torch.float32
    visible = mask_of(kind, n, seed)
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
    attention = make.attention(2, n, n, seed=seed + 1, visible=visible, dtype=dtype)
    assert_matches(attention, values, visible, constraint, 1e-8 if double else 2e-6)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("n", [31, 32, 33, 34, 40, 64, 130, 200])
def test_causal_blocks_equal_the_oracle(n: int, constraint: str) -> None:
    visible = make.causal(n)
    attention = make.attention(2, n, n, visible=visible)
    assert_matches(attention, make.values(2, n, 32), visible, constraint, 2e-6)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("duplicates", [8, 70, 139])
def test_causal_with_repeated_tokens(duplicates: int, constraint: str) -> None:
    # Equal values far into the prefix: blocks start rank-deficient and must fall back, then recover.
    visible = make.causal(140)
    values = make.values(2, 140, 8)
    values[:, 1 : duplicates + 1] = values[:, :1]
    assert_matches(make.attention(2, 140, 140, visible=visible), values, visible, constraint, 2e-6)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_causal_batches(side: str, constraint: str) -> None:
    n = 90
    real = torch.arange(n) < torch.tensor([[90], [37], [5]])
    real = real.flip(-1) if side == "left" else real
    visible = make.causal(n) & real[:, None, None, :]
    attention = make.attention(3, 2, n, n, visible=visible)
    assert_matches(attention, make.values(3, 1, n, 8), visible, constraint, 2e-6)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_cached_prefix_and_cross_attention(constraint: str) -> None:
    visible = make.causal(7, 60)
    assert_matches(make.attention(2, 7, 60, visible=visible), make.values(2, 60, 8), visible, constraint, 2e-6)
    assert_matches(make.attention(2, 7, 60), make.values(2, 60, 8), None, constraint, 2e-6)


def test_grouped_query_heads_broadcast() -> None:
    visible = make.causal(50)
    attention = make.attention(2, 3, 4, 50, 50, visible=visible)
    values = make.values(2, 3, 1, 50, 8)
    found = effective_attention(attention, values, visible=visible)
    repeated = effective_attention(attention, values.expand(2, 3, 4, 50, 8), visible=visible)
    assert torch.allclose(found, repeated, atol=1e-7)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_padding_and_batching_change_nothing(constraint: str) -> None:
    attention, values = make.attention(1, 40, 40), make.values(1, 40, 16)
    alone = effective_attention(attention, values, constraint=constraint)  # type: ignore[arg-type]
    big_attention = torch.zeros(2, 64, 64)
    big_attention[0, :40, :40] = attention[0]
    big_attention[0, 40:, :40] = 1 / 40
    big_attention[1] = make.attention(64, 64, seed=5)
    big_values = 1e3 * make.values(2, 64, 16, seed=9)  # padding holds large numbers
    big_values[0, :40] = values[0]
    visible = torch.ones(2, 1, 64, dtype=torch.bool)
    visible[0, :, 40:] = False
    padded = effective_attention(big_attention, big_values, constraint=constraint, visible=visible)  # type: ignore[arg-type]
    assert torch.allclose(padded[0, :40, :40], alone[0], atol=5e-7)
    assert not padded[0, :, 40:].any()


def test_the_invariants() -> None:
    attention, values = make.attention(4, 100, 100, dtype=torch.float64), make.values(4, 100, 16, dtype=torch.float64)
    effective = effective_attention(attention, values)
    assert torch.allclose(effective @ values, attention @ values, atol=1e-13)
    assert torch.allclose(effective_attention(effective, values), effective, atol=1e-13)
    on_simplex = effective_attention(attention, values, constraint="simplex")
    assert torch.allclose(on_simplex.sum(-1), torch.ones(4, 100, dtype=torch.float64), atol=1e-13)
    # The value bias is invisible on the simplex.
    shifted = effective_attention(attention, values + 3.0, constraint="simplex")
    assert torch.allclose(shifted, on_simplex, atol=1e-12)


def test_identified_rows_come_back_unchanged() -> None:
    attention, values = make.attention(3, 20, 20), make.values(3, 20, 32)
    found = effective_attention(attention, values)
    assert torch.equal(found, attention)
    assert found.data_ptr() != attention.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("kind", ["full", "causal", "window"])
def test_half_precision_is_measured_in_single(dtype: torch.dtype, kind: str, constraint: str) -> None:
    visible = mask_of(kind, 70, 5)
    attention = make.attention(2, 70, 70, visible=visible).to(dtype)
    values = make.values(2, 70, 16).to(dtype)
    assert_matches(attention, values, visible, constraint, 2e-6)


def test_a_row_that_sees_nothing_is_zero() -> None:
    visible = make.causal(30).clone()
    visible[4] = False
    attention = make.attention(30, 30, visible=visible)
    attention[4] = 1 / 30  # what softmax makes of a fully masked row
    found = effective_attention(attention, make.values(30, 4), visible=visible)
    assert not found[4].any()
    assert torch.isfinite(found).all()


def test_errors_say_what_to_do() -> None:
    attention, values = make.attention(2, 6, 6), make.values(2, 6, 3)
    with pytest.raises(InputError, match=r"6 keys but values \(2, 5, 3\) has 5"):
        effective_attention(attention, values[:, :5])
    with pytest.raises(InputError, match="unflatten"):
        effective_attention(make.attention(6, 6, 6), values)
    with pytest.raises(InputError, match="simplex"):
        effective_attention(attention, values, constraint="sphere")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="boolean"):
        effective_attention(attention, values, visible=torch.ones(6, 6))
    with pytest.raises(InputError, match="inverted"):
        effective_attention(attention, values, visible=~make.causal(6) | torch.eye(6, dtype=torch.bool))
    with pytest.raises(InputError, match="expected"):
        effective_attention(attention, values, outputs=torch.zeros(2, 6, 4))
    with pytest.raises(InputError, match="torch tensor"):
        effective_attention(attention.numpy(), values)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="floating-point"):
        effective_attention(attention.long(), values)
    for broken in (attention, values):
        spoiled = broken.clone()
        spoiled[0, 0, 0] = torch.nan
        pair = (spoiled, values) if broken is attention else (attention, spoiled)
        with pytest.raises(InputError, match="1 NaN or infinite"):
            effective_attention(*pair)
        with pytest.raises(InputError, match="1 NaN or infinite"):
            effective_attention(*pair, visible=torch.ones(6, 6, dtype=torch.bool))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("visible", [None, make.causal(7)])
def test_heads_in_chunks_are_heads_at_once(
    monkeypatch: pytest.MonkeyPatch, known: bool, visible: Tensor | None
) -> None:
    """Five heads, two at a time; outputs by head, or one for all, which go at once."""
    attention, values = (
        make.attention(5, 7, 7, visible=visible, dtype=torch.float64),
        make.values(5, 7, 3, dtype=torch.float64),
    )
    outputs = attention @ values if known else None
    whole = effective_attention(attention, values, visible=visible, outputs=outputs)
    monkeypatch.setattr("whence.core.attention.effective_attention._CHUNK", 2 * 7 * 3)
    torch.testing.assert_close(effective_attention(attention, values, visible=visible, outputs=outputs), whole)
    for head in range(5):
        own = None if outputs is None else outputs[head]
        one = effective_attention(attention[head], values[head], visible=visible, outputs=own)
        torch.testing.assert_close(whole[head], one)


@pytest.mark.parametrize("condition", [1e2, 1e4])
def test_float64_is_as_exact_under_a_causal_mask_as_the_condition_allows(condition: float) -> None:
    """Each row from its own prefix by an SVD; blocks of rows must lose no digits that the values leave."""
    g = torch.Generator().manual_seed(0)
    n, d = 200, 16
    stretch = torch.logspace(0, -math.log10(condition), d, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64))[0]
    values = torch.randn(n, d, generator=g, dtype=torch.float64) * stretch @ turn
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    attention = torch.randn(n, n, generator=g, dtype=torch.float64).masked_fill(~seen, -torch.inf).softmax(-1)
    expected = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        u, s, _ = torch.linalg.svd(values[: i + 1], full_matrices=False)
        kept = u[:, s > s[0] * max(i + 1, d) * torch.finfo(torch.float64).eps]
        expected[i, : i + 1] = attention[i, : i + 1] @ kept @ kept.T
    error = (effective_attention(attention[None], values[None], visible=seen)[0] - expected).abs().max()
    assert float(error) < 5 * torch.finfo(torch.float64).eps * condition


@pytest.mark.parametrize("size", [10.0, 1e3, 1e4])
def test_two_keys_that_dwarf_all_before_them_cost_no_digits(size: float) -> None:
    """A causal text in float32 in which the column space turns at once; each row from its own prefix by an SVD."""
    g = torch.Generator().manual_seed(0)
    n, d = 200, 16
    values = torch.randn(n, d, generator=g)
    values[120:122] *= size
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    attention = torch.randn(n, n, generator=g).masked_fill(~seen, -torch.inf).softmax(-1)
    expected = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        u, s, _ = torch.linalg.svd(values[: i + 1].double(), full_matrices=False)
        kept = u[:, s > s[0] * max(i + 1, d) * torch.finfo(torch.float32).eps]
        expected[i, : i + 1] = attention[i, : i + 1].double() @ kept @ kept.T
    error = (effective_attention(attention[None], values[None], visible=seen)[0] - expected).abs().max()
    assert float(error) < 1e-7
