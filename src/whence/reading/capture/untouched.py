"""A model is after a pass what it was before: flags, hooks, parts and settings, on success and on error.

Some models change themselves when they run: BigBird goes over to full attention for good on a short text, dynamic
rotary positions keep the longest table. Such changes are undone, too.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from whence.errors import ModelError
from whence.model.memory import configs_of, is_ours, lock_of

T = TypeVar("T")

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_TABLES = ("_modules", "_parameters", "_buffers")


class Snapshot:
    """Everything of a model that a pass could change, by reference: no weight is copied."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [
            (module, dict(module.__dict__), [dict(module.__dict__[name]) for name in _TABLES])
            for module in model.modules()
        ]
        self.hooks = {
            id(hook) for module, _, _ in self.modules for name in _HOOKS for hook in module.__dict__[name].values()
        }
        self.configs = [(config, dict(vars(config))) for config in configs_of(model)]
        self.versions = [
            (name, t, t._version)
            for module, _, tables in self.modules
            for table in tables[1:]
            for name, t in table.items()
            if t is not None and not t.is_inference()
        ]

    def restore(self) -> None:
        """Put back what is different. Doing it twice does no harm, so that an interruption can be followed by another."""
        for module, attributes, tables in self.modules:
            for name, table in zip(_TABLES, tables, strict=True):
                _put_back(module.__dict__[name], table)
            _put_back(module.__dict__, attributes)
            for name in _HOOKS:
                hooks = module.__dict__[name]
                if hooks:
                    self._remove_ours(module, name, hooks)
        for config, fields in self.configs:
            _put_back(vars(config), fields)

    def _remove_ours(self, module: nn.Module, kind: str, hooks: Any) -> None:
        for key in [key for key, hook in hooks.items() if is_ours(hook) and id(hook) not in self.hooks]:
            hooks.pop(key, None)
            for flags in ("_with_kwargs", "_always_called"):
                table = module.__dict__.get(f"{kind}{flags}")
                if table:
                    table.pop(key, None)

    def check(self, model: nn.Module) -> None:
        """Refuse a model that writes into its own weights or buffers as it runs: what it was cannot be put back."""
        for name, tensor, version in self.versions:
            if tensor._version != version:
                raise ModelError(
                    f"{type(model).__name__} writes into its own tensor {name!r} whenever it runs, so that no two passes "
                    "compute the same and whence cannot vouch for what it reads."
                )


def _put_back(now: Any, before: dict[str, Any]) -> None:
    for name, value in before.items():
        if name not in now or now[name] is not value:
            now[name] = value
    if len(now) != len(before):
        for name in [name for name in now if name not in before]:
            del now[name]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients, one thread at a time; afterwards the model is as it was."""
    with lock_of(model):
        snapshot = Snapshot(model)
        try:
            try:
                for module, attributes, _ in snapshot.modules:
                    if attributes["training"]:
                        module.training = False
                    if attributes.get("_compiled_call_impl") is not None:
                        module.__dict__["_compiled_call_impl"] = None  # compiled code cannot be overheard
                with torch.no_grad():
                    yield
            finally:
                snapshot.restore()
        finally:
            snapshot.restore()  # an interruption may have met the first one
        snapshot.check(model)


def guarded(model: nn.Module, work: Callable[[], T]) -> T:
    """`work`, after which the model and this thread's torch modes are as before, wherever it was interrupted.

    A `with` block restores nothing when the interruption meets the few lines that enter or leave it. This is plain
    `try … finally`, twice, so that one interruption can spoil only one of the two.
    """
    with lock_of(model):
        snapshot, gradients = Snapshot(model), torch.is_grad_enabled()
        modes = torch._C._len_torch_function_stack()
        try:
            try:
                return work()
            except BaseException as error:
                if not isinstance(error, Exception):
                    traceback.clear_frames(error.__traceback__)  # ends the `with` blocks that are left open
                raise
            finally:
                _end_modes(modes, gradients)
                snapshot.restore()
        finally:
            _end_modes(modes, gradients)
            snapshot.restore()


def _end_modes(depth: int, gradients: bool) -> None:
    while torch._C._len_torch_function_stack() > depth:
        torch.overrides._pop_mode()
    torch.set_grad_enabled(gradients)
