"""A model is after a pass what it was before: flags, hooks, parts and settings, on success and on error.

Some models change themselves when they run: BigBird goes over to full attention for good on a short text, dynamic
rotary positions keep the longest table, others count or cache in a buffer. Such changes are undone, too, so that every
pass begins where a plain pass of the user's would.

Nothing is switched that a pass of another thread could notice: a model in training mode stays in it, and is refused
where that makes it random.
"""

from __future__ import annotations

import contextvars
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from whence.errors import ModelError
from whence.model.memory import as_remembered, configs_of, fixed, is_ours, lock_of, modules_of
from whence.reading.capture.own_writes import refusing_own_writes

T = TypeVar("T")

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_TABLES = ("_modules", "_parameters", "_buffers")


class Snapshot:
    """Everything of a model that a pass could change: weights by reference, buffers by value."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [
            (module, dict(module.__dict__), [dict(module.__dict__[name]) for name in _TABLES])
            for module in modules_of(model)
        ]
        self.hooks = {
            id(hook) for module, _, _ in self.modules for name in _HOOKS for hook in module.__dict__[name].values()
        }
        self.configs = [(config, dict(vars(config))) for config in configs_of(model)]
        self.weights, self.buffers = (
            [
                (name, tensor, 0 if tensor.is_inference() else tensor._version)
                for _, _, tables in self.modules
                for name, tensor in tables[table].items()
                if tensor is not None and not tensor.is_meta
            ]
            for table in (1, 2)
        )
        self.copies = [tensor.detach().clone() for _, tensor, _ in self.buffers]

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
        for (_, buffer, version), copy in zip(self.buffers, self.copies, strict=True):
            if buffer.is_inference() or buffer._version != version:
                with torch.no_grad():
                    buffer.detach().copy_(copy)

    def _remove_ours(self, module: nn.Module, kind: str, hooks: Any) -> None:
        mine = threading.get_ident()  # a measure in another thread has hooks of its own, and still needs them
        left = [
            k for k, h in hooks.items() if is_ours(h) and id(h) not in self.hooks and getattr(h, "thread", mine) == mine
        ]
        for key in left:
            hooks.pop(key, None)
            for flags in ("_with_kwargs", "_always_called"):
                table = module.__dict__.get(f"{kind}{flags}")
                if table:
                    table.pop(key, None)

    def check(self, model: nn.Module) -> None:
        """Refuse a model whose weights were written to unseen: by another thread, or past torch's functions."""
        written = [name for name, t, version in self.weights if not t.is_inference() and t._version != version]
        if written and not as_remembered(model):  # PEFT puts adapters of experts on a weight, and takes them off again
            raise ModelError(
                f"{type(model).__name__}'s weight {written[0]!r} was written to while it ran, by the model itself or by another "
                "thread, so that no two passes compute the same and whence cannot vouch for what it reads."
            )


def _put_back(now: Any, before: dict[str, Any]) -> None:
    for name, value in before.items():
        if name not in now or now[name] is not value:
            now[name] = value
    if len(now) != len(before):
        for name in [name for name in now if name not in before]:
            del now[name]


@contextmanager
def evaluating(model: nn.Module, *, unwatched: bool = False) -> Iterator[None]:
    """Passes without gradients, one thread at a time; afterwards the model is as it was.

    The model runs in the mode that it is in. Its training flags are fields that every thread reads, so they are not
    switched: a model in training mode is read as it is, or refused where dropout or the like makes it random. What is
    switched computes the same: compiled code (which cannot be overheard) and gradient checkpointing (which would run
    the attention again in a backward pass). unwatched: see `refusing_own_writes`.
    """
    with lock_of(model):
        refuse_randomness(model)
        snapshot = Snapshot(model)
        try:
            try:
                for module, attributes, _ in snapshot.modules:
                    if attributes.get("_compiled_call_impl") is not None:
                        module.__dict__["_compiled_call_impl"] = None
                    if type(module).__name__ == "OptimizedModule" and "_orig_mod" in attributes["_modules"]:
                        module.__dict__["forward"] = attributes["_modules"]["_orig_mod"].__call__
                    if attributes.get("gradient_checkpointing") is True and module.training:
                        module.__dict__["gradient_checkpointing"] = False
                with torch.no_grad(), refusing_own_writes(model, unwatched=unwatched):
                    yield
            finally:
                snapshot.restore()
        finally:
            snapshot.restore()  # an interruption may have met the first one
        snapshot.check(model)


