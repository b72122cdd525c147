"""Which stack an attention call belongs to: encoder, decoder or cross, by where it runs and where its keys come from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from whence.reading.capture.lineage import Role
from whence.reading.capture.recorder import Call
from whence.reading.wiring.dataflow import NotRecognised, ancestors, closure, origins
from whence.reading.wiring.op_graph import OpGraph
from whence.reading.wiring.residual import WiringEvidence

if TYPE_CHECKING:
    from whence.reading.layer import Layer


def is_causal(attention: Tensor | None, visible: Tensor | None, n_query: int, n_key: int) -> bool:
    """Whether no query looks at a later key, by the weights (…, query, key) of a text or, without them, by its mask."""
    seen = attention if attention is not None else visible
    return n_query == n_key and n_query > 1 and seen is not None and not bool(seen[..., :n_key].triu(1).any())


def is_decoder(layers: Iterable[Layer]) -> bool:
    """Whether this text is read as by a decoder: in some layer, nothing before the last token looks at it.

    Its beginning may see all of itself (a prefix language model). Texts packed into one sequence are no prefix: there the
    last token may be hidden from all others because it is a text of its own.
    """

    def hides_the_last(layer: Layer) -> bool:
        seen = layer._attention if layer._attention is not None else layer.visible
        if layer.causal or seen is None or seen.shape[-2] != seen.shape[-1]:
            return layer.causal
        return not bool(seen[..., :-1, -1].any()) and bool(seen[..., -1, :-1].any())

    return any(map(hides_the_last, layers))


def stack_names(
    model: nn.Module,
    graph: OpGraph,
    calls: list[Call],
    roles: list[Role],
    readings: list[tuple[float, WiringEvidence]],
) -> list[str]:
    """Which stack each call belongs to, by where it runs and where its keys come from.

    In a model of one stack the lengths decide: layers may share keys with an earlier layer, which is no other stream.
    """
    config = getattr(model, "config", None)
    two = getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False)
    if two:
        cross = [role.elsewhere for role in roles]
    else:  # fewer queries than keys are no other stream where the queries' stream was pooled from the keys'
        cross = [call.weights.shape[-2] != call.weights.shape[-1] for call in calls]
        pooled = [_pooled(graph, call, found) for call, (_, found) in zip(calls, readings, strict=True)]
        if all(p for p, other in zip(pooled, cross, strict=True) if other):
            cross = [False] * len(cross)
        sizes = {call.weights.shape[-2:] for call in calls}
        own = [_reads_own_stream(graph, call, found) for call, (_, found) in zip(calls, readings, strict=True)]
        if all(cross) and all(own) and all(n_key > n_query for n_query, n_key in sizes):
            n_query, n_key = next(iter(sizes))
            raise NotRecognised(
                f"every attention call sees {n_key - n_query} keys besides those of the tokens themselves (learned prefixes or a "
                "cache), which do not stand in the text"
            )
    if two or any(cross):
        known = submodule(model, "get_decoder") is not None
        return [
            "cross" if elsewhere else "decoder" if role.in_decoder or not known else "encoder"
            for role, elsewhere in zip(roles, cross, strict=True)
        ]
    return [
        "decoder" if any(is_causal(call.weights, None, *call.weights.shape[-2:]) for call in calls) else "encoder"
    ] * len(calls)


def _pooled(graph: OpGraph, call: Call, evidence: WiringEvidence) -> bool:
    """Whether the stream that this call's output is added to was itself made from the one that the keys are read from."""
    if evidence.residual is None or call.key is None:
        return False
    op, read = graph.node(call.key).producer, None
    while op is not None and op.inputs:  # back to what the keys' linear map reads
        read = op.inputs[0]
        if op.name in ("linear", "addmm", "matmul"):
            break
        op = read.producer
    return read is not None and bool({id(n) for n in origins(read)} & ancestors([evidence.residual]))


def _reads_own_stream(graph: OpGraph, call: Call, evidence: WiringEvidence) -> bool:
    """Whether the keys are made from the stream that the output is added to."""
    if evidence.residual is None or call.key is None:
        return False
    stream: set[int] = {id(n) for n in (*origins(evidence.residual), *closure(evidence.residual))}
    return bool(ancestors([graph.node(call.key)]) & stream)


def submodule(model: nn.Module, getter: str) -> nn.Module | None:
    """What a method of transformers models (get_decoder and its kin) gives, where it gives a part of the model."""
    try:
        found = getattr(model, getter)()
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return found if isinstance(found, nn.Module) and found is not model else None
