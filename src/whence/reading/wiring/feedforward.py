"""The feed-forward half of a block, from the state after attention to the block's output.

    o = wiring( s, W₂ (act(W₁ n(s)) [⊙ W₃ n(s)]) )

each part absent where the model has none. Found like the attention's wiring, by following tensors on the graph of one
short pass, and proved by rebuilding the block's output from the state in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from whence.reading.wiring.affine import constant_vector
from whence.reading.wiring.dataflow import (
    ADD,
    DIV,
    MUL,
    NotRecognised,
    ancestors,
    closure,
    constant_factor,
    consumers,
    origins,
)
from whence.reading.wiring.equation import Factor, Wiring
from whence.reading.wiring.linear_maps import as_linear_map, linear_behind
from whence.reading.wiring.linear_ops import LinearMap
from whence.reading.wiring.norm_search import norm_making, norm_of
from whence.reading.wiring.norms import Norm
from whence.reading.wiring.op_graph import Node, Op, OpGraph, deviation, flat
from whence.reading.wiring.residual import WiringEvidence, block_output


@dataclass(frozen=True)
class FeedForward:
    """The second half of a block, as a function of each position's state alone."""

    norm_in: Norm | None  # pre-norm: what the first linear map reads is normed
    first: LinearMap
    activation: Callable[[Tensor], Tensor]
    gate: LinearMap | None  # what the activation is multiplied by, where it is gated
    second: LinearMap
    wiring: Wiring
    error: float = 0.0

    def read(self, state: Tensor) -> Tensor:
        """n(s)"""
        return state if self.norm_in is None else self.norm_in(state)

    def hidden(self, read: Tensor) -> Tensor:
        """What the second linear map is given, from n(s)."""
        hidden = self.activation(self.first(read))
        return hidden if self.gate is None else hidden * self.gate(read)

    def before_norm(self, state: Tensor) -> Tensor:
        """The sum of state and branch, before a post-norm."""
        return self.wiring.carried(state) + self.wiring.branch(self.second(self.hidden(self.read(state))))

    def __call__(self, state: Tensor) -> Tensor:
        """(…, d) → (…, d): the block's output."""
        return self.wiring.finish(self.before_norm(state))


def find_feedforward(
    graph: OpGraph, op: Op | None, evidence: WiringEvidence, others: set[int], tolerance: float
) -> FeedForward:
    """The half that follows the attention call made by `op`. others: ids of where the other attention calls start."""
    state, wiring = evidence.state, evidence.wiring
    if op is None or state is None or wiring is None or evidence.reason_c is not None:
        raise NotRecognised(f"the state after attention is not known ({evidence.reason_c or evidence.reason_b})")
    if wiring.parallel:
        raise NotRecognised("attention and feed-forward layer are parallel: there is no state between them")
    out = block_output(op, evidence)
    if out is None:
        raise NotRecognised("no module shows the state after the block")
    if id(out) in {id(n) for n in (*origins(state), *closure(state))}:
        raise NotRecognised("the block ends with its attention")
    if ancestors([out]) & (others - ancestors([state])):
        raise NotRecognised("another attention layer stands between this one and the end of the block")
    last = {id(n) for n in origins(out)}
    same = {id(n) for n in (*origins(state), *closure(state))}
    for add, used in consumers(closure(state)):
        direct = add.name in ADD
        scaled = add.name in MUL | DIV and constant_factor(add, used) is not None
        if not direct and not scaled:
            continue
        carried = None
        if scaled:
            carried = constant_factor(add, used)
            sums = [o for o, _ in consumers(closure(add.outputs[0])) if o.name in ADD]
            if not sums:
                continue
            used, add = add.outputs[0], sums[0]
        rest = [n for n in add.inputs if id(n) not in {id(m) for m in (*origins(used), *closure(used))}]
        if len(rest) != 1 or rest[0].value.numel() != state.value.numel():
            continue
        total, norm = add.outputs[0], None
        if not last & {id(n) for n in (*closure(total), *origins(total))}:
            after = norm_of(total, consumers(closure(total)), tolerance)
            if after is None or not last & {id(n) for n in (*closure(after[1]), *origins(after[1]))}:
                continue
            norm = after[0]
        made = _branch(graph, rest[0], same, carried, norm, tolerance)
        rebuilt = made(flat(state.value))
        error = deviation(flat(out.value), rebuilt)
        if error > tolerance:
            raise NotRecognised(f"rebuilding the block's output misses it by {error:.1e} (tolerance {tolerance:.0e})")
        return replace(made, error=error)
    raise NotRecognised("no sum of the state after attention and something made of it gives the block's output")


