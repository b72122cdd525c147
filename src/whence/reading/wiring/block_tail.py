"""The rest of a block: from the state after attention, through the feed-forward layer, to the block's output.

    o = norm( a·s + b · branch_norm( W₂ (act(W₁ n(s)) [⊙ W₃ n(s)]) ) )

each part absent where the model has none. WiringEvidence like the attention's wiring, by following tensors on the graph of one
short pass, and proved by rebuilding the block's output from the state in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whence.errors import WiringError
from whence.model.load import Model
from whence.model.memory import remembered
from whence.reading.capture.attach import accepted, attached
from whence.reading.capture.recorder import AttentionRecorder, Call
from whence.reading.inputs import beginning
from whence.reading.rerun.run import on_device
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
    times,
)
from whence.reading.wiring.norms import Norm, recognise
from whence.reading.wiring.op_graph import Node, Op, OpGraph, deviation, flat, walk
from whence.reading.wiring.projection import affine, as_linear
from whence.reading.wiring.proof import Proof, _producer, _read_site
from whence.reading.wiring.residual import WiringEvidence, block_output, norm_of


@dataclass(frozen=True)
class Linear:
    """x · weight + bias."""

    weight: Tensor  # (in, out)
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        y = x @ self.weight.to(x)
        return y if self.bias is None else y + self.bias.to(y)


@dataclass(frozen=True)
class FeedForward:
    """The second half of a block, as a function of each position's state alone."""

    norm_in: Norm | None  # pre-norm: what the first linear map reads is normed
    first: Linear
    activation: Callable[[Tensor], Tensor]
    gate: Linear | None  # what the activation is multiplied by, where it is gated
    second: Linear
    branch_norm: Norm | None
    branch_scale: Tensor | float | None
    residual_scale: Tensor | float | None
    norm: Norm | None  # post-norm: after the add
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
        branch = self.second(self.hidden(self.read(state)))
        if self.branch_norm is not None:
            branch = self.branch_norm(branch)
        return times(state, self.residual_scale) + times(branch, self.branch_scale)

    def __call__(self, state: Tensor) -> Tensor:
        """(…, d) → (…, d): the block's output."""
        total = self.before_norm(state)
        return total if self.norm is None else self.norm(total)


@dataclass(frozen=True)
class Reading:
    """What was found of the rest of one block: the feed-forward part, or why there is none."""

    feedforward: FeedForward | None
    maps: tuple[Linear, Linear, Linear] | None  # r → queries, keys, values, after `norm_in`; where they are plain
    values: Linear | None  # r → values alone
    norm_in: Norm | None  # what queries, keys and values are read through
    reason: str | None
    maps_reason: str | None


def read_blocks(model: Model, proof: Proof, inputs: Mapping[str, Tensor]) -> dict[tuple[str, int], Reading]:
    """Every block of the model by (stack, layer): made once per model, on the beginning of these inputs."""
    return remembered(model.model, "blocks", lambda: _read(model.model, proof, on_device(model, beginning(inputs))))


def feedforward_of(model: Model, proof: Proof, inputs: Mapping[str, Tensor], stack: str, layer: int) -> FeedForward:
    """The proved feed-forward part of one block; refused with the reason otherwise."""
    reading = read_blocks(model, proof, inputs).get((stack, layer))
    if reading is None or reading.feedforward is None:
        why = "it was not found" if reading is None else reading.reason
        raise WiringError(f"{stack} layer {layer}: the feed-forward part of the block is not proved: {why}.")
    return reading.feedforward


