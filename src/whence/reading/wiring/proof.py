"""Was this model read right? Six checks, made once per model on a short pass, before any number is given out.

(a) attention · values = the head output that the model goes on with;
(b) Σ heads through the output projection + bias = the attention block's output;
(c) residual and norms, put together again, give the state after attention: post-norm, pre-norm, sandwich or parallel;
(d) the model's outputs with the recorder = its outputs without it, under its own attention implementation;
(e) pushed head outputs move the state after attention as the projection says, and nothing else;
(f) with all attention held, no token moves another (both in `whence.reading.wiring.intervention`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from whence.errors import ModelError
from whence.model.memory import remembered
from whence.reading.capture import interface
from whence.reading.capture.attach import FUNCTION_MODE, INTERFACE, accepted, attached
from whence.reading.capture.function_mode import AttentionMode
from whence.reading.capture.recorder import AttentionRecorder, Call, mix
from whence.reading.capture.untouched import evaluating
from whence.reading.wiring.dataflow import NotRecognised, ancestors, closure, origins
from whence.reading.wiring.intervention import Claim, intervene
from whence.reading.wiring.op_graph import Node, Op, OpGraph, deviation, walk
from whence.reading.wiring.projection import Projection, find_projection, find_turned_projection
from whence.reading.wiring.residual import (
    Handle,
    Wiring,
    WiringEvidence,
    block_output,
    find_handle,
    find_wiring,
    with_projection,
)
from whence.reading.wiring.second_norm import SecondNorm, find_second_norm

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


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
    wiring: Wiring | None
    block_output: Handle | None
    reason_b: str | None
    reason_c: str | None
    second_norm: SecondNorm | None = None  # the norm that ends a post-norm block
    error_e: float | None = None
    reason_e: str | None = None

    @property
    def handles(self) -> tuple[Handle, ...]:
        """Where the states of this block are picked up, as far as its wiring is proved."""
        if self.wiring is None or self.reason_c is not None:
            return ()
        second = None if self.second_norm is None else self.second_norm.before
        sides = [side.handle for side in self.wiring.sides]
        places = (self.wiring.residual, self.wiring.after, self.block_output, second, *sides)
        return tuple(handle for handle in places if handle is not None)


@dataclass(frozen=True)
class Proof:
    """How a model was read, site by site, and the errors of the six checks."""

    capture: str
    sites: tuple[AttentionSite, ...]
    error_d: float
    tolerance: float
    tried: tuple[str, ...]  # ways in that did not hold, with the reason
    error_f: float | None = None
    mixes: str | None = (
        None  # what mixes tokens outside the attention that was read: nothing may be followed through it
    )

    @property
    def stacks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(site.stack for site in self.sites))

    @property
    def holds(self) -> dict[str, bool]:
        """Whether each of the six checks holds for every attention call."""

        def within(error: float | None) -> bool:
            return error is not None and error <= self.tolerance

        return {
            "a": all(within(s.error_a) for s in self.sites),
            "b": all(within(s.error_b) and s.reason_b is None for s in self.sites),
            "c": all(within(s.error_c) and s.reason_c is None for s in self.sites),
            "d": within(self.error_d),
            "e": all(within(s.error_e) and s.reason_e is None for s in self.sites),
            "f": within(self.error_f) and self.mixes is None,
        }

    def of(self, stack: str) -> tuple[AttentionSite, ...]:
        return tuple(site for site in self.sites if site.stack == stack)


def proof_of(model: nn.Module, inputs: Mapping[str, Any]) -> Proof:
    """The model's proof: the one made before on such inputs, or a new one on (the beginning of) these."""

    def find() -> Proof:
        proof: Proof = own_copy(prove(model, inputs))
        return proof

    return remembered(model, ("proof", *kind_of(inputs)), find)


