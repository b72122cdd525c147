"""The dataflow of one short forward pass: which operation made which tensor, inside which module.

Used when a model is proved, to find the output projection, the residual and the norms by following the tensors themselves
instead of trusting names. Everything stays alive while the graph does, so identities are never reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from whence.reading.capture.own_hooks import on_enter, on_leave


@dataclass(eq=False)
class Node:
    """One value of one tensor. A tensor that is changed in place has one node per value."""

    tensor: Tensor
    producer: Op | None = None
    consumers: list[Op] = field(default_factory=list)
    frozen: Tensor | None = None  # a copy, taken just before the tensor was overwritten in place

    @property
    def value(self) -> Tensor:
        return self.tensor if self.frozen is None else self.frozen


@dataclass(eq=False)
class Op:
    """One call of a torch function."""

    index: int
    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Node]
    outputs: list[Node]
    region: tuple[ModuleCall, ...]


@dataclass(eq=False)
class ModuleCall:
    """One call of a module: its input and output tensors in the order met, and when it began and ended."""

    name: str
    module: nn.Module
    number: int  # how many calls of this very module came before
    begin: int  # index of the first operation inside
    inputs: list[tuple[Path, Node]]
    outputs: list[tuple[Path, Node]] = field(default_factory=list)
    end: int = -1  # index past the last operation inside


Path = tuple[int | str, ...]


def walk(thing: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in nested arguments or outputs, with the way to it."""
    if isinstance(thing, Tensor):
        yield path, thing
    elif isinstance(thing, (list, tuple)):
        for i, item in enumerate(thing):
            yield from walk(item, (*path, i))
    elif isinstance(thing, dict):
        for key, item in thing.items():
            yield from walk(item, (*path, key))


def follow(thing: Any, path: Path) -> Any:
    """What `walk` found at `path`."""
    for step in path:
        thing = thing[step]
    return thing


class OpGraph(TorchFunctionMode):
    """Records the operations of the forward passes that run inside its `with` block, on `batch` sequences."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch
        self.ops: list[Op] = []
        self.calls: list[ModuleCall] = []
        self._nodes: dict[int, Node] = {}
        self._stack: list[ModuleCall] = []
        self._numbers: dict[int, int] = {}

    def node(self, tensor: Tensor) -> Node:
        node = self._nodes.get(id(tensor))
        if node is None:
            node = self._nodes[id(tensor)] = Node(tensor)
        return node

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        inputs = [self.node(t) for _, t in walk([args, kwargs])]
        in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
        if in_place and inputs and inputs[0].frozen is None and inputs[0].tensor.numel() < 1 << 22:
            inputs[0].frozen = inputs[0].tensor.clone()
        result = func(*args, **kwargs)
        outs = [t for _, t in walk(result)]
        if in_place and inputs and not any(t is inputs[0].tensor for t in outs):
            outs.append(inputs[0].tensor)
        if not outs:
            return result
        op = Op(len(self.ops), name, func, args, kwargs, inputs, [], tuple(self._stack))
        self.ops.append(op)
        for node in {id(n): n for n in inputs}.values():
            node.consumers.append(op)
        for tensor in outs:
            previous = self._nodes.get(id(tensor))
            if previous is not None and not in_place:
                # The function handed back its own input (x.contiguous(), x.to(same)): the value is the same one.
                op.outputs.append(previous)
                continue
            node = self._nodes[id(tensor)] = Node(tensor, op)
            op.outputs.append(node)
        return result

    @contextmanager
    def modules(self, model: nn.Module) -> Iterator[None]:
        """Also record which module each operation runs in, and what every module was given and gave back."""
        handles = []

        def enter(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                number = self._numbers.get(id(module), 0)
                self._numbers[id(module)] = number + 1
                given = [(path, self.node(t)) for path, t in walk([args, kwargs])]
                call = ModuleCall(name, module, number, len(self.ops), given)
                self._stack.append(call)
                self.calls.append(call)

            return hook

        def leave(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            call = self._stack.pop()
            call.outputs = [(path, self.node(t)) for path, t in walk(output)]
            call.end = len(self.ops)

        try:
            for name, module in model.named_modules():
                handles += [on_enter(module, enter(name)), on_leave(module, leave)]
            yield
        finally:
            for handle in handles:
                handle.remove()


_IN_PLACE = {"__iadd__", "__imul__", "__isub__", "__itruediv__", "__setitem__"}


def flat(tensor: Tensor) -> Tensor:
    """(…, d) → (rows, d) in float64, the form in which values are compared."""
    return tensor.detach().reshape(-1, tensor.shape[-1]).to(torch.float64)


def deviation(value: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest expected entry; infinite where shapes or values cannot match."""
    if value.shape != expected.shape:
        return float("inf")
    value, expected = (t.detach().to("cpu", torch.float64) for t in (value, expected))
    scale = expected.abs().max()
    error = (value - expected).abs().max() / scale if scale > 0 else (value - expected).abs().max()
    return float(error) if bool(torch.isfinite(error)) else float("inf")