def _read(model: nn.Module, proof: Proof, inputs: Mapping[str, Tensor]) -> dict[tuple[str, int], Reading]:
    inputs = accepted(model, inputs)
    batch = next(iter(t for _, t in walk(dict(inputs)))).shape[0]
    recorder, graph = AttentionRecorder(), OpGraph(batch)
    with ExitStack() as stack:
        stack.enter_context(graph)
        stack.enter_context(graph.modules(model))
        stack.enter_context(attached(model, proof.capture, recorder, batch))
        model(**inputs)
    starts = [graph.node(call.node) for call in recorder.calls if call.node is not None]
    found = {}
    for site, call in zip(proof.sites, recorder.calls, strict=True):
        _, read = _read_site(graph, call, proof.tolerance)
        others = {id(n) for n in starts if n.tensor is not call.node}
        try:
            feedforward, reason = _feedforward(graph, call, read, others, proof.tolerance), None
        except NotRecognised as problem:
            feedforward, reason = None, str(problem)
        maps, values, norm_in, maps_reason = None, None, None, None
        try:
            norm_in, values = _value_map(graph, call.value, read, proof.tolerance)
            maps = _plain_maps(graph, call, read, norm_in, values, proof.tolerance)
        except NotRecognised as problem:
            maps_reason = str(problem)
        found[site.stack, site.layer] = Reading(feedforward, maps, values, norm_in, reason, maps_reason)
    return found


# -- the feed-forward part -----------------------------------------------------------------------------------------


def _feedforward(graph: OpGraph, call: Call, found: WiringEvidence, others: set[int], tolerance: float) -> FeedForward:
    op = _producer(graph, call)
    state, wiring = found.state, found.wiring
    if op is None or state is None or wiring is None or found.reason_c is not None:
        raise NotRecognised(f"the state after attention is not known ({found.reason_c or found.reason_b})")
    if wiring.kind == "parallel":
        raise NotRecognised("attention and feed-forward layer are parallel: there is no state between them")
    out = block_output(op, found)
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
        residual_scale = None
        if scaled:
            residual_scale = constant_factor(add, used)
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
        made = _branch(graph, rest[0], same, residual_scale, norm, tolerance)
        rebuilt = made(flat(state.value))
        error = deviation(flat(out.value), rebuilt)
        if error > tolerance:
            raise NotRecognised(f"rebuilding the block's output misses it by {error:.1e} (tolerance {tolerance:.0e})")
        return FeedForward(**{**made.__dict__, "error": error})
    raise NotRecognised("no sum of the state after attention and something made of it gives the block's output")


def _branch(
    graph: OpGraph,
    node: Node,
    same: set[int],
    residual_scale: Tensor | float | None,
    norm: Norm | None,
    tolerance: float,
) -> FeedForward:
    """Back from the branch's end: factor, norm, second linear map, activation, first linear map, norm."""
    scale: Tensor | float | None = None
    branch_norm: Norm | None = None
    for _ in range(6):
        node = origins(node)[-1]
        op = node.producer
        if op is None:
            raise NotRecognised("the feed-forward branch comes from nowhere")
        second = _linear(op)
        if second is not None:
            break
        normed = _norm_making(graph, node, tolerance)
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
    hidden = origins(second[0])[-1]
    first, activation, gate, read = _first(hidden)
    norm_in: Norm | None = None
    if not same & {id(n) for n in origins(read)}:
        normed = _norm_making(graph, read, tolerance)
        if normed is None or not same & {id(n) for n in origins(normed[1])}:
            raise NotRecognised("the feed-forward layer reads neither the state after attention nor a norm of it")
        norm_in = normed[0]
    return FeedForward(norm_in, first, activation, gate, second[1], branch_norm, scale, residual_scale, norm)


def _linear(op: Op) -> tuple[Node, Linear] | None:
    """The operation as a linear map with constant weights: what it reads, and its weights."""
    for node in op.inputs:
        if node.value.dim() < 2:
            continue
        found = as_linear(op, node, 1, node.value.shape[-1])
        if found is not None and not isinstance(node.tensor, nn.Parameter):
            return node, Linear(found.weight[0], found.bias)
    return _adapted(op) if op.name in ADD else None


