"""One operation as a linear map of a tensor: linear, addmm, matmul, a convolution of width 1, bmm, einsum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whence.reading.wiring.op_graph import Node, Op


@dataclass(frozen=True)
class LinearMap:
    """x · weight + bias."""

    weight: Tensor  # (in, out)
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        y = x @ self.weight.to(x)
        return y if self.bias is None else y + self.bias.to(y)

    def columns(self, at: Tensor) -> LinearMap:
        """The map to these entries of its output alone."""
        return LinearMap(self.weight[:, at], None if self.bias is None else self.bias[at])


def as_linear(op: Op, node: Node, width: int) -> LinearMap | None:
    """The operation as a linear map of `node`, whose last axes have `width` numbers together, if it is one."""
    a, kw = op.args, op.kwargs
    weight: Any = None
    bias: Any = None
    if op.name == "linear" and _is(a, 0, node):
        weight, bias = argument(a, kw, 1, "weight").T, argument(a, kw, 2, "bias")
    elif op.name == "addmm" and _is(a, 1, node):
        weight, bias = a[2], a[0]
    elif op.name in ("matmul", "__matmul__", "mm") and _is(a, 0, node) and a[1].dim() == 2:
        weight = a[1]
    elif op.name == "conv1d" and _is(a, 0, node) and argument(a, kw, 1, "weight").shape[-1] == 1:
        kernel = argument(a, kw, 1, "weight").squeeze(-1)
        groups = argument(a, kw, 6, "groups") or 1
        weight = torch.block_diag(*kernel.chunk(groups)).T if groups > 1 else kernel.T
        bias = argument(a, kw, 2, "bias")
    elif op.name == "bmm" and _is(a, 0, node):  # groups of heads side by side, each with a matrix of its own
        weight = torch.block_diag(*a[1]) if a[1].shape[0] * a[1].shape[1] == width else None
    elif op.name == "einsum":
        weight = _einsum_weight(op, node, width)
    if weight is None or weight.dim() != 2 or weight.shape[0] != width:
        return None
    if bias is not None and bias.numel() != weight.shape[1]:
        return None
    return LinearMap(weight.detach(), None if bias is None else bias.detach().reshape(-1))


def _einsum_weight(op: Op, node: Node, width: int) -> Tensor | None:
    """The matrix of an einsum of head outputs (…, head, d_v) with one weight, read by its subscripts."""
    if not isinstance(op.args[0], str):
        return None
    operands = op.args[1] if isinstance(op.args[1], (list, tuple)) else op.args[1:]
    if len(operands) != 2 or operands[0] is not node.tensor or "." in op.args[0]:
        return None
    left, rest = op.args[0].replace(" ", "").split(",")
    right, out = rest.split("->")
    summed = [c for c in left if c in right and c not in out]
    free = [c for c in right if c not in left]
    weight: Tensor = operands[1]
    if len(free) != 1 or set(summed) | set(free) != set(right):
        return None
    weight = weight.permute(*(right.index(c) for c in (*summed, *free)))
    return weight.reshape(-1, weight.shape[-1]) if weight[..., 0].numel() == width else None


def _is(args: tuple[object, ...], i: int, node: Node) -> bool:
    return len(args) > i and args[i] is node.tensor


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], i: int, name: str) -> Any:
    """An argument given by place or by name."""
    return args[i] if len(args) > i else kwargs.get(name)
