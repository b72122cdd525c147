"""Is one tensor an affine map of another, by the operations between them? Linear adapters are read with what they adapt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from whence.reading.wiring.dataflow import ADD, DIV, MUL, PASSIVE, SUB, constant_factor
from whence.reading.wiring.linear_ops import as_linear
from whence.reading.wiring.op_graph import Node, Op, flat


@dataclass(frozen=True)
class AffineMap:
    """x = z · weight + bias, of some tensor z; weight None: z itself, times `factor`."""

    weight: Tensor | None = None  # (width of z, width of x)
    bias: Tensor | None = None
    factor: Tensor | float | None = None  # on z, entry by entry, before any matrix

    def then(self, weight: Tensor, bias: Tensor | None) -> AffineMap:
        """A further linear map."""
        own = self.weight
        if own is None:
            moved = weight if self.factor is None else _columns(self.factor, weight) * weight
        else:
            weight = _at_least_float32(weight)
            moved = _at_least_float32(own) @ weight
        carried = None if self.bias is None else self.bias.to(weight) @ weight
        return AffineMap(moved, _plus(carried, bias))

    def times(self, factor: Tensor | float) -> AffineMap:
        if self.weight is None:
            return AffineMap(None, _scaled(self.bias, factor), factor if self.factor is None else self.factor * factor)
        return AffineMap(_scaled(_at_least_float32(self.weight), factor), _scaled(self.bias, factor))

    def plus(self, other: AffineMap, sign: float = 1.0) -> AffineMap | None:
        if self.weight is None or other.weight is None or self.weight.shape != other.weight.shape:
            return None
        weight = _at_least_float32(self.weight) + sign * _at_least_float32(other.weight)
        return AffineMap(weight, _plus(self.bias, _scaled(other.bias, sign)))


def _at_least_float32(tensor: Tensor) -> Tensor:
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


def affine(node: Node, sources: set[int], width: int) -> AffineMap | None:
    """`node` as an affine map of the tensor whose nodes are `sources`, by the operations between them; None if it is not.

    Adapters that are linear (LoRA, DoRA, IA³) are one matrix together with what they adapt. width: how many numbers the
    tensor has for each position.
    """
    known: dict[int, AffineMap | None] = {}  # without it, every residual above would be followed twice

    def of(node: Node) -> AffineMap | None:
        if id(node) in sources:
            return AffineMap()
        if id(node) not in known:
            known[id(node)] = None if node.producer is None or not node.producer.inputs else step(node, node.producer)
        return known[id(node)]

    def step(node: Node, op: Op) -> AffineMap | None:
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
            linear = as_linear(op, given, width if inner.weight is None else given.value.shape[-1])
            return None if linear is None else inner.then(linear.weight, linear.bias)
        return None

    def added(op: Op, sign: float) -> AffineMap | None:
        left, right = map(of, op.inputs)
        if left is not None and right is not None:
            return left.plus(right, sign)
        inner, other = (left, op.inputs[1]) if left is not None else (right, op.inputs[0])
        if inner is None or not constant(other) or (left is None and sign < 0):
            return None
        vector = flat(other.value)[0]  # a vector of weights, possibly repeated for every token
        return AffineMap(inner.weight, _plus(inner.bias, (sign * vector).to(other.value)), inner.factor)

    return of(node)


def _factor(op: Op, given: Node) -> Tensor | float | None:
    """A number, or a vector of constants, that `given` is multiplied by."""
    factor = constant_factor(op, given)
    return constant_vector(op, given) if factor is None else factor


def constant_vector(op: Op, given: Node) -> Tensor | None:
    """A vector of weights that `given` is multiplied by."""
    for node in op.inputs:
        if node is not given and node.value.numel() == node.value.shape[-1] and constant(node):
            return node.value.detach().reshape(-1).reciprocal() if op.name in DIV else node.value.detach().reshape(-1)
    return None


def constant(node: Node) -> bool:
    """Whether a tensor is made of weights alone, and of nothing that the model was given."""
    todo, seen = [node], {id(node)}
    while todo:
        current = todo.pop()
        op = current.producer
        if op is None:
            if not isinstance(current.tensor, nn.Parameter):
                return False
            continue
        given = op.inputs[:1] if op.name.endswith("_as") else op.inputs  # expand_as(x, y) takes of y its shape
        fresh = [n for n in given if id(n) not in seen]
        seen |= {id(n) for n in fresh}
        todo += fresh
    return True