def _adapted(op: Op) -> tuple[Node, Linear] | None:
    """A sum of linear maps of one tensor (a map and its adapters) as one linear map."""
    todo = [origins(node)[-1] for node in op.inputs]
    for node in todo:  # grows
        made = node.producer
        if made is None or len(todo) > 8:
            continue
        direct = None if made.name in ADD else _linear(made)
        if direct is not None:
            read = origins(direct[0])[-1]
            whole = affine(op.outputs[0], {id(n) for n in closure(read)}, (1, read.value.shape[-1]))
            return None if whole is None or whole.weight is None else (read, Linear(whole.weight, whole.bias))
        if made.name in ADD:
            todo += [origins(n)[-1] for n in made.inputs]
    return None


def _first(hidden: Node) -> tuple[Linear, Callable[[Tensor], Tensor], Linear | None, Node]:
    """From what the second linear map reads back to the first: the activation between them, and a gate."""
    op = hidden.producer
    tensors = [] if op is None else [n for n in op.inputs if n.value.shape == hidden.value.shape]
    if op is not None and op.name in MUL and len(tensors) == 2 and _gated(tensors):
        sides = [_linear_behind(n) for n in tensors]
        for (plain, other), (gate, first) in (((0, 1), sides), ((1, 0), sides[::-1])):
            if gate is None or gate[2] is not tensors[plain]:
                continue
            first = _linear_behind(tensors[other])
            if first is None or first[0] is not gate[0]:
                continue
            return first[1], _elementwise(first[2], tensors[other]), gate[1], first[0]
        raise NotRecognised("the feed-forward layer multiplies two things, neither of which is a plain linear map")
    behind = _linear_behind(hidden)
    if behind is None:
        raise NotRecognised("no single linear map stands before the feed-forward layer's activation")
    return behind[1], _elementwise(behind[2], hidden), None, behind[0]


def _gated(nodes: list[Node]) -> bool:
    """Both factors come from linear maps, and not from one another (x · sigmoid(x) is an activation, not a gate)."""
    sides = [_linear_behind(n) for n in nodes]
    if any(side is None for side in sides):
        return False
    left, right = sides
    assert left is not None
    assert right is not None
    return left[2] is not right[2]


def _linear_behind(node: Node) -> tuple[Node, Linear, Node] | None:
    """The one linear map that `node` is an element-wise function of: what it reads, its weights, its output."""
    todo, seen = [node], {id(node)}
    found: list[tuple[Node, Linear, Node]] = []
    while todo:
        current = todo.pop()
        cut = _slice_of_linear(current, node.value.shape)
        if cut is not None:
            found.append(cut)
            continue
        op = current.producer
        if op is None:
            continue
        if len(seen) > 40 or _linear(op) is not None:
            return None
        for parent in op.inputs:
            if id(parent) not in seen and parent.value.shape == node.value.shape:
                seen.add(id(parent))
                todo.append(parent)
    if len({id(n) for _, _, n in found}) != 1:
        return None
    return found[0]


def _slice_of_linear(node: Node, shape: torch.Size) -> tuple[Node, Linear, Node] | None:
    """`node` as (a part of) a linear map's output: gate and value often come from one matrix, cut in two."""
    if node.value.shape != shape or node.producer is None:
        return None
    op = origins(node)[-1].producer  # some linear maps work on (rows, d) and are given their shape back
    if op is None:
        return None
    direct = _linear(op)
    if direct is not None:
        return origins(direct[0])[-1], direct[1], node
    if op.name not in ("chunk", "split", "__getitem__", "unbind", "narrow") or not op.inputs:
        return None
    whole = origins(op.inputs[0])[-1]
    made = None if whole.producer is None else _linear(whole.producer)
    if made is None:
        return None
    columns = matching_columns(flat(whole.value), flat(node.value))
    if columns is None:
        return None
    weight, bias = made[1].weight[:, columns], made[1].bias
    return origins(made[0])[-1], Linear(weight, None if bias is None else bias[columns]), node


def matching_columns(whole: Tensor, part: Tensor) -> Tensor | None:
    """Which columns of `whole` (rows, m) are the columns of `part` (rows, k), by their numbers; None if not all are."""
    if whole.shape[0] != part.shape[0] or whole.shape[0] < 2:
        return None
    apart = torch.cdist(part.T.contiguous(), whole.T.contiguous(), p=torch.inf)
    least, at = apart.min(dim=1)
    return at if bool((least == 0).all()) and len(at.unique()) == len(at) else None


