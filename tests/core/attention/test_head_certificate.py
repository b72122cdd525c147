"""The dual pool: valid for every row of the head, exact on the rows it was solved for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.core import make
from whence.core.attention.certificate import certify_row
from whence.core.attention.head_certificate import certify_head
from whence.errors import InputError


@pytest.mark.parametrize("kind", ["full", "causal", "random"])
def test_bounds_are_valid_for_every_row_and_exact_for_the_solved(kind: str) -> None:
    n = 20
    visible = {
        "full": None,
        "causal": make.causal(n),
        "random": (torch.rand(n, n, generator=make.generator(3)) < 0.7) | torch.eye(n, dtype=torch.bool),
    }[kind]
    attention, values = make.attention(n, n, visible=visible), make.values(n, 4)
    head = certify_head(attention, values, rows=5, visible=visible)
    assert head.check()
    assert len(head.rows) == 5
    for i in range(n):
        exact = certify_row(
            attention[i], values, top=None, visible=None if visible is None else visible[i], orders=False
        )
        assert (head.lower[i][exact.keys] <= exact.lower + 1e-9).all()
        assert (head.upper[i][exact.keys] >= exact.upper - 1e-9).all()
        if i in head.rows.tolist():
            assert torch.allclose(head.upper[i][exact.keys], exact.upper, atol=1e-8)
            assert torch.allclose(head.lower[i][exact.keys], exact.lower, atol=1e-8)
    hidden = torch.zeros(n, n, dtype=torch.bool) if visible is None else ~visible
    assert not head.upper[hidden].any()


def test_the_pool_is_much_tighter_than_nothing() -> None:
    attention, values = make.attention(40, 40), make.values(40, 16)
    head = certify_head(attention, values, rows=10)
    top = attention.argmax(-1, keepdim=True)
    assert float(head.upper.gather(1, top).mean()) < 0.9


def test_tampering_fails() -> None:
    head = certify_head(make.attention(10, 12), make.values(12, 3), rows=3)
    assert not dataclasses.replace(head, upper=head.upper - 1e-3).check()
    assert not dataclasses.replace(head, duals=head.duals * 1.01).check()


def test_errors_say_what_to_do() -> None:
    with pytest.raises(InputError, match="one head"):
        certify_head(make.attention(2, 5, 5), make.values(2, 5, 3))
    with pytest.raises(InputError, match="rows=0"):
        certify_head(make.attention(5, 5), make.values(5, 3), rows=0)
    with pytest.raises(InputError, match="not an attention row"):
        certify_head(2 * make.attention(5, 5), make.values(5, 3))
