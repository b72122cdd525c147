"""Which norm reads a tensor, and which norm gave it? Found on the graph of one pass, by what the modules compute."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from whence.reading.wiring.dataflow import closure, origins
from whence.reading.wiring.linear_ops import argument
from whence.reading.wiring.norms import Norm, best_reading, recognise
from whence.reading.wiring.op_graph import ModuleCall, Node, Op, OpGraph


def norm_of(node: Node, uses: list[tuple[Op, Node]], tolerance: float) -> tuple[Norm, Node] | None:
    """The norm that reads `node`, with its output, if one of its uses is a norm."""
    names = {id(n) for n in closure(node)}
    since = node.producer.index if node.producer is not None else -1
    for op, used in uses:
        if op.name in ("layer_norm", "rms_norm"):
            weight = argument(op.args, op.kwargs, 2, "weight")
            bias = argument(op.args, op.kwargs, 3, "bias") if op.name == "layer_norm" else None
            eps = argument(op.args, op.kwargs, 4 if op.name == "layer_norm" else 3, "eps")
            eps_values = [eps] if isinstance(eps, float) else [1e-5, torch.finfo(used.value.dtype).eps]
            detached = [None if not isinstance(t, Tensor) else t.detach() for t in (weight, bias)]
            reading = [(detached[0], detached[1], 0.0)]
            norm = best_reading(reading, eps_values, used.value, op.outputs[0].value, tolerance)
            if norm is not None:
                return norm, op.outputs[0]
        for call in _norm_calls(names, op, since):
            if len(call.outputs) != 1:
                continue
            given = next(n for _, n in call.inputs if id(n) in names)
            norm = recognise(call.module, given.value, call.outputs[0][1].value, tolerance)
            if norm is not None:
                return norm, call.outputs[0][1]
    return None


def _norm_calls(names: set[int], op: Op, since: int) -> Iterator[ModuleCall]:
    """Module calls around `op` that began after `since` and were given one of the nodes in `names`."""
    for call in op.region:
        if call.begin > since and any(id(node) in names for _, node in call.inputs):
            yield call


def norm_making(graph: OpGraph, node: Node, tolerance: float) -> tuple[Norm, Node] | None:
    """The norm that gave `node`, with what it read."""
    same = {id(n) for n in origins(node)}
    for call in reversed(graph.calls):
        # A norm that works in float32 gives a cast of what it computed: either side of the cast may be read on.
        if len(call.outputs) != 1 or not same & {id(n) for n in origins(call.outputs[0][1])}:
            continue
        for _, given in call.inputs:
            if given.value.shape == call.outputs[0][1].value.shape:
                norm = recognise(call.module, given.value, call.outputs[0][1].value, tolerance)
                if norm is not None:
                    return norm, given
    return None


def sole_norm(total: Node, uses: list[tuple[Op, Node]], tolerance: float) -> tuple[Norm, Node] | None:
    """The post-norm: a norm that is the only thing the sum goes into."""
    read = norm_of(total, uses, tolerance)
    if read is None:
        return None
    _, out = read
    inside = _producing_region(out, total)
    if all(op.index in inside for op, _ in uses):
        return read
    return None


def _producing_region(out: Node, source: Node) -> set[int]:
    """Indices of the operations that compute `out` from `source`."""
    todo, seen, ops = [out], {id(out)}, set()
    while todo:
        node = todo.pop()
        op = node.producer
        if op is None or node is source:
            continue
        ops.add(op.index)
        for parent in op.inputs:
            if id(parent) not in seen:
                seen.add(id(parent))
                todo.append(parent)
    since = source.producer.index if source.producer is not None else -1
    return {i for i in ops if i > since}
