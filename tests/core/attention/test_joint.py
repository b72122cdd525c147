"""The layer's view against a null space computed directly."""

from __future__ import annotations

import pytest
import torch

from tests.core import make
from whence.core.attention.joint import joint_identifiability
from whence.errors import InputError


@pytest.mark.parametrize(("heads", "n", "d_v", "width"), [(2, 5, 3, 6), (3, 12, 4, 12), (2, 3, 4, 8), (2, 9, 4, 5)])
def test_joint_null_dimension_is_that_of_the_stacked_map(heads: int, n: int, d_v: int, width: int) -> None:
    output = make.values(heads, d_v, width, seed=3, dtype=torch.float64)
    values = make.values(heads, n, d_v, dtype=torch.float64) + 2.0
    joint = joint_identifiability(output, values)
    # (moves of all heads) → (block output; sum of each head's move)
    matrix = torch.zeros(heads * n, width + heads, dtype=torch.float64)
    for h in range(heads):
        matrix[h * n : (h + 1) * n, :width] = values[h] @ output[h]
        matrix[h * n : (h + 1) * n, width + h] = 1.0
    assert joint.null_dimension == heads * n - int(torch.linalg.matrix_rank(matrix))
    assert joint.determines_heads == (heads * d_v <= width)
    assert joint.rank == min(heads * d_v, width)


def test_generic_dimension_and_condition() -> None:
    joint = joint_identifiability(make.values(4, 8, 32), make.values(4, 20, 8))
    assert joint.null_dimension == joint.generic_null_dimension == 4 * 19 - 32
    s = torch.linalg.svdvals(make.values(4, 8, 32).double().reshape(32, 32))
    assert joint.condition == pytest.approx(float(s[0] / s[-1]), rel=1e-9)


def test_added_heads_cannot_be_told_apart() -> None:
    joint = joint_identifiability(make.values(1, 4, 16).expand(3, 4, 16))
    assert not joint.determines_heads
    assert joint.rank == 4
    assert joint.condition == float("inf")
    assert joint.to_dict()["null_dimension"] is None


def test_hidden_keys_do_not_count() -> None:
    output, values = make.values(2, 4, 8), make.values(2, 12, 4)
    visible = torch.arange(12) < 7
    assert (
        joint_identifiability(output, values, visible=visible).null_dimension
        == joint_identifiability(output, values[:, :7]).null_dimension
    )


def test_small_singular_values_of_an_output_matrix_count() -> None:
    # Those of real output matrices are 3e-5 of the largest: far above any rounding of float32 weights.
    heads, d_v, n = 4, 8, 20
    u, _ = torch.linalg.qr(make.values(32, 32, seed=5, dtype=torch.float64))
    v, _ = torch.linalg.qr(make.values(32, 32, seed=6, dtype=torch.float64))
    s = torch.logspace(0, -4.5, 32, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        output = ((u * s) @ v.T).to(dtype).reshape(heads, d_v, 32)
        joint = joint_identifiability(output, make.values(heads, n, d_v))
        assert joint.determines_heads
        assert joint.condition == pytest.approx(10**4.5, rel=1e-2)
        # Every head output is determined, so nothing is free but what each head leaves free on its own.
        assert joint.null_dimension == heads * (n - 1 - d_v)


def test_a_product_of_low_rank_rounded_once_keeps_its_rank() -> None:
    low = (make.values(32, 5, dtype=torch.float64) @ make.values(5, 48, seed=9, dtype=torch.float64)).float()
    joint = joint_identifiability(low.reshape(4, 8, 48))
    assert joint.rank == 5
    assert not joint.determines_heads


def test_every_head_may_see_other_keys() -> None:
    output, values = make.values(2, 4, 8), make.values(2, 12, 4)
    visible = torch.arange(12) < torch.tensor([[7], [3]])
    assert joint_identifiability(output, values, visible=visible).null_dimension == (6 - 4) + (2 - 2)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(InputError, match="slices"):
        joint_identifiability(torch.eye(4))
    with pytest.raises(InputError, match="do not fit"):
        joint_identifiability(make.values(2, 4, 8), make.values(2, 12, 5))