def _branch(
    graph: OpGraph,
    node: Node,
    same: set[int],
    carried: Factor,
    norm: Norm | None,
    tolerance: float,
) -> FeedForward:
    """Back from the branch's end: factor, norm, second linear map, activation, first linear map, norm."""
    scale: Factor = None
    branch_norm: Norm | None = None
    for _ in range(6):
        node = origins(node)[-1]
        op = node.producer
        if op is None:
            raise NotRecognised("the feed-forward branch comes from nowhere")
        second = as_linear_map(op)
        if second is not None:
            break
        normed = norm_making(graph, node, tolerance)
        if normed is not None and branch_norm is None:
            branch_norm, node = normed
            continue
        inner = next((n for n in op.inputs if n.value.shape == node.value.shape), None)
        factor = None if inner is None or op.name not in MUL | DIV else constant_factor(op, inner)
        if factor is None or inner is None or branch_norm is not None:
            raise NotRecognised(f"the feed-forward branch ends in {op.name}, which is not a linear map")
        scale = factor if scale is None else scale * factor
        node = inner
    else:
        raise NotRecognised("the feed-forward branch does not end in a linear map")
    hidden, outward = _unscaled(origins(second[0])[-1], second[1])
    first, activation, gate, read = _first(hidden)
    norm_in: Norm | None = None
    if not same & {id(n) for n in origins(read)}:
        normed = norm_making(graph, read, tolerance)
        if normed is None or not same & {id(n) for n in origins(normed[1])}:
            raise NotRecognised("the feed-forward layer reads neither the state after attention nor a norm of it")
        norm_in = normed[0]
    wiring = Wiring.of_parts(norm, branch_norm, scale, carried)
    return FeedForward(norm_in, first, activation, gate, outward, wiring)


def _unscaled(hidden: Node, second: LinearMap) -> tuple[Node, LinearMap]:
    """A vector of weights that the second linear map's input is multiplied by, as IA³ has it, belongs to that map."""
    op = hidden.producer
    if op is None or op.name not in MUL:
        return hidden, second
    for inner in op.inputs:
        factor = None if inner.value.shape != hidden.value.shape else constant_vector(op, inner)
        if factor is not None:
            weight = second.weight.detach()
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
            return origins(inner)[-1], LinearMap(factor.to(weight)[:, None] * weight, second.bias)
    return hidden, second


def _first(hidden: Node) -> tuple[LinearMap, Callable[[Tensor], Tensor], LinearMap | None, Node]:
    """From what the second linear map reads back to the first: the activation between them, and a gate."""
    op = hidden.producer
    tensors = [] if op is None else [n for n in op.inputs if n.value.shape == hidden.value.shape]
    if op is not None and op.name in MUL and len(tensors) == 2 and _gated(tensors):
        sides = [linear_behind(n) for n in tensors]
        for (plain, other), (gate, first) in (((0, 1), sides), ((1, 0), sides[::-1])):
            if gate is None or gate[2] is not tensors[plain]:
                continue
            first = linear_behind(tensors[other])
            if first is None or first[0] is not gate[0]:
                continue
            return first[1], _elementwise(first[2], tensors[other]), gate[1], first[0]
        raise NotRecognised("the feed-forward layer multiplies two things, neither of which is a plain linear map")
    behind = linear_behind(hidden)
    if behind is None:
        raise NotRecognised("no single linear map stands before the feed-forward layer's activation")
    return behind[1], _elementwise(behind[2], hidden), None, behind[0]


def _gated(nodes: list[Node]) -> bool:
    """Both factors come from linear maps, and not from one another (x · sigmoid(x) is an activation, not a gate)."""
    sides = [linear_behind(n) for n in nodes]
    if any(side is None for side in sides):
        return False
    left, right = sides
    assert left is not None
    assert right is not None
    return left[2] is not right[2]


def _elementwise(start: Node, end: Node) -> Callable[[Tensor], Tensor]:
    """The function from `start` to `end`, by running the operations between them again on other numbers."""
    behind: dict[int, bool] = {}

    def moves(node: Node) -> bool:
        """Whether the node depends on `start`: the graph stays as it is, so it is asked once."""
        if id(node) not in behind:
            behind[id(node)] = id(start) in ancestors([node])
        return behind[id(node)]

    def function(x: Tensor) -> Tensor:
        known: dict[int, Any] = {id(start): x}

        def value(node: Node) -> Any:
            if id(node) not in known:
                op = node.producer
                if op is None or not moves(node):
                    known[id(node)] = node.value.to(x) if node.value.is_floating_point() else node.value
                else:
                    known[id(node)] = op.func(*_put(op.args, op, value), **_put(op.kwargs, op, value))
            return known[id(node)]

        result: Tensor = value(end)
        return result

    return function


def _put(things: Any, op: Op, value: Callable[[Node], Any]) -> Any:
    """The arguments of an operation with its input tensors made anew."""
    if isinstance(things, Tensor):
        return next((value(n) for n in op.inputs if n.tensor is things), things)
    if isinstance(things, (list, tuple)):
        return type(things)(_put(t, op, value) for t in things)
    if isinstance(things, dict):
        return {k: _put(t, op, value) for k, t in things.items()}
    return things
