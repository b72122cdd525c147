"""The rest of every block: its feed-forward half, and how queries, keys and values are read from its input."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor, nn

from whence.errors import WiringError
from whence.model.load import Model
from whence.model.memory import remembered
from whence.reading.capture.attach import accepted, attached
from whence.reading.capture.recorder import AttentionRecorder
from whence.reading.inputs import beginning
from whence.reading.rerun.run import on_device
from whence.reading.wiring.dataflow import NotRecognised
from whence.reading.wiring.feedforward import FeedForward, find_feedforward
from whence.reading.wiring.linear_ops import LinearMap
from whence.reading.wiring.norms import Norm
from whence.reading.wiring.op_graph import OpGraph, walk
from whence.reading.wiring.proof import Proof
from whence.reading.wiring.sites import producer, read_site
from whence.reading.wiring.value_maps import find_value_map, query_and_key_maps


@dataclass(frozen=True)
class BlockReading:
    """What was found of the rest of one block: the feed-forward part, or why there is none."""

    feedforward: FeedForward | None
    maps: tuple[LinearMap, LinearMap, LinearMap] | None  # r → queries, keys, values, after `norm_in`, where plain
    values: LinearMap | None  # r → values alone
    norm_in: Norm | None  # what queries, keys and values are read through
    reason: str | None
    maps_reason: str | None


def read_blocks(model: Model, proof: Proof, inputs: Mapping[str, Tensor]) -> dict[int, BlockReading]:
    """Every block of the model by its attention call: made once per model, on the beginning of these inputs."""
    return remembered(model.model, "blocks", lambda: _read(model.model, proof, on_device(model, beginning(inputs))))


def feedforward_of(model: Model, proof: Proof, inputs: Mapping[str, Tensor], stack: str, layer: int) -> FeedForward:
    """The proved feed-forward part of one block; refused with the reason otherwise."""
    reading = read_blocks(model, proof, inputs)[proof.site(stack, layer).number]
    if reading.feedforward is None:
        raise WiringError(f"{stack} layer {layer}: the feed-forward part of the block is not proved: {reading.reason}.")
    return reading.feedforward


def _read(model: nn.Module, proof: Proof, inputs: Mapping[str, Tensor]) -> dict[int, BlockReading]:
    inputs = accepted(model, inputs)
    batch = next(iter(t for _, t in walk(dict(inputs)))).shape[0]
    recorder, graph = AttentionRecorder(), OpGraph(batch)
    with ExitStack() as stack:
        stack.enter_context(graph)
        stack.enter_context(graph.modules(model))
        stack.enter_context(attached(model, proof.capture, recorder, batch))
        model(**inputs)
    starts = [graph.node(call.node) for call in recorder.calls if call.node is not None]
    readings = {}
    for site, call in zip(proof.sites, recorder.calls, strict=True):
        _, read = read_site(graph, call, proof.tolerance)
        others = {id(n) for n in starts if n.tensor is not call.node}
        try:
            feedforward, reason = find_feedforward(graph, producer(graph, call), read, others, proof.tolerance), None
        except NotRecognised as problem:
            feedforward, reason = None, str(problem)
        maps, values, norm_in, maps_reason = None, None, None, None
        try:
            norm_in, values = find_value_map(graph, call.value, read, proof.tolerance)
            maps = query_and_key_maps(graph, call, read, norm_in, values, proof.tolerance)
        except NotRecognised as problem:
            maps_reason = str(problem)
        readings[site.number] = BlockReading(feedforward, maps, values, norm_in, reason, maps_reason)
    return readings
