"""Operations that bring a backward of their own and no forward mode: `autograd.Function` without `setup_context`.

Such an operation (BLOOM's activation) is opened: what its forward computes is followed as ordinary torch. That its own
backward says the same is not a matter of course (straight-through estimators say something else on purpose), so
whoever opens one has to compare the two; `whence.mixing._forward_mode.Runner` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

REFUSED = "setup_context"
"""What torch's complaint about such an operation mentions."""

_opening: ContextVar[set[str] | None] = ContextVar("whence_opening", default=None)
_lock, _users = threading.Lock(), 0
_original: Any = torch.autograd.Function.__dict__["apply"]


class _Notes:
    """In the place of an operation's `ctx`: takes what is put into it, and is never asked for it."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    seen = _opening.get()
    own = cls.setup_context is torch.autograd.Function.setup_context
    if seen is None or not own:
        return _original.__func__(cls, *args, **kwargs)
    seen.add(f"{cls.__module__}.{cls.__qualname__}")
    return cls.forward(_Notes(), *args, **kwargs)


@contextmanager
def opened() -> Iterator[set[str]]:
    """While the block runs, in this thread, such operations run as ordinary torch; gives the names of those that did."""
    global _users
    with _lock:
        _users += 1
        torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment,method-assign]
    seen: set[str] = set()
    token = _opening.set(seen)
    try:
        yield seen
    finally:
        _opening.reset(token)
        with _lock:
            _users -= 1
            if not _users:
                torch.autograd.Function.apply = _original  # type: ignore[method-assign]
