"""Put other tensors in the place of those that a model's modules hand on, while one forward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from whence.reading.capture.own_hooks import on_enter, on_leave
from whence.reading.wiring.handles import Handle
from whence.reading.wiring.op_graph import follow

TensorChange = Callable[[Tensor], Tensor]


@contextmanager
def touching(model: nn.Module, changes: Mapping[Handle, TensorChange]) -> Iterator[None]:
    """While the block runs, each handle's tensor is replaced by what its function makes of it."""
    by_module: dict[str, list[Handle]] = {}
    for handle in changes:
        by_module.setdefault(handle.module, []).append(handle)
    hooks = []

    def watch(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        calls = 0

        def put(side: str, things: Any) -> Any:
            for handle in by_module[name]:
                if handle.side == side and handle.number == calls:
                    made = changes[handle](handle.sequence_first(follow(things, handle.path)))
                    things = _with(things, handle.path, handle.sequence_first(made))
            return things

        def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            args, kwargs = put("in", [args, kwargs])
            return tuple(args), kwargs

        def after(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
            nonlocal calls
            output = put("out", output)
            calls += 1
            return output

        return before, after

    try:
        for name in by_module:
            before, after = watch(name)
            module = model.get_submodule(name)
            hooks += [on_enter(module, before), on_leave(module, after)]
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _with(things: Any, path: tuple[int | str, ...], tensor: Tensor) -> Any:
    """The same nest with another tensor at `path`."""
    if not path:
        return tensor
    step, rest = path[0], path[1:]
    inner = _with(things[step], rest, tensor)
    if isinstance(things, tuple):
        parts = [*things]
        parts[int(step)] = inner
        return type(things)(*parts) if hasattr(things, "_fields") else tuple(parts)
    copy = things.copy()
    copy[step] = inner
    return copy
