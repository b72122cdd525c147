"""A model that writes into its own weights as it runs: seen before the write, undone after the pass, and refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from whence.errors import ModelError

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_IN_PLACE = frozenset(
    {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__", "__ior__"}
)


COPIED = 2 << 30
"""Weights of at most this many bytes are copied before a pass that nothing may watch."""


class _WriteWatch(TorchFunctionMode):
    """Keeps a copy of every weight that is about to be written to, by any view of it (`.data`, a slice)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.before: dict[str, tuple[Tensor, Tensor, Tensor]] = {}  # name: the weight, its storage's view, a copy

    @cached_property
    def weights(self) -> dict[int, list[tuple[str, Tensor]]]:
        """The weights by their storage, which several may share. Looked up when something is first written to."""
        by_storage: dict[int, list[tuple[str, Tensor]]] = {}
        for name, weight in self.model.named_parameters():
            if not weight.is_meta and weight.layout is torch.strided:
                by_storage.setdefault(weight.untyped_storage().data_ptr(), []).append((name, weight))
        return by_storage

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if args and _writes(func):
            for target in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                self._keep(target)
        if not kwargs:
            return func(*args)
        self._keep(kwargs.get("out"))
        return func(*args, **kwargs)

    def _keep(self, target: Any) -> None:
        if not isinstance(target, Tensor) or target.is_meta or target.layout is not torch.strided:
            return
        try:
            storage = target.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # torch.func's own tensors stand for derivatives, not for weights
            return
        for name, weight in self.weights.get(storage, ()):
            if name not in self.before:
                data = weight.detach()
                self.before[name] = (weight, data, data.clone())

    def keep_all(self) -> None:
        """Copies of all weights, where they are not so many that memory may not hold them twice."""
        weights = [weight for each in self.weights.values() for _, weight in each]
        if sum(weight.nbytes for weight in weights) <= COPIED:
            for weight in weights:
                self._keep(weight)

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


@lru_cache(maxsize=4096)
def _writes(func: Callable[..., Any]) -> bool:
    """Whether a torch function writes into its first argument, by its name."""
    name = getattr(func, "__name__", "")
    return func == _SET_DATA or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


@contextmanager
def refusing_own_writes(model: nn.Module, *, unwatched: bool = False) -> Iterator[None]:
    """A pass after which the weights are what they were; a model that wrote into them is refused by name.

    unwatched: nothing is in the way of the pass; the weights are copied beforehand instead, where they fit (`COPIED`).
    """
    watch = _WriteWatch(model)
    changed: list[str] = []
    try:
        if unwatched:
            watch.keep_all()
        with nullcontext() if unwatched else watch:
            yield
    finally:
        changed = watch.undo()
    if changed:
        raise ModelError(
            f"{type(model).__name__} writes into its own weights as it runs ({', '.join(sorted(changed)[:3])}), so that no "
            "two passes compute the same and whence cannot vouch for what it reads. The weights were put back."
        )
