"""Matrices turned on their side, whatever their shape and place in memory."""

from __future__ import annotations

import pytest
import torch

from whence.mixing.jacobian._turned import turned


@pytest.mark.parametrize("shape", [(3, 5), (2, 128, 128), (2, 3, 200, 130), (512, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_same_numbers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for matrices in (given, given.mT, given[..., ::2, :]):
        assert torch.equal(turned(matrices), matrices.mT)
        assert turned(matrices).is_contiguous()
    room = torch.zeros(*shape[:-2], shape[-1], shape[-2] + 3, dtype=dtype)
    out = room[..., 1:-2]
    assert turned(given, out).data_ptr() == out.data_ptr()
    assert torch.equal(out, given.mT)
    assert not bool(room[..., 0].any())


@pytest.mark.parametrize("n", [4, 200])
def test_tiny_numbers_become_zero(n: int) -> None:
    given = torch.rand(n, n) + 0.5
    given[1, 2], given[2, 1] = 1e-35, 0.25
    made = turned(given, tiny=1e-31)
    assert made[2, 1] == 0
    assert made[1, 2] == 0.25
    made[2, 1] = 1e-35
    assert torch.equal(made, given.T)
