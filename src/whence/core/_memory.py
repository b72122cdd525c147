"""Memory for large results: fresh pages, and matrices turned on their side.

A result of 72 heads at 512 tokens is 75 MB. Touching it for the first time in 4 KB pages costs more than computing it
(29 of 40 ms measured for the last product), so on Linux the kernel is asked for 2 MB pages. It is only advice: where
it is not taken, or not known, nothing changes but the time.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_HUGE = 1 << 21
_MADV_HUGEPAGE = 14


@lru_cache(maxsize=1)
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)


def fresh(like: Tensor, *shape: int) -> Tensor:
    """An uninitialised tensor with the dtype and on the device of `like`."""
    result = like.new_empty(*shape)
    size = result.numel() * result.element_size()
    advise = _madvise() if result.device.type == "cpu" and size >= 4 * _HUGE else None
    if advise is not None:
        begin = -(-result.data_ptr() // _HUGE) * _HUGE  # whole pages inside the tensor's own memory only
        length = (result.data_ptr() + size - begin) // _HUGE * _HUGE
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return result


def stacked(tensors: list[Tensor]) -> Tensor:
    """torch.stack into fresh memory."""
    out = fresh(tensors[0], len(tensors), *tensors[0].shape)
    torch.stack(tensors, out=out)
    return out


_TURNED = 1 << 14  # numbers in a matrix from which on the way there matters


def turned(matrices: Tensor, out: Tensor | None = None, tiny: float = 0.0) -> Tensor:
    """(…, a, b) → (…, b, a), laid out anew: `matrices.mT.contiguous()`, twice as fast where rows are powers of two.

    Numbers up to `tiny` become 0 on the way.

    Such rows all fall on the same few lines of the processor's cache. Each matrix is first put where rows are an odd
    number of lines apart.

    >>> bool((turned(torch.arange(6.0).view(2, 3)) == torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]])).all())
    True
    """
    rows, width = matrices.shape[-2:]
    if out is None:
        out = matrices.new_empty(*matrices.shape[:-2], width, rows)
    if rows * width < _TURNED or matrices.device.type != "cpu":
        out.copy_(matrices.mT)
        return torch.hardshrink(out, tiny, out=out) if tiny else out
    line = max(1, 64 // matrices.element_size())
    lines = -(-width // line) | 1
    apart = matrices.new_empty(rows, lines * line)[:, :width]
    for given, made in zip(_each(matrices), _each(out), strict=True):
        made.copy_((torch.hardshrink(given, tiny, out=apart) if tiny else apart.copy_(given)).mT)
    return out


def _each(matrices: Tensor) -> Iterator[Tensor]:
    """Every matrix of a stack of them, as a view."""
    if matrices.dim() == 2:
        yield matrices
    else:
        for part in matrices.unbind(0):
            yield from _each(part)
