"""Fresh memory for large results.

A result of 72 heads at 512 tokens is 75 MB. Touching it for the first time in 4 KB pages costs more than computing it
(29 of 40 ms measured for the last product), so on Linux the kernel is asked for 2 MB pages. It is only advice: where
it is not taken, or not known, nothing changes but the time.
"""

from __future__ import annotations

import ctypes
import sys
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
