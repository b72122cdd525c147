"""(b): the output projection, the linear map that mixes the head outputs into the model's width."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from whence.reading.wiring.dataflow import MUL, NotRecognised, closure, consumers
from whence.reading.wiring.op_graph import Node, Op, deviation, flat


@dataclass(frozen=True)
class Projection:
    """The output projection: head h adds z_h · weight[h] to the block's output, and bias is added once."""

    weight: Tensor  # (head, d_v, d)
    bias: Tensor | None  # (d,)

    @cached_property
    def full_rank(self) -> bool:
        """Whether every head's slice has full row rank, so that T = V W has the column space of V. Measured once."""
        if self.weight.shape[-2] > self.weight.shape[-1]:
            return False
        weight = self.weight.detach().to(torch.float64)
        if self.weight.dtype == torch.float64:
            singular = torch.linalg.svdvals(weight).flip(-1)
        else:  # float32 weights are far coarser than the square root of float64's eps, so the Gram matrix tells
            singular = torch.linalg.eigvalsh(weight @ weight.mT).clamp(min=0).sqrt()
        cut = singular[..., -1] * max(self.weight.shape[-2:]) * torch.finfo(self.weight.dtype).eps
        return bool((singular[..., 0] > cut).all())

    def __call__(self, heads: Tensor) -> Tensor:
        """(head, query, d_v) → (query, d)"""
        out = torch.einsum("hqv,hvd->qd", heads, self.weight.to(heads))
        return out if self.bias is None else out + self.bias.to(out)


def find_projection(start: Node, heads: Tensor, tolerance: float) -> tuple[Projection, Node, float]:
    """From the head outputs (head, query, d_v) to the linear map that mixes them into the model's width."""
    tried: list[str] = []
    for op, node in consumers(closure(start)):
        projection = as_linear(op, node, heads.shape[0], heads.shape[2])
        out = op.outputs[0] if projection is not None else None
        if projection is None:
            projection, out = _as_added(op, node, heads.shape[0], heads.shape[2])
        if projection is None or out is None:
            tried.append(op.name)
            continue
        expected = projection(heads.to(torch.float64))
        error = deviation(flat(out.value), expected)
        if error <= tolerance:
            return projection, out, error
        tried.append(f"{op.name} (its output differs by {error:.1e} from Σ heads · weight + bias)")
    if not tried:
        raise NotRecognised("nothing was computed from the head outputs")
    gates = sum(name in MUL or "sigmoid" in name for name in tried)
    hint = (
        "; the head outputs are multiplied by something (a gate or a scale) before they are projected" if gates else ""
    )
    raise NotRecognised(
        f"no linear map of the head outputs alone was found; they go into: {', '.join(dict.fromkeys(tried))}{hint}"
    )


def as_linear(op: Op, node: Node, heads: int, size: int) -> Projection | None:
    """The operation as a projection of flattened head outputs, if it is one."""
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
    elif op.name == "einsum":
        weight = _einsum_weight(op, node, heads, size)
    if weight is None or weight.dim() != 2 or weight.shape[0] != heads * size:
        return None
    if bias is not None and bias.numel() != weight.shape[1]:
        return None
    return Projection(weight.detach().unflatten(0, (heads, size)), None if bias is None else bias.detach().reshape(-1))


def _as_added(op: Op, node: Node, heads: int, size: int) -> tuple[Projection | None, Node | None]:
    """Heads added first and then projected, (Σ_h z_h) W: every head is given the same W. With the projected tensor.

    That the sum runs over the heads, and over nothing else, is left to the caller's check by value.
    """
    if op.name != "sum" or not op.outputs or op.outputs[0].value.numel() * heads != node.value.numel():
        return None, None
    for after, summed in consumers(closure(op.outputs[0])):
        one = as_linear(after, summed, 1, size)
        if one is not None:
            return Projection(one.weight.expand(heads, -1, -1), one.bias), after.outputs[0]
    return None, None


def _einsum_weight(op: Op, node: Node, heads: int, size: int) -> Tensor | None:
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
    return weight.reshape(-1, weight.shape[-1]) if weight[..., 0].numel() == heads * size else None


def _is(args: tuple[object, ...], i: int, node: Node) -> bool:
    return len(args) > i and args[i] is node.tensor


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], i: int, name: str) -> Any:
    """An argument given by place or by name."""
    return args[i] if len(args) > i else kwargs.get(name)
