"""A map between a head's output and the output projection that differs from row to row: z_i ↦ z_i · L_i.

Rotary values are turned back by the query's own position before they are projected (DeepSeek-V4, the identifiable
decoder): y_i = R_{−i} z_i, and the projection reads y. The operations between the two are run again on unit vectors,
everything else held, which gives L_i itself; that y is z · L, and nothing more, is then checked on random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whence.reading.wiring.dataflow import PASSIVE, NotRecognised
from whence.reading.wiring.op_graph import Node, Op, deviation

_PRODUCTS = {"linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "einsum", "conv1d", "baddbmm"}


@dataclass(frozen=True)
class RowMap:
    """rows (batch, query, d_v, d_v): L, the same for every head. node: the tensor y that the projection reads."""

    rows: Tensor
    node: Node

    def __call__(self, heads: Tensor) -> Tensor:
        """(head, batch · query, d_v) → the same, each row through its own map."""
        return turn(heads, self.rows.flatten(0, 1))


def turn(heads: Tensor, rows: Tensor) -> Tensor:
    """(head, query, d_v) and L (query, d_v, d_v) → z_i L_i."""
    return torch.einsum("hqv,qvw->hqw", heads, rows[: heads.shape[1]].to(heads))


def find_row_map(start: Node, batch: int, heads: int, tolerance: float) -> RowMap:
    """From the head outputs `start` to what the projection reads; raises `NotRecognised` where that is no row map."""
    node = _read_by_a_product(start, batch)
    if node is None:
        raise NotRecognised("no product of matrices reads what is made of the head outputs")
    value = start.value
    size = value.shape[-1]
    queries = node.value[0, :, ...].shape[0]
    if node.value.numel() != batch * queries * heads * size:
        raise NotRecognised(
            "what the next product reads has another size than the head outputs (heads added or dropped)"
        )

    def through(z: Tensor) -> Tensor:
        return _again(node, start, z).reshape(batch, queries, heads, size)

    by_unit = []
    for k in range(size):
        unit = torch.zeros_like(value)
        unit[..., k] = 1.0
        by_unit.append(through(unit))
    maps = torch.stack(by_unit, dim=-2).double()  # (batch, query, head, d_v in, d_v out)
    rows = maps.mean(2)
    if deviation(maps, rows[:, :, None].expand_as(maps)) > tolerance:
        raise NotRecognised("the head outputs go through a map of their own for every row and head (a gate)")
    generator = torch.Generator().manual_seed(0)
    other = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
    for given in (value, other):
        z = given if given.shape[1] == queries and given.shape[2] == heads else given.transpose(1, 2)
        expected = torch.einsum("bqhv,bqvw->bqhw", z.double().reshape(batch, queries, heads, size), rows)
        if deviation(through(given).double(), expected) > tolerance:
            raise NotRecognised("what the projection reads is no linear map of the head outputs, row by row")
    return RowMap(rows.to(torch.promote_types(value.dtype, torch.float32)), node)


def _read_by_a_product(start: Node, batch: int, most: int = 60) -> Node | None:
    """The first tensor of the size of the head outputs, made of them, that a product reads: (batch, query, …)."""
    known: dict[int, Node] = {id(start): start}
    pending: dict[int, Op] = {op.index: op for op in start.consumers}
    for _ in range(most):
        if not pending:
            return None
        op = pending.pop(min(pending))
        if op.name in _PRODUCTS:
            node = next(n for n in op.inputs if id(n) in known)
            while node.producer is not None and node.producer.name in PASSIVE and id(node.producer.inputs[0]) in known:
                before = node.producer.inputs[0]
                fits = node.value.dim() >= 3 and node.value.shape[0] == batch and before is not start
                if before.value.numel() != start.value.numel() or (
                    fits and node.value.shape[1] in start.value.shape[1:3]
                ):
                    break
                node = before
            good = node.value.numel() == start.value.numel() and node.value.shape[0] == batch
            return node if good and node is not start and node.value.dim() >= 3 else None
        for out in op.outputs:
            known[id(out)] = out
            pending |= {use.index: use for use in out.consumers if use.index > op.index}
    return None


def _again(target: Node, start: Node, value: Tensor) -> Tensor:
    """`target` as it would be if `start` had been `value`, everything else as it was."""
    made: dict[int, Tensor] = {id(start): value}
    ops: dict[int, Op] = {}
    todo, seen = [target], {id(target)}
    while todo:  # the operations behind the target, as far back as the head outputs were computed
        op = todo.pop().producer
        if op is None or (start.producer is not None and op.index <= start.producer.index):
            continue
        ops[op.index] = op
        fresh = [n for n in op.inputs if id(n) not in seen]
        seen |= {id(n) for n in fresh}
        todo += fresh
    for index in sorted(ops):
        op = ops[index]
        if not any(id(n) in made for n in op.inputs):
            continue
        if op.name.endswith("_") and not op.name.endswith("__"):
            raise NotRecognised(f"the head outputs are changed in place ({op.name})")
        feed = iter([made.get(id(n), n.value) for n in op.inputs])
        args, kwargs = _replaced((op.args, op.kwargs), feed)
        result = op.func(*args, **kwargs)
        for node, tensor in zip(op.outputs, result if isinstance(result, (list, tuple)) else [result], strict=True):
            made[id(node)] = tensor
    if id(target) not in made:
        raise NotRecognised("what the projection reads was not made of the head outputs")
    return made[id(target)]


def _replaced(thing: Any, feed: Iterator[Tensor]) -> Any:
    """Nested arguments with every tensor replaced by the next one of `feed`, in the order of `op_graph.walk`."""
    if isinstance(thing, Tensor):
        return next(feed)
    if isinstance(thing, (list, tuple)):
        return type(thing)(_replaced(item, feed) for item in thing)
    if isinstance(thing, dict):
        return {key: _replaced(item, feed) for key, item in thing.items()}
    return thing
