"""(c): how an attention block is wired: the residual that its output is added to, and the norms around it.

Found by following tensors forward from the head outputs on the graph of one short pass (no module or variable name is
trusted), and proved afterwards by reconstructing what the model computed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

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
)
from whence.reading.wiring.equation import Factor, Wiring
from whence.reading.wiring.handles import Side, StateHandles, find_handle
from whence.reading.wiring.norm_search import norm_of, sole_norm
from whence.reading.wiring.norms import Norm
from whence.reading.wiring.op_graph import Node, Op, OpGraph, deviation, flat
from whence.reading.wiring.projection import Projection


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
    handles: StateHandles | None = None
    residual: Node | None = None
    state: Node | None = None  # the state after attention
    stream: Node | None = None  # the sum before a post-norm


@dataclass(frozen=True)
class _Sum:
    residual: Node
    total: Node
    add: Op
    scale: Factor
    norm: Norm | None
    others: tuple[Node, ...]
    carried: Factor


def find_wiring(graph: OpGraph, projected: Node, upstream: set[int], tolerance: float) -> WiringEvidence:
    """From the projection's output to the state after attention. `upstream`: ids of what the queries came from."""
    found = _find_sum(projected, upstream, tolerance)
    total, others = found.total, list(found.others)
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
    if not others:
        after = sole_norm(total, uses, tolerance)
        if after is not None and _carried_on(after[1]):
            norm, state = after
        elif after is None and not _carried_on(total):
            names = ", ".join(dict.fromkeys(op.name for op, _ in uses)) or "nothing"
            raise NotRecognised(
                f"residual + attention goes into {names}, and on to no later residual: no wiring that is known"
            )
    wiring = Wiring.of_parts(norm, found.norm, found.scale, found.carried, parallel=bool(others))
    handles = StateHandles(
        residual=find_handle(graph, found.residual, _uses(found)),
        after=find_handle(graph, state),
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
        reason = f"rebuilding the state after attention as {wiring.kind} misses it by {error:.1e} (tolerance {tolerance:.0e})"
    elif handles.residual is None:
        reason = "the residual input is not shown by any module, so it cannot be picked up in later passes"
    elif None in sides:
        reason = "what is added beside attention and residual is not shown by any module, so it cannot be picked up"
    return WiringEvidence(None, projected, 0.0, wiring, error, None, reason, handles, found.residual, state, total)


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
            residual, carried = _unscaled(other, upstream)
            if residual is not None:
                return _Sum(residual, op.outputs[0], op, scale, norm, tuple(others), carried)
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


def _unscaled(other: Node, upstream: set[int]) -> tuple[Node | None, Factor]:
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


def _uses(addition: _Sum) -> tuple[int, int]:
    """The first and the last operation of the block that reads its residual."""
    reading = [op.index for op, _ in consumers(closure(addition.residual)) if op.index <= addition.add.index]
    return min(reading, default=addition.add.index), addition.add.index


def block_output(site: Op, evidence: WiringEvidence, others: Collection[int] = ()) -> Node | None:
    """The state after the whole block: what the innermost enclosing module that was given the residual gives back.

    others: indices of the other attention calls of the same stack. A module that holds one of them is no block: a model that
    was given embeddings is given its first block's residual too, and gives back its final state.
    """
    if (
        evidence.residual is None
        or evidence.state is None
        or evidence.stream is None
        or evidence.stream.producer is None
    ):
        return None
    joined = evidence.stream.producer.index  # the block must hold the residual add, not the attention alone
    given = {id(n) for n in (*origins(evidence.residual), *closure(evidence.residual))}
    own = {id(n) for n in (*origins(evidence.state), *closure(evidence.state))}
    width = evidence.state.value.shape[-1]
    # In parallel wiring the state after attention is the block's output.
    parallel = evidence.wiring is not None and evidence.wiring.parallel
    fallback: Node | None = None
    for call in reversed(site.region):
        if not call.begin <= joined < call.end or not any(id(node) in given for _, node in call.inputs):
            continue
        if any(call.begin <= other < call.end for other in others):
            break
        for _, out in call.outputs:
            if out.value.dim() < 2 or out.value.shape[-1] != width or out.value.numel() != evidence.state.value.numel():
                continue
            if id(out) not in own or parallel:
                return out
            fallback = out
            break
    return fallback


def with_projection(evidence: WiringEvidence, projection: Projection, projected: Node, error: float) -> WiringEvidence:
    """The same findings with the projection that led to them."""
    return replace(evidence, projection=projection, projected=projected, error_b=error)