def refuse_randomness(model: nn.Module) -> None:
    """Refuse a model in training mode with anything that is random or learns in it: dropout, layer drop, batch norms."""
    if not any(module.training for module in modules_of(model)):
        return
    for name, module in model.named_modules():
        if not module.training:
            continue
        settings = {**{f"config.{k}": v for k, v in _fields(getattr(module, "config", None)).items()}, **vars(module)}
        if isinstance(module, nn.modules.dropout._DropoutNd):
            settings["dropout p"] = module.p
        random = [f"{setting} = {value:g}" for setting, value in settings.items() if _is_random(setting, value)]
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            random.append("running statistics that every pass changes")
        if random:
            raise ModelError(
                f"{type(model).__name__} is in training mode with {random[0]} in {name or 'the model itself'}, so that no two "
                "passes compute the same. Call model.eval() first; whence does not switch the mode by itself, since "
                "passes of other threads would see it."
            )


_RANDOM = ("drop", "jitter", "mask_time_prob", "mask_feature_prob")  # what transformers calls its random settings


def _is_random(setting: str, value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and value > 0 and any(word in setting for word in _RANDOM)


def _fields(config: Any) -> dict[str, Any]:
    return {} if config is None or not hasattr(config, "__dict__") else dict(vars(config))


def guarded(model: nn.Module, work: Callable[[], T]) -> T:
    """`work`, after which the model and this thread's torch modes are as before, wherever it was interrupted.

    A `with` block restores nothing when the interruption meets the few lines that enter or leave it. So everything that
    such blocks restore is put back here once more: model, torch modes, gradients; and context variables, because the
    work has a context of its own. This is plain `try … finally`, twice, so that one interruption can spoil only one of
    the two. Whatever torch makes of an interruption on its way (a stack of modes that is empty too early), it is the
    interruption that is raised.
    """
    with lock_of(model):
        snapshot, gradients = Snapshot(model), torch.is_grad_enabled()
        modes = torch.overrides._get_current_function_mode_stack()

        def attempt() -> T:
            try:
                with fixed(model):
                    return work()
            except BaseException as error:
                stopped = _interruption(error)
                if stopped is None:
                    raise
                for one in _chain(error):
                    traceback.clear_frames(one.__traceback__)  # ends the `with` blocks that are left open
                raise stopped from None

        try:
            try:
                return contextvars.copy_context().run(attempt)
            finally:
                _put_modes_back(modes, gradients)
                snapshot.restore()
        finally:
            _put_modes_back(modes, gradients)
            snapshot.restore()


def _chain(error: BaseException) -> list[BaseException]:
    """An error and those it came from, the latest first."""
    chain: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and one not in chain:
            chain.append(one)
            todo += [one.__context__, one.__cause__]
    return chain


def _interruption(error: BaseException) -> BaseException | None:
    """The interruption (Ctrl-C, exit) behind an error, if there is one."""
    return next((one for one in _chain(error) if not isinstance(one, Exception)), None)


def _put_modes_back(modes: list[Any], gradients: bool) -> None:
    if torch.overrides._get_current_function_mode_stack() != modes:
        while torch._C._len_torch_function_stack() > 0:
            torch.overrides._pop_mode()
        for mode in modes:
            torch.overrides._push_mode(mode)
    torch.set_grad_enabled(gradients)
