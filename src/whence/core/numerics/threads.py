"""One torch thread for jobs of many small operations.

Two OpenMP threads share each small operation and wait for each other at its end. On a busy machine one of them is often
not running, and a call of a few hundredths of a second takes many seconds; on an idle one nothing is gained either.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SHORT = 256
"""Up to so many tokens the operations on one text are small."""


def workers_for(tokens: int) -> int:
    """How many Python threads to work on texts of so many tokens with.

    Small operations hold Python's lock for most of their time: two threads took 2.6 s of the processor for verdicts on 128
    tokens that one made in 1.6 s. Large ones, and HiGHS, work outside it.
    """
    return 1 if tokens <= SHORT else max(1, os.cpu_count() or 1)


_lock = threading.Lock()
_inside = 0
_outside = 1  # torch's number of threads before the first of those who are inside came


@contextmanager
def one_thread() -> Iterator[None]:
    """torch works on one thread in this block, and on as many as before after it, also after an error.

    torch keeps the number for each thread that computes, and hands the last one set to new threads. So whoever comes
    while others are inside must not take their 1 for what to go back to: what was there before the first is kept for all.

    >>> before = torch.get_num_threads()
    >>> with one_thread():
    ...     with one_thread():
    ...         torch.get_num_threads()
    1
    >>> torch.get_num_threads() == before
    True
    """
    global _inside, _outside
    with _lock:
        if _inside == 0:
            _outside = torch.get_num_threads()
        _inside += 1
        mine = torch.get_num_threads() if _depth() else _outside
        _here.depth = _depth() + 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            _here.depth -= 1
            torch.set_num_threads(mine)


_here = threading.local()


def _depth() -> int:
    return int(getattr(_here, "depth", 0))
