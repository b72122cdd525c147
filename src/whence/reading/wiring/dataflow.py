"""Following tensors on the graph: what is the same numbers in another shape, what came from what, what went where."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from whence.reading.wiring.op_graph import Node, Op

# Operations that leave every number as it is: changes of shape, casts, dropout in eval mode.
PASSIVE = {
    "view", "reshape", "transpose", "permute", "contiguous", "flatten", "unflatten", "squeeze", "unsqueeze", "to",
    "type", "type_as", "float", "half", "bfloat16", "double", "clone", "detach", "dropout", "__getitem__", "movedim",
    "swapaxes", "view_as", "reshape_as", "alias",
}  # fmt: skip
# Bounds against overflow, as T5 has them in half precision: the same numbers wherever none is out of bounds. Whether that
# is so on a text is seen there: the state after attention is rebuilt on each.
BOUNDS = {"clamp", "clamp_", "clip"}
ADD = {"add", "__add__", "__radd__", "add_", "__iadd__"}
SUB = {"sub", "__sub__", "sub_", "__isub__", "subtract"}
MUL = {"mul", "__mul__", "__rmul__", "mul_", "__imul__"}
DIV = {"div", "true_divide", "__truediv__", "div_", "__itruediv__"}


class NotRecognised(Exception):
    """A part of the wiring could not be found; the message says what was tried."""


def _passes_on(op: Op, node: Node) -> bool:
    """Whether an operation hands on the numbers of `node` as they are (x.type_as(y) those of x, not those of y)."""
    if not op.inputs or op.inputs[0] is not node:
        return False
    if op.name in BOUNDS:
        return bool(op.outputs) and torch.equal(op.outputs[0].value, node.value)
    return op.name in PASSIVE


def closure(node: Node) -> list[Node]:
    """`node` and everything that is the same numbers in another shape or dtype, forward in time."""
    nodes = [node]
    seen = {id(node)}
    for current in nodes:
        for op in current.consumers:
            if not _passes_on(op, current):
                continue
            for out in op.outputs:
                if id(out) not in seen and out.value.numel() == node.value.numel():
                    seen.add(id(out))
                    nodes.append(out)
    return nodes


def origins(node: Node) -> list[Node]:
    """`node` and what it was reshaped or cast from, backward in time."""
    nodes = [node]
    while True:
        op = nodes[-1].producer
        if op is None or not op.inputs or op.inputs[0].value.numel() != node.value.numel():
            return nodes
        if not _passes_on(op, op.inputs[0]):
            return nodes
        nodes.append(op.inputs[0])


def ancestors(nodes: Iterable[Node]) -> set[int]:
    """Ids of every node from which one of `nodes` was computed."""
    todo = list(nodes)
    numbers = {id(n) for n in todo}
    while todo:
        op = todo.pop().producer
        for parent in op.inputs if op is not None else ():
            if id(parent) not in numbers:
                numbers.add(id(parent))
                todo.append(parent)
    return numbers


def consumers(nodes: Iterable[Node]) -> list[tuple[Op, Node]]:
    """Operations that do something with one of `nodes`, in the order they ran."""
    pairs = [(op, node) for node in nodes for op in node.consumers if not _passes_on(op, node)]
    return sorted(pairs, key=lambda pair: pair[0].index)


def other_operand(op: Op, used: Node) -> Node | None:
    """The tensor that `used` is added to."""
    rest = [n for n in op.inputs if n is not used]
    return rest[0] if len(rest) == 1 else None


def constant_factor(op: Op, used: Node) -> Tensor | float | None:
    """A number, or a vector of the model's width, that the branch is multiplied by."""
    for i, arg in enumerate(op.args[:2]):
        inverse = op.name in DIV
        if inverse and i == 0:
            continue
        if isinstance(arg, (int, float)):
            return 1.0 / arg if inverse else float(arg)
        if isinstance(arg, Tensor) and arg is not used.tensor and (arg.numel() == 1 or arg.dim() == 1):
            return arg.detach().reciprocal() if inverse else arg.detach()
    return None
