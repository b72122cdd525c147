"""The linear maps behind a tensor: with their adapters, behind an activation, cut in two, or by columns of heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from whence.reading.wiring.affine import affine
from whence.reading.wiring.dataflow import ADD, MUL, closure, origins
from whence.reading.wiring.linear_ops import LinearMap, as_linear
from whence.reading.wiring.op_graph import Node, Op, flat


def as_linear_map(op: Op) -> tuple[Node, LinearMap] | None:
    """The operation as a linear map with constant weights: what it reads, and its weights."""
    for node in op.inputs:
        if node.value.dim() < 2:
            continue
        found = as_linear(op, node, node.value.shape[-1])
        if found is not None and not isinstance(node.tensor, nn.Parameter):
            return node, found
    return _adapted(op) if op.name in ADD else None


def scaled_linear_map(op: Op) -> tuple[Node, LinearMap] | None:
    """The same, or such a map times a vector of weights, as IA³ adapts it."""
    return _adapted(op) if op.name in MUL else as_linear_map(op)


def _adapted(op: Op) -> tuple[Node, LinearMap] | None:
    """A sum of linear maps of one tensor (a map and its adapters), or one times a vector of weights, as one linear map."""
    todo = [origins(node)[-1] for node in op.inputs]
    for node in todo:  # grows
        made = node.producer
        if made is None or len(todo) > 8:
            continue
        direct = None if made.name in ADD else as_linear_map(made)
        if direct is not None:
            read = origins(direct[0])[-1]
            whole = affine(op.outputs[0], {id(n) for n in closure(read)}, read.value.shape[-1])
            return None if whole is None or whole.weight is None else (read, LinearMap(whole.weight, whole.bias))
        if made.name in ADD:
            todo += [origins(n)[-1] for n in made.inputs]
    return None


def linear_behind(node: Node) -> tuple[Node, LinearMap, Node] | None:
    """The one linear map that `node` is an element-wise function of: what it reads, its weights, its output."""
    todo, seen = [node], {id(node)}
    found: list[tuple[Node, LinearMap, Node]] = []
    while todo:
        current = todo.pop()
        part = _slice_of_linear(current, node.value.shape)
        if part is not None:
            found.append(part)
            continue
        op = current.producer
        if op is None:
            continue
        if len(seen) > 40 or as_linear_map(op) is not None:
            return None
        for parent in op.inputs:
            if id(parent) not in seen and parent.value.shape == node.value.shape:
                seen.add(id(parent))
                todo.append(parent)
    if len({id(n) for _, _, n in found}) != 1:
        return None
    return found[0]


def _slice_of_linear(node: Node, shape: torch.Size) -> tuple[Node, LinearMap, Node] | None:
    """`node` as (a part of) a linear map's output: gate and value often come from one matrix, cut in two."""
    if node.value.shape != shape or node.producer is None:
        return None
    op = origins(node)[-1].producer  # some linear maps work on (rows, d) and are given their shape back
    if op is None:
        return None
    direct = as_linear_map(op)
    if direct is not None:
        return origins(direct[0])[-1], direct[1], node
    if op.name not in ("chunk", "split", "__getitem__", "unbind", "narrow") or not op.inputs:
        return None
    whole = origins(op.inputs[0])[-1]
    made = None if whole.producer is None else as_linear_map(whole.producer)
    if made is None:
        return None
    columns = matching_columns(flat(whole.value), flat(node.value))
    if columns is None:
        return None
    return origins(made[0])[-1], made[1].columns(columns), node


def matching_columns(whole: Tensor, part: Tensor) -> Tensor | None:
    """Which columns of `whole` (rows, m) are the columns of `part` (rows, k), by their numbers; None if not all are."""
    if whole.shape[0] != part.shape[0] or whole.shape[0] < 2:
        return None
    apart = torch.cdist(part.T.contiguous(), whole.T.contiguous(), p=torch.inf)
    least, at = apart.min(dim=1)
    return at if bool((least == 0).all()) and len(at.unique()) == len(at) else None
