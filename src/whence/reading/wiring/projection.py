"""(b): the output projection, the linear map that mixes the head outputs into the model's width."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from whence.core.numerics.tolerances import weight_rank_tolerance
from whence.reading.wiring.dataflow import (
    ADD,
    DIV,
    MUL,
    PASSIVE,
    SUB,
    NotRecognised,
    closure,
    constant_factor,
    consumers,
    origins,
)
from whence.reading.wiring.op_graph import Node, Op, deviation, flat
from whence.reading.wiring.row_map import find_row_map, turn


@dataclass(frozen=True)
class Projection:
    """The output projection: head h adds z_h · weight[h] to the block's output, and bias is added once.

    rows: where the head outputs go through a map that differs from row to row first (rotary values are turned back),
    row i adds z_hi · rows[i] · weight[h]. It belongs to the rows of one pass.
    """

    weight: Tensor  # (head, d_v, d)
    bias: Tensor | None  # (d,)
    rows: Tensor | None = None  # (query, d_v, d_v)

    @cached_property
    def full_rank(self) -> bool:
        """Whether every head's slice has full row rank, so that T = V W has the column space of V. Measured once."""
        if self.weight.shape[-2] > self.weight.shape[-1]:
            return False
        return self.condition * weight_rank_tolerance(self.weight.dtype) < 1

    @cached_property
    def condition(self) -> float:
        """σ_max / σ_min of the worst head's slice, in float64 whatever the model's dtype; infinite below full rank.

        The dtype decides what the weights are, not how they are measured: a real projection has σ_min/σ_max of 1e-5 to
        5e-5, far below the eps of bfloat16 (8e-3), and no rank is lost by it.
        """
        singular = torch.linalg.svdvals(self.weight.detach().to(torch.float64))
        least, most = singular[..., -1], singular[..., 0]
        return float(torch.where(least > 0, most / least, torch.inf).max())

    def __call__(self, heads: Tensor) -> Tensor:
        """(head, query, d_v) → (query, d)"""
        heads = heads if self.rows is None else turn(heads, self.rows)
        out = torch.einsum("hqv,hvd->qd", heads, self.weight.to(heads))
        return out if self.bias is None else out + self.bias.to(out)


@dataclass(frozen=True)
class Affine:
    """x = z · weight + bias, of some tensor z; weight None: z itself, times `factor`."""

    weight: Tensor | None = None  # (width of z, width of x)
    bias: Tensor | None = None
    factor: Tensor | float | None = None  # on z, entry by entry, before any matrix

    def then(self, weight: Tensor, bias: Tensor | None) -> Affine:
        """A further linear map."""
        own = self.weight
        if own is None:
            moved = weight if self.factor is None else _columns(self.factor, weight) * weight
        else:
            moved, weight = _wide(own) @ _wide(weight), _wide(weight)
        carried = None if self.bias is None else self.bias.to(weight) @ weight
        return Affine(moved, _plus(carried, bias))

    def times(self, factor: Tensor | float) -> Affine:
        if self.weight is None:
            return Affine(None, _scaled(self.bias, factor), factor if self.factor is None else self.factor * factor)
        return Affine(_scaled(_wide(self.weight), factor), _scaled(self.bias, factor))

    def plus(self, other: Affine, sign: float = 1.0) -> Affine | None:
        if self.weight is None or other.weight is None or self.weight.shape != other.weight.shape:
            return None
        return Affine(_wide(self.weight) + sign * _wide(other.weight), _plus(self.bias, _scaled(other.bias, sign)))