def kind_of(inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a proof depends on besides the model: which inputs there are, and whether the sequence is one token long."""
    ids = inputs.get("input_ids")
    single = isinstance(ids, Tensor) and ids.dim() > 1 and ids.shape[1] == 1
    return (tuple(sorted(inputs)), *((name, t.dim()) for name, t in sorted(inputs.items()) if "mask" in name), single)


def own_copy(thing: Any, copies: dict[int, Tensor] | None = None) -> Any:
    """The same proof with weights of its own, so that a trace does not change when the model is trained on.

    Layers that share a weight share its copy.
    """
    copies = {} if copies is None else copies
    if isinstance(thing, Tensor):
        if id(thing) not in copies:
            # A view of a weight keeps its shape and strides but not its storage; `expand`ed heads stay expanded.
            copies[id(thing)] = thing.detach().clone()
        return copies[id(thing)]
    if isinstance(thing, tuple):
        parts = [own_copy(t, copies) for t in thing]
        return type(thing)(*parts) if hasattr(thing, "_fields") else tuple(parts)
    if is_dataclass(thing) and not isinstance(thing, type):
        held = {f.name: own_copy(getattr(thing, f.name), copies) for f in fields(thing) if f.init}
        return replace(thing, **held)
    return thing


def prove(model: nn.Module, inputs: Mapping[str, Any]) -> Proof:
    """Read the model in every way there is until one holds; raises `ModelError` with what was tried otherwise."""
    check_weights(model)
    inputs = accepted(model, long_enough(model, inputs))
    batch = next(iter(t for _, t in walk(dict(inputs)))).shape[0]
    plain = _plain_outputs(model, inputs)
    tolerance = TOLERANCE.get(next(model.parameters()).dtype, 6e-2)
    tried: list[str] = []
    for capture in (INTERFACE, FUNCTION_MODE):
        try:
            return _prove_way(model, capture, inputs, batch, plain, tolerance, tuple(tried))
        except NotRecognised as problem:
            tried.append(f"{capture}: {problem}")
    nothing = (
        " It seems to have no attention, or one that is not softmax(…) · values."
        if all("no " in t for t in tried)
        else ""
    )
    raise ModelError(
        f"whence could not read the attention of {type(model).__name__}.{nothing} Tried: " + "; ".join(tried) + "."
    )


def long_enough(model: nn.Module, inputs: Mapping[str, Any], least: int = 12, target: int = 7) -> dict[str, Any]:
    """The inputs with generated tokens at the end of texts that are too short to prove anything on, and no padding.

    A single token attends to itself alone: nothing would tell a decoder from an encoder.
    """
    long = dict(inputs)
    generator = torch.Generator().manual_seed(0)
    embedding = _submodule(model, "get_input_embeddings")
    size = getattr(embedding, "num_embeddings", None) or getattr(getattr(model, "config", None), "vocab_size", None)
    special = {v for k, v in vars(getattr(model, "config", None) or object).items() if k.endswith("_token_id")}
    for prefix, wanted in (("", least), ("decoder_", target)):
        ids, mask = inputs.get(f"{prefix}input_ids"), inputs.get(f"{prefix}attention_mask")
        if ids is None or ids.dim() != 2:
            continue
        n = ids.shape[1]
        seen = torch.ones(n, dtype=torch.bool)
        if mask is not None and mask.dim() == 2 and mask.shape == ids.shape:
            seen = mask[0].bool().cpu()
        elif mask is not None and mask.dim() > 2:  # a mask of the user's own is a fact of the text, not of the model
            del long[f"{prefix}attention_mask"]
        missing = max(0, wanted - int(seen.sum())) if isinstance(size, int) else 0
        if bool(seen.all()) and not missing:
            continue
        free = [i for i in range(min(5, (size or 1) - 1), size or 1) if i not in special] or [0]
        new = torch.tensor(free)[torch.randint(len(free), (len(ids), missing), generator=generator)].to(ids)
        for name, tensor in inputs.items():
            if (
                not isinstance(tensor, Tensor)
                or tensor.shape[:2] != ids.shape
                or name.startswith("decoder_") == (not prefix)
            ):
                continue
            real = tensor[:, seen.to(tensor.device)]
            more = real[:, -1:].expand(-1, missing, *real.shape[2:])
            if name == f"{prefix}input_ids":
                more = new
            elif "position" in name:
                more = more + torch.arange(1, missing + 1).to(more)
            long[name] = torch.cat([real, more], dim=1)
    return long


def check_weights(model: nn.Module) -> None:
    """Refuse weights that are not numbers, naming the tensor."""
    offloaded = any(getattr(module, "_hf_hook", None) is not None for module in model.modules())
    for name, parameter in model.named_parameters():
        if parameter.is_meta and offloaded:
            continue  # accelerate brings it when it is used; outputs are checked instead
        if parameter.is_meta:
            raise ModelError(
                f"the weight {name!r} has no data (it is on the meta device): load the model's weights first."
            )
        if not parameter.is_floating_point() or parameter.numel() == 0:
            continue
        low, high = torch.aminmax(parameter.detach())  # NaN wins in both: one pass over the weights tells
        if not bool(torch.isfinite(high - low)):
            bad = int((~torch.isfinite(parameter)).sum())
            raise ModelError(
                f"the weight {name!r} holds {bad} value{'s' * (bad != 1)} that {'are' if bad != 1 else 'is'} NaN or "
                f"infinite, out of {parameter.numel()}: nothing computed from it could be trusted. Load an intact copy."
            )


def _plain_outputs(model: nn.Module, inputs: Mapping[str, Any]) -> dict[Any, Tensor]:
    with evaluating(model):
        return _numbers(model(**inputs))


def _numbers(output: Any) -> dict[Any, Tensor]:
    skip = {"attentions", "hidden_states", "past_key_values", "decoder_attentions", "cross_attentions"}
    keep = {k: v for k, v in output.items() if k not in skip} if isinstance(output, dict) else output
    return {path: t.detach() for path, t in walk(keep) if t.is_floating_point()}


def _prove_way(
    model: nn.Module,
    capture: str,
    inputs: Mapping[str, Any],
    batch: int,
    plain: Mapping[Any, Tensor],
    tolerance: float,
    tried: tuple[str, ...],
) -> Proof:
    recorder, graph, unseen = AttentionRecorder(), OpGraph(batch), AttentionRecorder()
    with ExitStack() as stack:
        stack.enter_context(graph)
        stack.enter_context(graph.modules(model))
        stack.enter_context(attached(model, capture, recorder, batch))
        if capture == INTERFACE:
            stack.enter_context(AttentionMode(unseen, batch, outside=recorder))
        outputs = _numbers(model(**inputs))
    if not recorder.calls:
        missing = (
            "no attention call was seen"
            if capture == INTERFACE
            else "no softmax over positions followed by a product with values"
        )
        raise NotRecognised(missing)
    if unseen.calls:
        raise NotRecognised(
            f"{len(recorder.calls)} attention calls came through it and {len(unseen.calls)} went past it"
        )
    windows = max(call.weights.shape[0] for call in recorder.calls)
    if windows > batch:
        raise NotRecognised(
            f"its attention runs in {windows // batch} windows of each input, which whence does not put together to one"
        )
    error_d = max((deviation(outputs[k], plain[k]) for k in plain if k in outputs), default=float("inf"))
    if error_d > tolerance:
        raise NotRecognised(
            f"the outputs with the recorder differ by {error_d:.1e} from those without it{_why(model, inputs, plain, tolerance)}"
        )
    readings = [_read_site(graph, call, tolerance) for call in recorder.calls]
    wrong = [i for i, reading in enumerate(readings) if reading[0] > tolerance]
    if wrong:
        raise NotRecognised(
            f"attention · values misses the head output by {readings[wrong[0]][0]:.1e} in call {wrong[0]}"
        )
    sites, claims = _number_sites(model, graph, recorder.calls, readings, tolerance)
    verdict = intervene(model, capture, inputs, recorder.calls, claims, tolerance)
    sites = [_tested(site, *pushed) for site, pushed in zip(sites, verdict.pushed, strict=True)]
    return Proof(capture, tuple(sites), error_d, tolerance, tried, verdict.held, verdict.mixes)


def _tested(site: AttentionSite, error: float | None, reason: str | None) -> AttentionSite:
    """The site with the outcome of (e): what it refutes is not given out."""
    if reason is None or site.projection is None:
        return replace(site, error_e=error, reason_e=reason)
    return replace(
        site, error_e=error, reason_e=reason, projection=None, reason_b=site.reason_b or reason,
        reason_c=site.reason_c or reason, second_norm=None,
    )  # fmt: skip


def _why(model: nn.Module, inputs: Mapping[str, Any], plain: Mapping[Any, Tensor], tolerance: float) -> str:
    """Whose fault it is when (d) fails: a model that is never twice the same, or that differs from its own eager self."""
    again = _plain_outputs(model, inputs)
    noise = max(deviation(again[k], plain[k]) for k in plain)
    if noise > tolerance:
        return f"; two plain runs differ by {noise:.1e} from each other, so the model is not deterministic"
    own = getattr(getattr(model, "config", None), "_attn_implementation_internal", None)
    if own in (None, "eager"):
        return ""
    with interface.switched(model):
        eager = _plain_outputs(model, inputs)
    gap = max(deviation(eager[k], plain[k]) for k in plain)
    if gap <= tolerance:
        return ""
    return (
        f"; the model's own {own!r} and eager attention differ by {gap:.1e}: load it with attn_implementation='eager'"
    )


def _read_site(graph: OpGraph, call: Call, tolerance: float) -> tuple[float, WiringEvidence]:
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
        _, found = find_wiring(graph, projected, ancestors([source]), tolerance)
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


def _reasons(found: WiringEvidence, b: str | None, c: str | None) -> WiringEvidence:
    return replace(found, reason_b=b, reason_c=c)


def _number_sites(
    model: nn.Module, graph: OpGraph, calls: list[Call], readings: list[tuple[float, WiringEvidence]], tolerance: float
) -> tuple[list[AttentionSite], list[Claim]]:
    ops = [_producer(graph, call) for call in calls]
    stacks = _stacks(model, graph, calls, ops, readings)
    counts: dict[str, int] = {}
    sites, claims = [], []
    for number, (call, op, stack, (error_a, found)) in enumerate(zip(calls, ops, stacks, readings, strict=True)):
        layer = counts.get(stack, 0)
        counts[stack] = layer + 1
        after = block_output(op, found) if op is not None else None
        block = None if after is None else find_handle(graph, after)
        places = [None if node is None else find_handle(graph, node) for node in (found.projected, found.stream)]
        known = found.wiring if found.reason_c is None else None
        claims.append(Claim(stack, found.projection, known, places[0], places[1], block))
        sites.append(
            AttentionSite(
                number=number,
                stack=stack,
                layer=layer,
                module=op.region[-1].name if op is not None and op.region else "?",
                heads=call.weights.shape[1],
                groups=call.value.shape[1],
                head_size=call.value.shape[-1],
                causal=_is_causal(call),
                error_a=error_a,
                error_b=None if found.projection is None else found.error_b,
                error_c=None if found.wiring is None else found.error_c,
                keys_error=_keys_error(call),
                projection=found.projection,
                wiring=found.wiring,
                block_output=block,
                reason_b=found.reason_b,
                reason_c=found.reason_c,
                second_norm=find_second_norm(graph, op, found, tolerance),
            )
        )
    return sites, claims


def _producer(graph: OpGraph, call: Call) -> Op | None:
    return graph.node(call.node).producer if call.node is not None else None


def is_causal(attention: Tensor | None, visible: Tensor | None, n_query: int, n_key: int) -> bool:
    """Whether no query looks at a later key, by the weights (…, query, key) of a text or, without them, by its mask."""
    seen = attention if attention is not None else visible
    return n_query == n_key and n_query > 1 and seen is not None and not bool(seen[..., :n_key].triu(1).any())


def _is_causal(call: Call) -> bool:
    return is_causal(call.weights, None, *call.weights.shape[-2:])


def _keys_error(call: Call) -> float | None:
    """How far softmax(scale · QKᵀ + bias + mask) is from the weights: whether keys and queries mean what they say."""
    if call.query is None or call.key is None or call.scale is None:
        return None
    query, key = call.query.to(torch.float64), call.key.to(torch.float64)
    if query.shape[1] % key.shape[1] or query.shape[-1] != key.shape[-1]:
        return None
    scores = mix(query, key.transpose(-1, -2)) * call.scale
    if call.bias is not None:
        scores = scores + call.bias.to(torch.float64)
    if call.visible is not None:
        scores = scores.masked_fill(~call.visible, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    if call.sink is not None:  # the rest of every row is the sink's
        weights = weights * (1 - call.sink.to(torch.float64)[..., None])
    return deviation(weights, call.weights)


def _stacks(
    model: nn.Module,
    graph: OpGraph,
    calls: list[Call],
    ops: list[Op | None],
    readings: list[tuple[float, WiringEvidence]],
) -> list[str]:
    """Which stack each call belongs to, by where it runs and where its keys come from."""
    config = getattr(model, "config", None)
    two = getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False)
    cross = [_reads_elsewhere(graph, call, found, two) for call, (_, found) in zip(calls, readings, strict=True)]
    if not two:  # fewer queries than keys are no other stream where the queries' stream was pooled from the keys'
        pooled = [_pooled(graph, call, found) for call, (_, found) in zip(calls, readings, strict=True)]
        if all(p for p, other in zip(pooled, cross, strict=True) if other):
            cross = [False] * len(cross)
    if two or any(cross):
        decoder = _submodule(model, "get_decoder")
        names = []
        for op, elsewhere in zip(ops, cross, strict=True):
            inside = op is not None and any(region.module is decoder for region in op.region)
            names.append("cross" if elsewhere else "decoder" if inside or decoder is None else "encoder")
        return names
    return ["decoder" if any(_is_causal(call) for call in calls) else "encoder"] * len(calls)


def _pooled(graph: OpGraph, call: Call, found: WiringEvidence) -> bool:
    """Whether the stream that this call's output is added to was itself made from the one that the keys are read from."""
    if found.residual is None or call.key is None:
        return False
    op, read = graph.node(call.key).producer, None
    while op is not None and op.inputs:  # back to what the keys' linear map reads
        read = op.inputs[0]
        if op.name in ("linear", "addmm", "matmul"):
            break
        op = read.producer
    return read is not None and bool({id(n) for n in origins(read)} & ancestors([found.residual]))


def _submodule(model: nn.Module, getter: str) -> nn.Module | None:
    try:
        found = getattr(model, getter)()
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return found if isinstance(found, nn.Module) and found is not model else None


def _reads_elsewhere(graph: OpGraph, call: Call, found: WiringEvidence, two: bool) -> bool:
    """Cross-attention: the keys do not come from the stream that the output is added to.

    In a model of one stack the lengths decide: layers may share keys with an earlier layer, which is no other stream.
    """
    n_query, n_key = call.weights.shape[-2:]
    if found.residual is None or call.key is None or not two:
        return n_query != n_key
    stream: set[int] = {id(n) for n in (*origins(found.residual), *closure(found.residual))}
    return not (ancestors([graph.node(call.key)]) & stream)


__all__ = ["AttentionSite", "Node", "Proof", "check_weights", "interface", "proof_of", "prove"]
