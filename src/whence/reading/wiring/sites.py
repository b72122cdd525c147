"""The attention calls of one pass: what the graph shows of each, its number, its layer and what was proved about it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from whence.reading.attention_rows import attention_rows
from whence.reading.capture.lineage import Role
from whence.reading.capture.recorder import AttentionRecorder, Call, mix
from whence.reading.wiring.claim import AttentionClaim
from whence.reading.wiring.dataflow import NotRecognised, ancestors
from whence.reading.wiring.equation import Wiring
from whence.reading.wiring.handles import Handle, StateHandles, find_block_input, find_handle
from whence.reading.wiring.op_graph import Node, Op, OpGraph, deviation
from whence.reading.wiring.projection import Projection, find_projection, find_turned_projection
from whence.reading.wiring.residual import WiringEvidence, block_output, find_wiring, with_projection
from whence.reading.wiring.second_norm import SecondNorm, find_second_norm
from whence.reading.wiring.stacks import is_causal, stack_names


@dataclass(frozen=True)
class AttentionSite:
    """One attention call of the model, and what was proved about it."""

    number: int  # in the order of the calls
    stack: str  # "encoder" | "decoder" | "cross"
    layer: int  # within its stack
    module: str  # the innermost module around the call, for people to find it
    heads: int
    groups: int
    head_size: int
    causal: bool
    error_a: float
    error_b: float | None
    error_c: float | None
    keys_error: float | None  # softmax(scale · query · keyᵀ + mask) against the weights, where both are known
    projection: Projection | None
    wiring: Wiring | None  # as it was found; `proved_wiring` only if (c) holds
    state_handles: StateHandles | None
    block_output: Handle | None
    reason_b: str | None
    reason_c: str | None
    second_norm: SecondNorm | None = None  # the norm that ends a post-norm block
    rows_error: float | None = None  # as keys_error, with soft caps: can rows of attention be made again from the keys?
    error_e: float | None = None
    reason_e: str | None = None
    role: Role | None = None  # where it ran and where its keys came from, which every text must show again

    @property
    def proved_wiring(self) -> Wiring | None:
        return self.wiring if self.reason_c is None else None

    @property
    def handles(self) -> tuple[Handle, ...]:
        """Where the states of this block are picked up, as far as its wiring is proved."""
        if self.state_handles is None or self.proved_wiring is None:
            return ()
        second = None if self.second_norm is None else self.second_norm.before
        return (*self.state_handles.all, *(h for h in (self.block_output, second) if h is not None))


def tested(site: AttentionSite, error: float | None, reason: str | None) -> AttentionSite:
    """The site with the outcome of (e): what it refutes is not given out."""
    if reason is None or site.projection is None:
        return replace(site, error_e=error, reason_e=reason)
    return replace(
        site, error_e=error, reason_e=reason, projection=None, reason_b=site.reason_b or reason,
        reason_c=site.reason_c or reason, second_norm=None,
    )  # fmt: skip


def read_site(graph: OpGraph, call: Call, tolerance: float) -> tuple[float, WiringEvidence]:
    """The error of (a), and what the graph shows for (b) and (c)."""
    if call.weights.dim() != 4 or call.output.shape[:3] != call.weights.shape[:3]:
        raise NotRecognised(
            f"an attention call has weights of shape {tuple(call.weights.shape)} and outputs of shape "
            f"{tuple(call.output.shape)}, not (batch, head, query, …) both"
        )
    exact = mix(call.weights.to(torch.float64), call.value.to(torch.float64))
    error_a = deviation(call.output, exact)
    nothing = WiringEvidence(None, None, float("inf"), None, float("inf"), None, None)
    if call.node is None or error_a > tolerance:
        return error_a, nothing
    heads = call.output[0] if call.output.shape[0] == 1 else call.output.transpose(0, 1).flatten(1, 2)
    try:
        projection, projected, error_b = _projection(graph.node(call.node), heads, call.output.shape[0], tolerance)
    except NotRecognised as problem:
        return error_a, _reasons(nothing, str(problem), "needs the output projection")
    source = graph.node(call.query if call.query is not None else call.value)
    try:
        found = find_wiring(graph, projected, ancestors([source]), tolerance)
    except NotRecognised as problem:
        found = _reasons(nothing, None, str(problem))
    return error_a, with_projection(found, projection, projected, error_b)


def _projection(start: Node, heads: Tensor, batch: int, tolerance: float) -> tuple[Projection, Node, float]:
    try:
        return find_projection(start, heads, tolerance)
    except NotRecognised as problem:
        try:
            return find_turned_projection(start, heads, batch, tolerance)
        except NotRecognised as second:
            raise NotRecognised(f"{problem}; {second}") from None


def _reasons(evidence: WiringEvidence, b: str | None, c: str | None) -> WiringEvidence:
    return replace(evidence, reason_b=b, reason_c=c)


def number_sites(
    model: nn.Module,
    graph: OpGraph,
    recorder: AttentionRecorder,
    readings: list[tuple[float, WiringEvidence]],
    tolerance: float,
) -> tuple[list[AttentionSite], list[AttentionClaim]]:
    """Every call with its stack and layer, and what is claimed of it for the interventions to test."""
    calls = recorder.calls
    ops = [producer(graph, call) for call in calls]
    stacks = stack_names(model, graph, calls, recorder.roles, readings)
    counts: dict[str, int] = {}
    sites, claims = [], []
    for number, (call, op, stack, (error_a, found)) in enumerate(zip(calls, ops, stacks, readings, strict=True)):
        layer = counts.get(stack, 0)
        counts[stack] = layer + 1
        others = [
            o.index for o, name in zip(ops, stacks, strict=True) if name == stack and o is not None and o is not op
        ]
        after = block_output(op, found, others) if op is not None else None
        block = None if after is None else find_handle(graph, after)
        places = [None if node is None else find_handle(graph, node) for node in (found.projected, found.stream)]
        known = (found.wiring, found.handles) if found.reason_c is None else (None, None)
        given = find_block_input(graph, found.stream)
        claims.append(AttentionClaim(stack, found.projection, *known, places[0], places[1], block, given))
        sites.append(
            AttentionSite(
                number=number,
                stack=stack,
                layer=layer,
                module=_module(op),
                heads=call.weights.shape[1],
                groups=call.value.shape[1],
                head_size=call.value.shape[-1],
                causal=is_causal(call.weights, None, *call.weights.shape[-2:]),
                error_a=error_a,
                error_b=None if found.projection is None else found.error_b,
                error_c=None if found.wiring is None else found.error_c,
                keys_error=None if call.cap is not None else _rows_error(call),
                rows_error=_rows_error(call),
                projection=found.projection,
                wiring=found.wiring,
                state_handles=found.handles,
                block_output=block,
                reason_b=found.reason_b,
                reason_c=found.reason_c,
                second_norm=find_second_norm(graph, op, found, tolerance, others),
                role=recorder.roles[number],
            )
        )
    return sites, claims


def parted_streams(stacks: list[str], roles: list[Role], names: list[str]) -> str | None:
    """Why nothing may be followed through the layers: a call that reads nothing of the one before it in its stack.

    A body that runs twice, two attentions side by side. Refused as a whole are towers of other inputs (a text and an image),
    whose tokens are not the same, and an encoder and a decoder that nothing joins.
    """
    reason: str | None = None
    last: dict[str, int] = {}
    for number, (stack, role) in enumerate(zip(stacks, roles, strict=True)):
        before = last.get(stack)
        if stack != "cross" and before is not None and before not in role.after:
            reason = reason or _parted(names, before, number)
            if role.sources and roles[before].sources and not role.sources & roles[before].sources:
                raise NotRecognised(f"{reason}. Give whence the part of the model that you ask about")
        last[stack] = number
    if {"encoder", "decoder"} <= last.keys():
        joined = ({stacks[i] for i in role.after | role.reads | {number}} for number, role in enumerate(roles))
        if not any({"encoder", "decoder"} <= stacks_of for stacks_of in joined):
            reason = _parted(names, last["encoder"], last["decoder"])
            raise NotRecognised(f"{reason}. Give whence the part of the model that you ask about")
    return reason


def _parted(names: list[str], one: int, other: int) -> str:
    first, second = sorted((one, other))
    return (
        f"its attention calls are of streams that do not follow each other: call {second} ({names[second]}) reads nothing that "
        f"call {first} ({names[first]}) made"
    )


def _module(op: Op | None) -> str:
    """The innermost module around an operation."""
    return op.region[-1].name if op is not None and op.region else "?"


def producer(graph: OpGraph, call: Call) -> Op | None:
    """The operation that made the head outputs."""
    return graph.node(call.node).producer if call.node is not None else None


def _rows_error(call: Call) -> float | None:
    """How far softmax(f(scale · QKᵀ) + bias + mask) is from the weights: whether keys and queries mean what they say."""
    scale, cap = (call.scale, None) if call.cap is None else call.cap
    if call.query is None or call.key is None or scale is None:
        return None
    query, key = call.query.to(torch.float64), call.key.to(torch.float64)
    if query.shape[1] % key.shape[1] or query.shape[-1] != key.shape[-1]:
        return None
    weights = attention_rows(query, key, scale=scale, cap=cap, visible=call.visible, bias=call.bias, sink=call.sink)
    return deviation(weights, call.weights)