def _elementwise(start: Node, end: Node) -> Callable[[Tensor], Tensor]:
    """The function from `start` to `end`, by running the operations between them again on other numbers."""

    def function(x: Tensor) -> Tensor:
        known: dict[int, Any] = {id(start): x}

        def value(node: Node) -> Any:
            if id(node) not in known:
                op = node.producer
                if op is None or id(start) not in ancestors([node]):
                    known[id(node)] = node.value.to(x) if node.value.is_floating_point() else node.value
                else:
                    known[id(node)] = op.func(*_put(op.args, op, value), **_put(op.kwargs, op, value))
            return known[id(node)]

        made: Tensor = value(end)
        return made

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


def _norm_making(graph: OpGraph, node: Node, tolerance: float) -> tuple[Norm, Node] | None:
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


# -- how queries, keys and values are read from the block's input ----------------------------------------------------


def _value_map(graph: OpGraph, value: Tensor, found: WiringEvidence, tolerance: float) -> tuple[Norm | None, Linear]:
    """values = n(r) · weight + bias, columns in the order (kv head, d_v)."""
    if found.residual is None:
        raise NotRecognised("the block's input is not known")
    read, linear = _map_of(graph.node(value))
    same = {id(n) for n in (*origins(found.residual), *closure(found.residual))}
    norm: Norm | None = None
    if not same & {id(n) for n in origins(read)}:
        normed = _norm_making(graph, read, tolerance)
        if normed is None or not same & {id(n) for n in origins(normed[1])}:
            raise NotRecognised("the values are read neither from the block's input nor from a norm of it")
        norm = normed[0]
    state = flat(found.residual.value)
    rebuilt = linear(state if norm is None else norm(state))
    error = deviation(_by_token(value), rebuilt)
    if error > tolerance:
        raise NotRecognised(f"rebuilding the values from the block's input misses them by {error:.1e}")
    return norm, linear


def _plain_maps(
    graph: OpGraph, call: Call, found: WiringEvidence, norm: Norm | None, values: Linear, tolerance: float
) -> tuple[Linear, Linear, Linear]:
    """Queries and keys as linear maps of the same normed input: no rotation, no norm of their own."""
    assert found.residual is not None
    state = flat(found.residual.value)
    read = state if norm is None else norm(state)
    maps = []
    for name, tensor in (("queries", call.query), ("keys", call.key)):
        if tensor is None:
            raise NotRecognised(f"the {name} are not known")
        _, linear = _map_of(graph.node(tensor))
        error = deviation(_by_token(tensor), linear(read))
        if error > tolerance:
            raise NotRecognised(f"rebuilding the {name} from the block's input misses them by {error:.1e}")
        maps.append(linear)
    return maps[0], maps[1], values


def _by_token(heads: Tensor) -> Tensor:
    """(batch, head, token, d) → (batch · token, head · d) in float64."""
    return flat(heads.transpose(1, 2).flatten(2))


def _map_of(node: Node) -> tuple[Node, Linear]:
    """The linear map whose output, reshaped or cut, these heads are: by the numbers in its columns."""
    wanted = _by_token(node.value)
    current: Node | None = node
    for _ in range(16):
        if current is None or current.producer is None:
            break
        made = _linear(current.producer)
        if made is not None:
            columns = matching_columns(flat(current.value), wanted)
            if columns is None:
                raise NotRecognised(
                    "they are not columns of the linear map that they come from (rotated, normed or scaled)"
                )
            weight, bias = made[1].weight[:, columns], made[1].bias
            return origins(made[0])[-1], Linear(weight, None if bias is None else bias[columns])
        current = current.producer.inputs[0] if current.producer.inputs else None
    raise NotRecognised("they do not come from a linear map")


__all__ = ["FeedForward", "Linear", "Reading", "feedforward_of", "read_blocks", "times"]
