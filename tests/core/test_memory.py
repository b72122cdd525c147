"""Fresh memory is memory like any other."""

import torch

from whence.core.numerics._memory import fresh, stacked


def test_fresh_tensors_have_the_shape_dtype_and_device_asked_for():
    for shape in ((3,), (72, 512, 512), (0, 4)):
        made = fresh(torch.zeros(1, dtype=torch.float32), *shape)
        assert made.shape == shape
        assert made.dtype == torch.float32
        made.fill_(1.0)
        assert float(made.sum(dtype=torch.float64)) == made.numel()


def test_neighbouring_memory_is_left_alone():
    before = [torch.full((1 << 20,), float(i)) for i in range(4)]
    made = [fresh(before[0], 5_000_001).fill_(9.0) for _ in range(3)]
    assert all(bool((t == i).all()) for i, t in enumerate(before))
    assert all(bool((t == 9).all()) for t in made)


def test_stacked_is_stack():
    parts = [torch.randn(300, 300) for _ in range(40)]
    assert torch.equal(stacked(parts), torch.stack(parts))
