"""(c): how an attention block is wired: the residual that its output is added to, and the norms around it.

WiringEvidence by following tensors forward from the head outputs on the graph of one short pass (no module or variable name is
trusted), and proved afterwards by reconstructing what the model computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

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
    other_operand,
    times,
)
from whence.reading.wiring.norms import Norm, best_reading, recognise
from whence.reading.wiring.op_graph import ModuleCall, Node, Op, OpGraph, Path, deviation, flat
from whence.reading.wiring.projection import Projection, argument

POST, PRE, SANDWICH, PARALLEL = "post-norm", "pre-norm", "sandwich", "parallel"


@dataclass(frozen=True)
class Handle:
    """Where a tensor can be picked up in any later pass: the `number`-th call of a module, in its input or output."""

    module: str
    number: int
    side: str  # "in" | "out"
    path: Path
    clone: bool  # the model overwrites it in place later on
    onward: bool = True  # what is put in its place goes on through the model, not into a side branch
    token_first: bool = False  # the model has it as (token, sequence, d)

    def turned(self, tensor: Tensor) -> Tensor:
        """From the model's layout to (sequence, token, d), and back."""
        return tensor.transpose(0, 1) if self.token_first else tensor


@dataclass(frozen=True)
class Side:
    """A part that is added beside attention and residual: what a module shows, times a constant."""

    handle: Handle
    scale: Tensor | float | None = None


@dataclass(frozen=True)
class Wiring:
    """state after attention = norm( r + branch(projection) [+ other] ), each part absent where the model has none."""

    kind: str  # post-norm | pre-norm | sandwich | parallel
    residual: Handle | None
    after: Handle | None  # the state after attention (and its norm), where a module shows it
    residual_scale: Tensor | float | None  # a factor on the residual (DeepNorm and its kin)
    branch_scale: Tensor | float | None  # a factor on the attention branch (residual multiplier, layer scale)
    branch_norm: Norm | None  # sandwich: the norm on the attention branch, before its factor
    norm: Norm | None  # post-norm: the norm after the add
    sides: tuple[Side, ...] = ()  # parallel: what else is added, made from the block's input

    def carried(self, residual: Tensor) -> Tensor:
        """The residual as it enters the sum, from the block's input."""
        return times(residual, self.residual_scale)

    def branch(self, projected: Tensor) -> Tensor:
        """What the residual is added to, from the projection's output."""
        if self.branch_norm is not None:
            projected = self.branch_norm(projected)
        return times(projected, self.branch_scale)

    def rebuild(self, residual: Tensor, projected: Tensor, other: Tensor | None = None) -> Tensor:
        """The state after attention, from its parts."""
        state = self.carried(residual) + self.branch(projected)
        if other is not None:
            state = state + other
        return state if self.norm is None else self.norm(state)


@dataclass(frozen=True)
class WiringEvidence:
    """What the graph shows of one attention call: the wiring and the tensors that prove it."""

    projection: Projection | None
    projected: Node | None
    error_b: float
    wiring: Wiring | None
    error_c: float
    reason_b: str | None
    reason_c: str | None
    residual: Node | None = None
    state: Node | None = None  # the state after attention
    stream: Node | None = None  # the sum before a post-norm


@dataclass(frozen=True)
class _Sum:
    residual: Node
    total: Node
    add: Op
    scale: Tensor | float | None
    norm: Norm | None
    others: tuple[Node, ...]
    residual_scale: Tensor | float | None


