"""Attaching to a model for one forward pass, and letting go of it whatever happens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from whence.model.memory import lock_of
from whence.reading.capture import interface
from whence.reading.capture.function_mode import AttentionMode
from whence.reading.capture.own_hooks import on_enter, on_leave
from whence.reading.capture.recorder import AttentionRecorder, listening
from whence.reading.capture.untouched import evaluating
from whence.reading.wiring.handles import Handle
from whence.reading.wiring.op_graph import follow

__all__ = ["FUNCTION_MODE", "INTERFACE", "accepted", "attached", "evaluating", "lock_of", "picking_up", "takes"]

INTERFACE, FUNCTION_MODE = "attention interface", "function mode"


@contextmanager
def attached(model: nn.Module, capture: str, recorder: AttentionRecorder, batch: int) -> Iterator[None]:
    """Let `recorder` overhear the model's attention in the given capture; the model is as before when the block ends."""
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        if capture == INTERFACE:
            stack.enter_context(interface.switched(model))
            stack.enter_context(listening(recorder))
        else:
            if not interface.in_plain_sight(model):
                stack.enter_context(interface.switched(model))
            stack.enter_context(AttentionMode(recorder, batch))
        yield


@contextmanager
def picking_up(
    model: nn.Module, handles: Iterable[Handle], listener: Callable[[], None] | None = None
) -> Iterator[dict[Handle, Tensor]]:
    """Hold on to the tensors that the handles name while a forward pass runs in this thread; `listener` hears of each."""
    wanted: dict[str, list[Handle]] = {}
    for handle in handles:
        wanted.setdefault(handle.module, []).append(handle)
    found: dict[Handle, Tensor] = {}
    hooks = []

    def watch(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        calls = 0

        def take(side: str, things: Any) -> None:
            for handle in wanted[name]:
                if handle.side == side and handle.number == calls:
                    tensor = handle.sequence_first(follow(things, handle.path))
                    found[handle] = tensor.clone() if handle.clone else tensor

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            take("in", [args, kwargs])
            if listener is not None:
                listener()

        def after(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            nonlocal calls
            take("out", output)
            calls += 1
            if listener is not None:
                listener()

        return before, after

    try:
        for name in wanted:
            module = model.get_submodule(name)
            before, after = watch(name)
            hooks += [on_enter(module, before), on_leave(module, after)]
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@lru_cache(maxsize=256)
def _signature(owner: Any) -> tuple[frozenset[str], bool]:
    """The names that a class's forward takes, and whether it takes any other."""
    parameters = inspect.signature(owner.forward).parameters
    return frozenset(parameters), any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def takes(model: nn.Module, name: str) -> bool:
    """Whether this model's forward has a parameter of this name."""
    owner: Any = type(model)
    return name in _signature(owner)[0]


def accepted(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs that this model's forward takes, and no cache: every position must be seen in this pass.

    A model that is set to give tuples is asked for outputs with names.
    """
    owner: Any = type(model)
    parameters, takes_any = _signature(owner)
    arguments = {name: value for name, value in inputs.items() if name in parameters or takes_any}
    inside: Any = model
    if takes_any and hasattr(model, "get_base_model"):  # PEFT hands on what it is given
        inside = inside.get_base_model()
    if takes(inside, "use_cache"):
        arguments["use_cache"] = False
    if getattr(getattr(inside, "config", None), "return_dict", True) is False:  # logits are told from states by name
        arguments["return_dict"] = True
    return arguments
