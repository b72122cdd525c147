"""Frozen dataclasses that hold tensors: the same thing with every tensor changed, copied, or stored beside JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def map_tensors(thing: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same dataclass or tuple with `change` made to every tensor in it, however deep."""
    if isinstance(thing, Tensor):
        return change(thing)
    if isinstance(thing, tuple):
        parts = [map_tensors(t, change) for t in thing]
        return type(thing)(*parts) if hasattr(thing, "_fields") else tuple(parts)
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(thing, **{f.name: map_tensors(getattr(thing, f.name), change) for f in fields(thing) if f.init})
    return thing


def own_copy(thing: Any) -> Any:
    """The same thing with tensors of its own, so that it does not change when the model is trained on.

    Layers that share a weight share its copy.
    """
    copies: dict[int, tuple[Tensor, Tensor]] = {}  # the tensor copied is kept, so that its id stays its own

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = (tensor, tensor.detach().clone())
        return copies[id(tensor)][1]

    return map_tensors(thing, copy)


def own_tensor(tensor: Tensor | None) -> Tensor | None:
    """The tensor, copied where it is a part of a larger one, which would stay in memory with it."""
    if tensor is None or tensor.untyped_storage().nbytes() <= tensor.nbytes:
        return tensor
    return tensor.clone()