def find_wiring(graph: OpGraph, projected: Node, upstream: set[int], tolerance: float) -> tuple[Wiring, WiringEvidence]:
    """From the projection's output to the state after attention. `upstream`: ids of what the queries came from."""
    found = _find_sum(projected, upstream, tolerance)
    total, kind, others = found.total, PRE, list(found.others)
    norm: Norm | None = None
    state = total
    uses = consumers(closure(total))
    side = _lone_side_addend(total, uses)
    while side is not None and side[0].outputs[0] is not total:
        add, other = side
        others.append(other)
        total = state = add.outputs[0]
        uses = consumers(closure(total))
        side = _lone_side_addend(total, uses)
    sides = [_side(graph, other) for other in others]
    if others:
        kind = PARALLEL
    else:
        kind = PRE if found.norm is None else SANDWICH
        after = _sole_norm(total, uses, tolerance)
        if after is not None and _carried_on(after[1]):
            norm, state = after
            kind = POST
        elif after is None and not _carried_on(total):
            names = ", ".join(dict.fromkeys(op.name for op, _ in uses)) or "nothing"
            raise NotRecognised(
                f"residual + attention goes into {names}, and on to no later residual: no wiring that is known"
            )
    wiring = Wiring(
        kind=kind,
        residual=find_handle(graph, found.residual, _uses(found)),
        after=find_handle(graph, state),
        residual_scale=found.residual_scale,
        branch_scale=found.scale,
        branch_norm=found.norm,
        norm=norm,
        sides=tuple(side for side in sides if side is not None),
    )
    if flat(found.residual.value).shape != flat(projected.value).shape:
        raise NotRecognised(
            f"the residual has shape {tuple(found.residual.value.shape)}, the projection {tuple(projected.value.shape)}"
        )
    aside = sum((flat(n.value) for n in others[1:]), flat(others[0].value)) if others else None
    rebuilt = wiring.rebuild(flat(found.residual.value), flat(projected.value), aside)
    error = deviation(flat(state.value), rebuilt)
    reason = None
    if error > tolerance:
        reason = f"rebuilding the state after attention as {kind} misses it by {error:.1e} (tolerance {tolerance:.0e})"
    elif wiring.residual is None:
        reason = "the residual input is not shown by any module, so it cannot be picked up in later passes"
    elif None in sides:
        reason = "what is added beside attention and residual is not shown by any module, so it cannot be picked up"
    return wiring, WiringEvidence(None, projected, 0.0, wiring, error, None, reason, found.residual, state, total)


def _side(graph: OpGraph, node: Node) -> Side | None:
    """Where an addend can be picked up: itself, or what it is a constant multiple of."""
    handle = find_handle(graph, node)
    if handle is not None:
        return Side(handle)
    op = origins(node)[-1].producer
    for given in op.inputs if op is not None and op.name in MUL | DIV else ():
        assert op is not None
        factor, handle = constant_factor(op, given), find_handle(graph, given)
        if factor is not None and handle is not None and given.value.shape == node.value.shape:
            return Side(handle, factor)
    return None


def _find_sum(projected: Node, upstream: set[int], tolerance: float) -> _Sum:
    """Walk from the projection's output to the add that joins the residual, noting scales and norms on the way."""
    node, scale, norm = projected, None, None
    others: list[Node] = []
    tried: list[str] = []
    for _ in range(12):
        step: Node | None = None
        uses = consumers(closure(node))
        for op, used in uses:
            if op.name not in ADD or not op.outputs:
                continue
            other = other_operand(op, used)
            if other is None or other.value.numel() != node.value.numel() or op.kwargs.get("alpha", 1) != 1:
                continue
            residual, residual_scale = _unscaled(other, upstream)
            if residual is not None:
                return _Sum(residual, op.outputs[0], op, scale, norm, tuple(others), residual_scale)
            if id(projected) in ancestors([other]):
                made = other.producer.name if other.producer is not None else "something"
                raise NotRecognised(
                    f"the attention block's output is changed by something that reads it ({made}: an adapter or a second "
                    "projection) before it joins the residual"
                )
            others.append(other)
            step = op.outputs[0]
            break
        if step is None:
            for op, used in uses:
                if op.name in MUL | DIV and op.outputs[0].value.numel() == node.value.numel():
                    factor = constant_factor(op, used)
                    if factor is not None and not others:
                        scale = factor if scale is None else scale * factor
                        step = op.outputs[0]
                        break
        if step is None and scale is None and norm is None and not others:
            read = norm_of(node, uses, tolerance)
            if read is not None:
                norm, step = read
        if step is None:
            tried += [op.name for op, _ in uses]
            break
        node = step
    raise NotRecognised(
        "the projection's output is never added to a residual that the queries came from; it goes into: "
        + (", ".join(dict.fromkeys(tried)) or "nothing")
    )


def _unscaled(other: Node, upstream: set[int]) -> tuple[Node | None, Tensor | float | None]:
    """The residual behind an addend, and its factor: something that the queries came from, possibly times a constant."""
    if any(id(o) in upstream for o in origins(other)):
        return other, None
    op = other.producer
    if op is not None and op.name in MUL | DIV:
        for node in op.inputs:
            factor = constant_factor(op, node)
            if factor is not None and any(id(o) in upstream for o in origins(node)):
                return node, factor
    return None, None


