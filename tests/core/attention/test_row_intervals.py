"""Row after row: the ends that cold linear programs give, and alternatives that are attention with the same output."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from tests.core import make
from whence.core.attention.row_intervals import row_intervals
from whence.errors import InputError


def ends(row: Tensor, values: Tensor, key: int) -> tuple[float, float]:
    """Straight from the definition: the least and the most that any attention row with this output gives to `key`."""
    a = row.double() / row.double().sum()
    matrix = np.vstack([values.double().numpy().T, np.ones(len(a))])
    cost = np.eye(len(a))[key]
    right = matrix @ a.numpy()
    low, high = (linprog(side * cost, A_eq=matrix, b_eq=right) for side in (1, -1))
    return float(low.fun), -float(high.fun)


@pytest.mark.parametrize("kind", ["full", "causal", "random"])
def test_intervals_are_those_of_cold_programs(kind: str) -> None:
    n = 18
    visible = {
        "full": None,
        "causal": make.causal(n),
        "random": (torch.rand(n, n, generator=make.generator(3)) < 0.7) | torch.eye(n, dtype=torch.bool),
    }[kind]
    attention, values = make.attention(n, n, visible=visible), make.values(n, 4)
    seen = torch.ones(n, n, dtype=torch.bool) if visible is None else visible
    keys = attention.masked_fill(~seen, -1.0).topk(5, -1).indices
    keys = keys.masked_fill(~seen.gather(-1, keys), -1)
    found = list(row_intervals(attention, values, keys, visible=visible))
    assert [f.query for f in found] == list(range(n))
    for f in found:
        mine = seen[f.query]
        place = {int(k): i for i, k in enumerate(mine.nonzero().squeeze(-1))}
        row = attention[f.query].double() / attention[f.query].double().sum()
        for k, key in enumerate(keys[f.query].tolist()):
            if key < 0:
                assert float(f.upper[k]) == 0.0
                continue
            low, high = ends(row[mine], values[mine], place[key])
            assert float(f.lower[k]) == pytest.approx(low, abs=1e-6)
            assert float(f.upper[k]) == pytest.approx(high, abs=1e-6)
            assert f.lower[k] - 1e-9 <= row[key] <= f.upper[k] + 1e-9
        assert float(f.other.min()) >= 0.0
        assert float(f.other.sum()) == pytest.approx(1.0)
        assert not bool(f.other[~mine].any())
        assert torch.allclose(f.other @ values.double(), row @ values.double(), atol=1e-6)


def test_an_alternative_is_far_where_there_is_room_and_the_row_itself_where_there_is_none() -> None:
    attention = make.attention(12, 12)
    wide = next(row_intervals(attention, make.values(12, 2), attention.topk(4, -1).indices))
    assert float((wide.other - attention[0]).abs().sum()) / 2 > 0.3
    unique = next(row_intervals(attention, make.values(12, 12), attention.topk(4, -1).indices))
    assert torch.allclose(unique.other, attention[0].double(), atol=1e-6)
    assert float((unique.upper - unique.lower).max()) < 1e-5


def test_rows_in_the_order_asked_until_told_to_stop() -> None:
    attention, values = make.attention(6, 9), make.values(9, 3)
    keys = attention.topk(2, -1).indices
    asked = count()
    done = [f.query for f in row_intervals(attention, values, keys, rows=[4, 1, 2], stop=lambda: next(asked) == 2)]
    assert done == [4, 1]


def test_rows_that_see_nothing_are_left_out_and_several_heads_are_refused() -> None:
    visible = torch.ones(4, 5, dtype=torch.bool)
    visible[2] = False
    attention = make.attention(4, 5, visible=visible)
    keys = attention.topk(2, -1).indices
    assert [f.query for f in row_intervals(attention, make.values(5, 2), keys, visible=visible)] == [0, 1, 3]
    with pytest.raises(InputError, match="expected one head"):
        next(row_intervals(attention[None], make.values(1, 5, 2), keys))