def _wide(tensor: Tensor) -> Tensor:
    """Matrices that are multiplied or added are kept in float32 at least, whatever the model's dtype."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _columns(factor: Tensor | float, like: Tensor) -> Tensor | float:
    return factor.detach().to(like).reshape(-1, 1) if isinstance(factor, Tensor) else factor


def _scaled(tensor: Tensor | None, factor: Tensor | float) -> Tensor | None:
    if tensor is None:
        return None
    return tensor * (factor.detach().to(tensor).reshape(-1) if isinstance(factor, Tensor) else factor)


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one + other.detach().reshape(-1).to(one)


def affine(node: Node, sources: set[int], heads: tuple[int, int]) -> Affine | None:
    """`node` as an affine map of the tensor whose nodes are `sources`, by the operations between them; None if it is not.

    Adapters that are linear (LoRA, DoRA, IA³) are one matrix together with what they adapt. heads: (head, d_v), how the
    last axis of the tensor is made up.
    """
    known: dict[int, Affine | None] = {}  # without it, every residual above would be followed twice

    def of(node: Node) -> Affine | None:
        if id(node) in sources:
            return Affine()
        if id(node) not in known:
            known[id(node)] = None if node.producer is None or not node.producer.inputs else step(node, node.producer)
        return known[id(node)]

    def step(node: Node, op: Op) -> Affine | None:
        if op.name in PASSIVE:
            return of(op.inputs[0]) if op.inputs[0].value.numel() == node.value.numel() else None
        if op.name in ADD | SUB and len(op.inputs) == 2 and op.kwargs.get("alpha", 1) == 1:
            return added(op, -1.0 if op.name in SUB else 1.0)
        for given in op.inputs:
            if given.value.dim() < 2 or isinstance(given.tensor, nn.Parameter) or (inner := of(given)) is None:
                continue
            if op.name in MUL | DIV:
                factor = _factor(op, given)
                return None if factor is None else inner.times(factor)
            linear = as_linear(op, given, *(heads if inner.weight is None else (1, given.value.shape[-1])))
            return None if linear is None else inner.then(linear.weight.flatten(0, 1), linear.bias)
        return None

    def added(op: Op, sign: float) -> Affine | None:
        left, right = map(of, op.inputs)
        if left is not None and right is not None:
            return left.plus(right, sign)
        inner, other = (left, op.inputs[1]) if left is not None else (right, op.inputs[0])
        if inner is None or not _constant(other) or (left is None and sign < 0):
            return None
        vector = flat(other.value)[0]  # a vector of weights, possibly repeated for every token
        return Affine(inner.weight, _plus(inner.bias, (sign * vector).to(other.value)), inner.factor)

    return of(node)


def _factor(op: Op, given: Node) -> Tensor | float | None:
    """A number, or a vector of constants, that `given` is multiplied by."""
    factor = constant_factor(op, given)
    if factor is not None:
        return factor
    for node in op.inputs:
        if node is not given and node.value.numel() == node.value.shape[-1] and _constant(node):
            return node.value.detach().reshape(-1).reciprocal() if op.name in DIV else node.value.detach().reshape(-1)
    return None


def _constant(node: Node) -> bool:
    """Whether a tensor is made of weights alone, and of nothing that the model was given."""
    todo, seen = [node], {id(node)}
    while todo:
        current = todo.pop()
        op = current.producer
        if op is None:
            if not isinstance(current.tensor, nn.Parameter):
                return False
            continue
        given = (
            op.inputs[:1] if op.name.endswith("_as") else op.inputs
        )  # of the second, expand_as takes the shape alone
        fresh = [n for n in given if id(n) not in seen]
        seen |= {id(n) for n in fresh}
        todo += fresh
    return True


def find_projection(start: Node, heads: Tensor, tolerance: float) -> tuple[Projection, Node, float]:
    """From the head outputs (head, query, d_v) to the linear map that mixes them into the model's width.

    What comes from the head outputs is followed, in the order in which it was computed, to the first tensor that all of
    it goes through. That tensor is affine in the head outputs, or there is no projection.
    """
    tried: list[str] = []
    sources = {id(n) for n in closure(start)}
    shape = (heads.shape[0], heads.shape[2])
    best: tuple[Projection, Node, float] | None = None
    grouped = False
    for node in _narrows(start):
        op = node.producer
        assert op is not None
        grouped = op.name == "bmm" or (grouped and op.name in PASSIVE)
        if grouped:  # groups of heads are still side by side: the matrix that mixes them follows
            continue
        if best is not None and not (op.name in ADD and any(map(_constant, op.inputs))):
            return best  # a bias of its own, added after the matrix, belongs to the projection; nothing else does
        summed = _as_added(op, node, heads.shape[0], heads.shape[2])
        made = affine(node, sources, shape)
        if made is not None and made.weight is None:
            continue
        projection, out = summed if made is None else (None, node)
        if made is not None and made.weight is not None and made.weight.shape[0] == shape[0] * shape[1]:
            projection = Projection(made.weight.detach().unflatten(0, shape), made.bias)
        if projection is None or out is None:
            tried = tried or [use.name for use, _ in consumers(closure(start))]
            break
        error = deviation(flat(out.value), projection(heads.to(torch.float64)))
        if error <= tolerance:
            best = projection, out, error
            continue
        tried.append(f"{op.name} (its output differs by {error:.1e} from Σ heads · weight + bias)")
        break
    if best is not None:
        return best
    if not tried:
        tried = [use.name for use, _ in consumers(closure(start))]
    if not tried:
        raise NotRecognised("nothing was computed from the head outputs")
    gates = sum(name in MUL or "sigmoid" in name for name in tried)
    hint = (
        "; the head outputs are multiplied by something (a gate or a scale) before they are projected" if gates else ""
    )
    if not gates and tried.count("linear") > 1:
        hint = "; something that is not linear (an adapter) reads them beside the projection"
    raise NotRecognised(
        f"no linear map of the head outputs alone was found; they go into: {', '.join(dict.fromkeys(tried))}{hint}"
    )


def find_turned_projection(start: Node, heads: Tensor, batch: int, tolerance: float) -> tuple[Projection, Node, float]:
    """The same where the head outputs are turned, row by row, before they are projected."""
    turned = find_row_map(start, batch, heads.shape[0], tolerance)
    projection, out, error = find_projection(turned.node, turned(heads), tolerance)
    return replace(projection, rows=turned.rows.flatten(0, 1)), out, error


def _narrows(start: Node, most: int = 200) -> Iterator[Node]:
    """The tensors through which everything that was computed from `start` goes, in the order of computation."""
    known = {id(start)}
    pending: dict[int, Op] = {op.index: op for op in start.consumers}
    for _ in range(most):
        if not pending:
            return
        op = pending.pop(min(pending))
        for out in op.outputs:
            if id(out) not in known:
                known.add(id(out))
                pending |= {use.index: use for use in out.consumers if use.index > op.index}
        if len(op.outputs) != 1:
            continue
        same = {id(n) for n in (*origins(op.outputs[0]), *closure(op.outputs[0]))}
        onward = [
            use for use in pending.values() if use.name not in PASSIVE or any(out.consumers for out in use.outputs)
        ]
        if all(id(n) in same for use in onward for n in use.inputs if id(n) in known):
            yield op.outputs[0]


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
    elif op.name == "bmm" and _is(a, 0, node):  # groups of heads side by side, each with a matrix of its own
        weight = torch.block_diag(*a[1]) if a[1].shape[0] * a[1].shape[1] == heads * size else None
    elif op.name == "einsum":
        weight = _einsum_weight(op, node, heads, size)
    if weight is None or weight.dim() != 2 or weight.shape[0] != heads * size:
        return None
    if bias is not None and bias.numel() != weight.shape[1]:
        return None
    return Projection(weight.detach().unflatten(0, (heads, size)), None if bias is None else bias.detach().reshape(-1))


def _as_added(op: Op, summed: Node, heads: int, size: int) -> tuple[Projection | None, Node | None]:
    """Heads added first and then projected, (Σ_h z_h) W: every head is given the same W. With the projected tensor.

    That the sum runs over the heads, and over nothing else, is left to the caller's check by value.
    """
    if op.name != "sum" or not op.inputs or summed.value.numel() * heads != op.inputs[0].value.numel():
        return None, None
    for after, used in consumers(closure(summed)):
        one = as_linear(after, used, 1, size)
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