def _lone_side_addend(total: Node, uses: list[tuple[Op, Node]]) -> tuple[Op, Node] | None:
    """(r + attention) + f, where f does not come from the sum: the parallel wiring's other branch."""
    ops = {op.index: (op, used) for op, used in uses}
    if len(ops) != 1:
        return None
    op, used = next(iter(ops.values()))
    other = other_operand(op, used) if op.name in ADD else None
    if other is None or other.value.shape != used.value.shape or id(total) in ancestors([other]):
        return None
    return op, other


def _norm_calls(names: set[int], op: Op, since: int) -> Iterator[ModuleCall]:
    """Module calls around `op` that began after `since` and were given one of the nodes in `names`."""
    for call in op.region:
        if call.begin > since and any(id(node) in names for _, node in call.inputs):
            yield call


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


def _sole_norm(total: Node, uses: list[tuple[Op, Node]], tolerance: float) -> tuple[Norm, Node] | None:
    """The post-norm: a norm that is the only thing the sum goes into."""
    read = norm_of(total, uses, tolerance)
    if read is None:
        return None
    _, out = read
    inside = _producing_region(out, total)
    if all(op.index in inside for op, _ in uses):
        return read
    return None


def _carried_on(node: Node) -> bool:
    """Whether a state goes on as a residual: into an add, plainly or times a constant.

    A norm whose output does not is a final norm after a last block without feed-forward, not a post-norm.
    """
    for op, used in consumers(closure(node)):
        if op.name in ADD:
            return True
        if op.name in MUL | DIV and constant_factor(op, used) is not None:
            return True
    return False


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


# -- where a tensor can be picked up -------------------------------------------------------------------------------


def _uses(found: _Sum) -> tuple[int, int]:
    """The first and the last operation of the block that reads its residual."""
    reading = [op.index for op, _ in consumers(closure(found.residual)) if op.index <= found.add.index]
    return min(reading, default=found.add.index), found.add.index


def find_handle(graph: OpGraph, node: Node, around: tuple[int, int] | None = None) -> Handle | None:
    """A module's input or output that is this very tensor (or the same numbers in the same layout).

    Without `around`, the place where it is seen first: later ones may come after something was put in its place.
    `around`: first and last of the operations that read it. The output of a module that has ended by then, or the input of
    a module that holds them all, is preferred to one that is only handed the tensor on the side (rotary positions are,
    to know its dtype) and to one that gives it out once more when all is done (an encoder, with its hidden states).
    """
    same = {id(n) for n in (*origins(node), *closure(node))}
    seen: list[tuple[tuple[int, int, int], Handle]] = []
    for order, call in enumerate(graph.calls):
        for side, entries in (("in", call.inputs), ("out", call.outputs)):
            for path, entry in entries:
                if id(entry) in same and entry.value.dim() >= 2 and entry.value.shape[-1] == node.value.shape[-1]:
                    holds = around is not None and call.begin <= around[0] and around[1] < call.end
                    onward = around is None or (call.end <= around[0] if side == "out" else holds)
                    first = entry.value.dim() == 3 and entry.value.shape[0] != graph.batch == entry.value.shape[1]
                    handle = Handle(call.name, call.number, side, path, entry.frozen is not None, onward, first)
                    if onward and around is not None:
                        return handle
                    # Of modules that end together the inner ones, which began last, end first.
                    when = (call.begin, 1, order) if side == "in" else (call.end, 0, -order)
                    seen.append((when, handle))
    if not seen:
        return None
    return seen[0][1] if around is not None else min(seen, key=lambda place: place[0])[1]


def block_output(site: Op, found: WiringEvidence) -> Node | None:
    """The state after the whole block: what the innermost enclosing module that was given the residual gives back."""
    if found.residual is None or found.state is None or found.stream is None or found.stream.producer is None:
        return None
    joined = found.stream.producer.index  # the block must hold the residual add, not the attention alone
    given = {id(n) for n in (*origins(found.residual), *closure(found.residual))}
    own = {id(n) for n in (*origins(found.state), *closure(found.state))}
    width = found.state.value.shape[-1]
    fallback: Node | None = None
    for call in reversed(site.region):
        if not call.begin <= joined < call.end or not any(id(node) in given for _, node in call.inputs):
            continue
        for _, out in call.outputs:
            if out.value.dim() < 2 or out.value.shape[-1] != width or out.value.numel() != found.state.value.numel():
                continue
            if id(out) not in own:
                return out
            fallback = out
            break
    return fallback


def with_projection(found: WiringEvidence, projection: Projection, projected: Node, error: float) -> WiringEvidence:
    """The same findings with the projection that led to them."""
    return replace(found, projection=projection, projected=projected, error_b=error)
