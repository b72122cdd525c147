"""Equal values: who is found equal, and what the independent rows of a causal head then are."""

from __future__ import annotations

import pytest
import torch

from tests.core import core_oracle as oracle
from tests.core import make
from whence.core.attention.effective_attention import effective_attention
from whence.core.attention.leverage import leverage
from whence.core.attention.null_space import null_space
from whence.core.numerics.duplicate_keys import duplicate_means, early_prefixes, first_equal_rows


def repeated(
    n: int, d: int, tokens: int, *, heads: int = 2, seed: int = 3, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Values of a text with few distinct tokens and no positions."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(heads, tokens, d, generator=generator, dtype=torch.float64).to(dtype)
    return table[:, torch.randint(tokens, (n,), generator=generator)]


def test_leaders_are_the_first_equal_rows() -> None:
    values = [[[1.0, 2.0], [0.0, -0.0], [1.0, 2.0], [-0.0, 0.0], [2.0, 1.0], [1.0, 2.0 + 1e-15]]]
    assert first_equal_rows(torch.tensor(values, dtype=torch.float64)).tolist() == [[0, 1, 0, 1, 4, 5]]


def test_leaders_equal_a_double_loop() -> None:
    values = repeated(60, 3, 7).double()
    for head, found in zip(values, first_equal_rows(values), strict=True):
        for j, row in enumerate(head):
            assert int(found[j]) == next(k for k in range(60) if torch.equal(head[k], row))


@pytest.mark.parametrize("constraint", ["output", "simplex"])
@pytest.mark.parametrize("tokens", [3, 12, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_repeated_tokens_equal_the_oracle(tokens: int, constraint: str, dtype: torch.dtype) -> None:
    n, d = 70, 16
    values = repeated(n, d, tokens, dtype=dtype)[:, None]
    visible = make.causal(n)
    attention = make.attention(2, 3, n, n, visible=visible, dtype=dtype)
    found = effective_attention(attention, values, visible=visible, constraint=constraint)  # type: ignore[arg-type]
    wanted = oracle.effective(attention, values, visible, simplex=constraint == "simplex")
    assert float((found.double() - wanted).abs().max()) < (1e-9 if dtype == torch.float64 else 2e-6)
    lever = leverage(values[:, 0], constraint=constraint, visible=visible)  # type: ignore[arg-type]
    for head in range(2):
        for i in range(n):
            _, _, q = oracle.spectrum(
                values[head, 0, : i + 1], simplex=constraint == "simplex", eps=oracle.eps_of(dtype)
            )
            assert torch.allclose(lever[head, i, : i + 1], q.square().sum(1), atol=1e-7)


def test_repeated_tokens_with_padding_on_the_left() -> None:
    n = 50
    real = torch.arange(n) >= 9
    visible = make.causal(n) & real
    values, attention = repeated(n, 12, 9, heads=1), make.attention(1, n, n, visible=visible)
    found = effective_attention(attention, values, visible=visible)
    assert float((found - oracle.effective(attention, values, visible, simplex=False)).abs().max()) < 2e-6


def test_settled_only_where_proved() -> None:
    values = make.values(3, 20, 8, dtype=torch.float64)
    values[1, 5] = values[1, 2]  # equal
    values[2, 5] = values[2, 2] + values[2, 3]  # dependent, not equal
    early = early_prefixes(values, torch.ones(3, 20, dtype=torch.bool), 1e-7, simplex=False)
    assert early.has_duplicates.tolist() == [False, True, False]
    assert early.independent.sum(-1).tolist() == [8, 9, 5]


def test_means_keep_what_the_output_sees() -> None:
    values = repeated(30, 8, 5, heads=1)[0]
    mask = make.causal(30)
    attention = make.attention(30, 30, visible=mask)
    means = duplicate_means(attention, first_equal_rows(values.double()[None])[0], mask)
    assert torch.allclose(means.float() @ values, attention @ values, atol=1e-5)
    assert not means[~mask].any()


def test_an_absent_key_is_nobodys_double() -> None:
    # Padding is zero inside; a real key of value 0 (a sink, say) must still count among the distinct ones.
    values = torch.tensor([[[7.0], [0.0], [1.0], [2.0], [3.0]]])
    visible = make.causal(5) & (torch.arange(5) > 0)
    attention = make.attention(1, 5, 5, visible=visible)
    found = effective_attention(attention, values, visible=visible, constraint="simplex")
    wanted = oracle.effective(attention, values, visible, simplex=True)
    assert float((found - wanted).abs().max()) < 1e-6
    assert null_space(values, visible=visible).simplex_rank.tolist() == [[0, 1, 2, 2, 2]]
