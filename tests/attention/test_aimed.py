"""Sparse, spread and aimed rows with the same output, and the keys that can be dropped."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize

import whence
from conformance.zoo import build
from whence.core.attention.aimed import aimed_row
from whence.errors import InputError
from whence.model.load import Model


def head(n: int, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    row = torch.softmax(1.5 * torch.randn(n, generator=g, dtype=torch.float64), -1)
    return row, torch.randn(n, width, generator=g, dtype=torch.float64)


def assert_same(row, other, values):
    assert float(other.min()) >= 0
    assert float(other.sum()) == pytest.approx(1.0, abs=1e-11)
    assert torch.linalg.vector_norm((other - row) @ values) <= 1e-10 * torch.linalg.vector_norm(row @ values)


@pytest.mark.parametrize("seed", range(5))
def test_a_sparse_row_needs_at_most_one_key_more_than_the_values_are_wide(seed):
    row, values = head(40, 6, seed)
    found = aimed_row(row, values, "sparse")
    assert_same(row, found.alternative, values)
    assert int((found.alternative > 0).sum()) <= 7


@pytest.mark.parametrize("seed", range(3))
def test_the_spread_row_has_the_largest_entropy(seed):
    """Against a general convex solver."""
    row, values = head(12, 3, seed)
    found = aimed_row(row, values, "spread").alternative
    assert_same(row, found, values)
    equal = np.vstack([values.numpy().T, np.ones(12)])
    slow = minimize(
        lambda x: float((x * np.log(np.clip(x, 1e-12, None))).sum()),
        row.numpy(),
        constraints={"type": "eq", "fun": lambda x: equal @ (x - row.numpy())},
        bounds=[(1e-12, 1)] * 12,
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-14},
    )
    assert float(-(found * found.log()).sum()) >= -slow.fun - 1e-7
    np.testing.assert_allclose(found.numpy(), slow.x, atol=1e-4)


def test_costs_are_minimised():
    row, values = head(20, 4, 3)
    cost = torch.linspace(-1, 1, 20)
    found = aimed_row(row, values, cost)
    equal = np.vstack([values.numpy().T, np.ones(20)])
    best = linprog(cost.double().numpy(), A_eq=equal, b_eq=equal @ row.numpy(), bounds=(0, None)).fun
    assert float(cost.double() @ found.alternative) == pytest.approx(best, abs=1e-9)
    assert_same(row, found.alternative, values)


def test_a_unique_row_has_no_other():
    row, values = head(4, 6, 1)
    for aim in ("sparse", "spread"):
        torch.testing.assert_close(aimed_row(row, values, aim).alternative, row, atol=1e-9, rtol=0)


@pytest.fixture(scope="module")
def trace():
    ids = torch.randint(5, 60, (1, 40), generator=torch.Generator().manual_seed(0))
    return whence.trace(Model(build("llama").model), {"input_ids": ids})


def test_side_by_side_in_the_model(trace):
    rows = {aim: whence.witness(trace, 0, 0, 39, aim=aim) for aim in ("sparse", "spread", "far")}
    assert (rows["sparse"].alternative > 0).sum() <= 17 < (rows["spread"].alternative > 0).sum()
    for found in rows.values():
        outcome = found.verify()
        assert outcome.logits < 1e-5 < outcome.control_logits
    with pytest.raises(InputError, match="aim='wide'"):
        whence.witness(trace, 0, 0, 39, aim="wide")


def test_droppable_keys_are_dropped_all_at_once(trace):
    found = whence.droppable(trace, 1, 2, list(range(20, 40)))
    assert found.check()
    assert int(found.needed.max()) <= 17
    assert int(found.dropped.sum()) > 100
    assert found.verification.logits < 1e-5 < found.verification.control_logits
    assert float(found.error(found.top).median()) > 1e-3  # dropping by mass does change the output
    assert "without any change" in found.sentences()[0]
    assert len(found.to_frame()) == 20
    from dataclasses import replace

    assert not replace(found, sparse=found.top).check()
