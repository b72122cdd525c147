"""A device that is not there: tensors that say they are elsewhere and hold their numbers on the CPU.

An operation that is given tensors of both, which a real device would refuse, is refused here, and so, where the device is
told to have none, is one that makes float64. A factory that forgets the device is found as soon as its tensor meets
another. "meta" is the only device that torch lets anyone make tensors on without its driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
aten = torch.ops.aten
# What torch itself allows between the CPU and a device: copies, and indices that are on the CPU.
ALLOWED = {aten.copy_.default, aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_without_float64 = [False]


class OtherDeviceError(RuntimeError):
    """What a real device would not do."""


class Elsewhere(Tensor):
    """A tensor of the other device; `held`: its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, dict(kwargs or {}))


class _Factories(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, dict(kwargs or {}))


class _FromNumbers(TorchFunctionMode):
    """torch.tensor goes past the dispatcher on its way to a device."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == DEVICE:
            del kwargs["device"]
            return func(*args, **kwargs).to(DEVICE)
        return func(*args, **kwargs)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    there = any(isinstance(t, Elsewhere) for t in tensors)
    if kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]) == DEVICE
        kwargs["device"] = torch.device("cpu")
    elif there and func not in ALLOWED and any(t.dim() > 0 and not isinstance(t, Elsewhere) for t in tensors):
        raise OtherDeviceError(f"{func} was given tensors of two devices: {[tuple(t.shape) for t in tensors]}")
    known = {id(t.held): t for t in tensors if isinstance(t, Elsewhere)}

    def inside(t: Any) -> Any:
        return t.held if isinstance(t, Elsewhere) else t

    def outside(t: Any) -> Any:
        if not isinstance(t, Tensor) or isinstance(t, Elsewhere):
            return t
        if _without_float64[0] and t.dtype == torch.float64:
            raise OtherDeviceError(f"{func} makes float64, which the device does not have")
        return known[id(t)] if id(t) in known else Elsewhere(t)

    made = func(*tree_map(inside, args), **tree_map(inside, kwargs))
    return tree_map(outside, made) if there else made


@contextmanager
def other_device(*, float64: bool = True) -> Iterator[torch.device]:
    """The device, for as long as the block runs."""
    _without_float64[0] = not float64
    try:
        with torch.no_grad(), _FromNumbers(), _Factories():
            yield DEVICE
    finally:
        _without_float64[0] = False
