"""A model that writes into its own weights as it runs: seen before the write, undone after the pass, and refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from whence.errors import ModelError

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_IN_PLACE = frozenset(
    {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__", "__ior__"}
)


class _WriteWatch(TorchFunctionMode):
    """Keeps a copy of every weight that is about to be written to, by any view of it (`.data`, a slice)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {
            weight.untyped_storage().data_ptr(): (name, weight)
            for name, weight in model.named_parameters()
            if not weight.is_meta and weight.layout is torch.strided
        }
        self.before: dict[str, tuple[Tensor, Tensor, Tensor]] = {}  # name: the weight, its storage's view, a copy

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func == _SET_DATA or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
            self._keep(args[0] if args else None)
        self._keep(kwargs.get("out"))
        return func(*args, **kwargs)

    def _keep(self, target: Any) -> None:
        if not isinstance(target, Tensor) or target.is_meta or target.layout is not torch.strided:
            return
        found = self.names.get(target.untyped_storage().data_ptr())
        if found is not None and found[0] not in self.before:
            data = found[1].detach()
            self.before[found[0]] = (found[1], data, data.clone())

    def undo(self) -> list[str]:
        """Put every weight back, bit for bit, in the storage that it had; the names of those that had become others.

        A write that changes nothing (`module.to(dtype)` in the dtype that it has, as routers do) is none.
        """
        changed = []
        with torch.no_grad():
            for name, (weight, data, copy) in self.before.items():
                now = weight.detach()
                if now.dtype != copy.dtype or now.shape != copy.shape or not torch.equal(now, copy):
                    changed.append(name)
                elif torch.equal(data, copy):
                    continue
                data.copy_(copy)
                if weight.data_ptr() != data.data_ptr():
                    weight.data = data
        return changed


@contextmanager
def refusing_own_writes(model: nn.Module) -> Iterator[None]:
    """Passes after which the weights are what they were; a model that wrote into them is refused by name."""
    watch = _WriteWatch(model)
    changed: list[str] = []
    try:
        with watch:
            yield
    finally:
        changed = watch.undo()
    if changed:
        raise ModelError(
            f"{type(model).__name__} writes into its own weights as it runs ({', '.join(sorted(changed)[:3])}), so that no "
            "two passes compute the same and whence cannot vouch for what it reads. The weights were put back."
        )
