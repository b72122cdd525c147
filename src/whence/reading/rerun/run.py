"""One forward pass of a proved model, with what it showed of its attention and its states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from whence.errors import ModelError
from whence.model.load import Model
from whence.model.memory import fingerprint
from whence.reading.capture.attach import accepted, attached, picking_up, takes
from whence.reading.capture.lineage import Lineage
from whence.reading.capture.own_hooks import on_leave
from whence.reading.capture.recorder import AttentionRecorder, Call, Edit
from whence.reading.inputs import Prepared, beginning
from whence.reading.trace import KEEP, ROWS_NEED
from whence.reading.wiring.handles import Handle
from whence.reading.wiring.on_text import assert_on_text, assert_role, assert_site
from whence.reading.wiring.op_graph import OpGraph
from whence.reading.wiring.proof import Proof, proof_of
from whence.reading.wiring.row_map import find_row_map
from whence.reading.wiring.sites import AttentionSite
from whence.reading.wiring.stacks import submodule


def prove_model(model: Model, prepared: Prepared) -> Proof:
    """The model's proof, made on the beginning of this sequence if there is none yet."""
    return proof_of(model.model, on_device(model, beginning(prepared.inputs)))


def on_device(model: Model, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inputs where the model is, floating ones in the model's dtype."""
    device = model.device
    dtype = next((p.dtype for p in model.model.parameters() if p.is_floating_point()), torch.float32)
    return {name: t.to(device, dtype) if t.is_floating_point() else t.to(device) for name, t in inputs.items()}


@dataclass(frozen=True)
class Outcome:
    """What one forward pass of a batch gave: its outputs, its attention calls, and the states that were picked up."""

    output: Any
    calls: list[Call]
    states: Mapping[Handle, Tensor]
    final_states: Tensor | None
    batch: Mapping[str, Tensor]
    mark: int  # the fingerprint of the model that was run
    row_maps: Mapping[int, Tensor] = field(default_factory=dict)  # by call: what turns head outputs, row by row

    @property
    def sequences(self) -> int:
        """How many sequences the batch held."""
        return next(iter(self.batch.values())).shape[0]


def run(
    model: Model,
    proof: Proof,
    batch: Mapping[str, Tensor],
    size: int,
    wanted: frozenset[str],
    edits: Mapping[int, Sequence[Edit]] | None = None,
    *,
    fused: bool = True,
    consumer: Callable[[AttentionSite, Outcome], None] | None = None,
) -> Outcome:
    """One forward pass with the recorder attached; `edits` by call number.

    fused: where it is proved, the model runs its own fused attention, and the calls hold no weights.

    consumer: told of each attention call as soon as all that belongs to it was seen, in order, with an outcome that holds
    this call alone; what no later call needs is let go of then, and only the last row of logits is computed.
    """
    mark = fingerprint(model.model)
    inputs = accepted(model.model, on_device(model, batch))
    if (consumer is not None or "logits" not in wanted) and takes(model.model, "logits_to_keep"):
        inputs["logits_to_keep"] = 1
    if "output_hidden_states" in inputs:
        inputs.pop("output_hidden_states")
    recorder = AttentionRecorder(edits=edits or {}, keep=None if wanted >= frozenset(KEEP) else lambda _: wanted)
    if fused and edits is None and ("attention" not in wanted or wanted >= ROWS_NEED):
        recorder.fused, recorder.all_fused = proof.fused, len(proof.fused) == len(proof.sites)
    handles = _handles(proof) if "states" in wanted else []
    row_mapped = [s.number for s in proof.sites if s.projection is not None and s.projection.rows is not None]
    recorder.follow = bool(row_mapped)
    graph = OpGraph(size)
    if edits is None and len(proof.stacks) > 1:
        recorder.lineage = Lineage(inputs)
    final: list[Tensor] = []
    if consumer is not None and not row_mapped:
        queue = _Queue(model.name, proof, recorder, batch, mark, handles, consumer)
        recorder.listener = lambda _: queue.advance()
    else:
        queue = None
    with ExitStack() as stack:
        if recorder.lineage is not None:
            stack.enter_context(recorder.lineage.within(submodule(model.model, "get_decoder")))
        if row_mapped:
            stack.enter_context(graph)
        stack.enter_context(attached(model.model, proof.capture, recorder, size))
        states = stack.enter_context(picking_up(model.model, handles, None if queue is None else queue.advance))
        if queue is not None:
            queue.states = states
        stack.callback(_watch_final(model.model, final).remove)
        output = model.model(**inputs)
    states = {handle: state.detach() for handle, state in states.items()}  # a hook may have made one a leaf
    if len(recorder.calls) != len(proof.sites):
        raise ModelError(
            f"{model.name} made {len(recorder.calls)} attention calls on this input and {len(proof.sites)} when it was proved: "
            "its computation depends on the input, so the proof does not cover this one."
        )
    if queue is not None:
        queue.advance(last=True)
        return Outcome(output, [], {}, final[-1] if final else None, batch, mark)
    if edits is None:
        for site, role in zip(proof.sites, recorder.roles, strict=False):
            assert_role(site, role, model.name)
        assert_on_text(proof.sites, recorder.calls, states, proof.tolerance, model.name)
    maps: dict[int, Tensor] = {}
    for number in row_mapped:
        rows = _row_map(graph, recorder.calls[number], proof.sites[number].heads, proof.tolerance)
        maps |= {} if rows is None else {number: rows}
    whole = Outcome(output, recorder.calls, states, final[-1] if final else None, batch, mark, maps)
    if consumer is not None:
        for site, call in zip(proof.sites, recorder.calls, strict=True):
            consumer(site, replace(whole, calls=[call], output=None, final_states=None))
    return whole


class _Queue:
    """The calls of a running pass, handed on one by one as soon as the states around each have been seen."""

    def __init__(
        self,
        name: str,
        proof: Proof,
        recorder: AttentionRecorder,
        batch: Mapping[str, Tensor],
        mark: int,
        handles: Sequence[Handle],
        consumer: Callable[[AttentionSite, Outcome], None],
    ) -> None:
        self.name, self.proof, self.recorder, self.batch, self.mark = name, proof, recorder, batch, mark
        self.consumer, self.next = consumer, 0
        self.states: dict[Handle, Tensor] = {}
        self.picked_up = frozenset(handles)
        self.last_use = {handle: site.number for site in proof.sites for handle in site.handles}
        self.busy = False

    def advance(self, last: bool = False) -> None:
        """Hand on every call that is complete; at the end of the pass (`last`), the rest."""
        sites, calls = self.proof.sites, self.recorder.calls
        while not self.busy and self.next < min(len(sites), len(calls)):
            site = sites[self.next]
            if not last and any(h in self.picked_up and h not in self.states for h in site.handles):
                return
            self.busy = True  # what the consumer computes is no part of the pass
            try:
                with torch._C.DisableTorchFunction():
                    self._hand_on(site, calls[self.next])
            finally:
                self.busy = False
            calls[self.next] = None  # type: ignore[call-overload]
            for handle in site.handles:
                if self.last_use[handle] <= self.next:
                    self.states.pop(handle, None)
            self.next += 1

    def _hand_on(self, site: AttentionSite, call: Call) -> None:
        states = {handle: state.detach() for handle in site.handles if (state := self.states.get(handle)) is not None}
        if self.recorder.lineage is not None:
            assert_role(site, self.recorder.roles[site.number], self.name)
        assert_site(site, call, states, self.proof.tolerance, self.name)
        self.consumer(site, Outcome(None, [call], states, None, self.batch, self.mark))


def _row_map(graph: OpGraph, call: Call, heads: int, tolerance: float) -> Tensor | None:
    """L (batch, query, d_v, d_v) of this very pass; None where attention was edited, so that nothing can be followed."""
    if call.node is None:
        return None
    start = graph.node(call.node)
    return find_row_map(start, start.value.shape[0], heads, tolerance).rows


def _handles(proof: Proof) -> list[Handle]:
    return list(dict.fromkeys(handle for site in proof.sites for handle in site.handles))


def _watch_final(model: nn.Module, into: list[Tensor]) -> Any:
    """Take the final states from the body of the model, whatever head is on it."""
    body = getattr(model, "base_model", model)

    def hook(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        states = getattr(output, "last_hidden_state", None)
        if states is None and isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            states = output[0]
        if isinstance(states, Tensor):
            into.append(states)

    return on_leave(body, hook)
