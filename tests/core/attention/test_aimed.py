"""Aimed rows at the edges: values of any size, off centre, of low rank, under a mask; what they report of themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.core import make
from whence.core.attention import aimed
from whence.core.attention.aimed import aimed_row


@pytest.mark.parametrize("aim", ["sparse", "spread", "cost"])
@pytest.mark.parametrize("scale", [1.0, 1e-90, 1e90])
@pytest.mark.parametrize("kind", ["plain", "off centre", "low rank", "zero", "masked"])
def test_the_output_is_kept_and_the_distance_is_that_of_the_rows(aim: str, scale: float, kind: str) -> None:
    n, width = 24, 4
    visible = torch.arange(n) < (17 if kind == "masked" else n)
    row = make.attention(n, seed=5, visible=visible, dtype=torch.float64)
    values = make.values(n, width, duplicates=5, dtype=torch.float64)
    if kind == "off centre":
        values = values + 300.0
    elif kind == "low rank":
        values = torch.cat(
            [values[:, :2], values[:, :2] @ torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)], 1
        )
    elif kind == "zero":
        values = torch.zeros_like(values)
    wanted = torch.linspace(-1, 1, n, dtype=torch.float64) if aim == "cost" else aim
    answer = aimed_row(row, values * scale, wanted, visible=visible)
    other = answer.alternative
    assert float(other.min()) >= 0
    assert not other[~visible].any()
    assert float(other.sum()) == pytest.approx(1.0, abs=1e-11)
    assert float(((other - row) @ values).abs().max()) <= 1e-9 * float((row @ values).abs().max())
    assert answer.total_variation == pytest.approx(0.5 * float((other - row).abs().sum()), abs=1e-12)
    assert answer.total_variation > 0.01
    if aim == "spread" and kind == "zero":  # nothing is fixed but the sum: the uniform row
        torch.testing.assert_close(other, torch.full((n,), 1 / n, dtype=torch.float64), atol=1e-9, rtol=0)


def test_a_vertex_that_cannot_be_polished_is_found_by_least_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver's vertex spoiled beyond repair: the row told has the same output on at most d_v + 1 keys all the same."""
    generator = torch.Generator().manual_seed(0)
    row = torch.softmax(torch.randn(20, generator=generator, dtype=torch.float64), -1)
    values = torch.randn(20, 5, generator=generator, dtype=torch.float64)
    monkeypatch.setattr(aimed, "_vertex", lambda row, _values, _cost: np.full(len(row), 1 / len(row)))
    sparse = aimed_row(row, values, "sparse").alternative
    assert int((sparse > 0).sum()) <= 6
    assert float(sparse.min()) >= 0
    assert float(sparse.sum()) == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(sparse @ values, row @ values, atol=1e-12, rtol=0)
