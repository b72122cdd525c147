"""Operations that bring a backward of their own and no forward mode: `autograd.Function` without `jvp`.

Such an operation (BLOOM's activation) is opened: what its forward computes is followed as ordinary torch. That its own
backward says the same is not a matter of course (straight-through estimators say something else on purpose), so
whoever opens one has to compare the two; `whence.mixing.jacobian.forward_mode.Runner` does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

REFUSED = "setup_context"
"""What torch's complaint about such an operation mentions, if it is of the old kind; else it is a NotImplementedError."""

_opening: ContextVar[set[str] | None] = ContextVar("whence_opening", default=None)
_lock, _users = threading.Lock(), 0
_original: Any = torch.autograd.Function.__dict__["apply"]


class _Notes:
    """In the place of an operation's `ctx`: takes what its forward puts into it for a backward that never comes."""

    saved_tensors: tuple[Any, ...] = ()

    def __init__(self, inputs: int) -> None:
        self.needs_input_grad = (False,) * inputs

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def ignored(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    mark_dirty = mark_non_differentiable = set_materialize_grads = save_for_forward = ignored


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    seen, plain = _opening.get(), torch.autograd.Function
    old = cls.setup_context is plain.setup_context
    if seen is None or (not old and cls.jvp is not plain.jvp):
        return _original.__func__(cls, *args, **kwargs)
    seen.add(f"{cls.__module__}.{cls.__qualname__}")
    return cls.forward(_Notes(len(args)), *args, **kwargs) if old else cls.forward(*args, **kwargs)


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
