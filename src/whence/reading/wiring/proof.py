"""Was this model read right? Six checks, made on a short pass before any number is given out.

A proof holds for the weights, hooks and adapters and for the kind of input that it was made on, and is made again for others.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from whence.core.numerics.tolerances import state_agreement
from whence.errors import InputError, ModelError
from whence.model.memory import remembered
from whence.reading.capture.attach import FUNCTION_MODE, INTERFACE, accepted, attached
from whence.reading.capture.function_mode import AttentionMode
from whence.reading.capture.lineage import Lineage
from whence.reading.capture.recorder import AttentionRecorder, Call
from whence.reading.capture.untouched import evaluating
from whence.reading.tensor_tree import own_copy
from whence.reading.wiring.dataflow import NotRecognised
from whence.reading.wiring.intervention import intervene
from whence.reading.wiring.op_graph import OpGraph, deviation, walk
from whence.reading.wiring.proof_inputs import check_weights, kind_of, long_enough
from whence.reading.wiring.sites import AttentionSite, number_sites, parted_streams, read_site, tested
from whence.reading.wiring.stacks import submodule
from whence.results.short_repr import short_repr

if TYPE_CHECKING:
    from whence.reading.trace import Stack


@dataclass(frozen=True)
class Proof:
    """How a model was read, site by site, and the errors of the six checks."""

    __repr__ = short_repr

    capture: str
    sites: tuple[AttentionSite, ...]
    error_d: float
    tolerance: float
    tried: tuple[str, ...]  # ways in that did not hold, with the reason
    error_f: float | None = None
    mixes: str | None = None  # what mixes tokens outside the attention: nothing may be followed through it
    fused: frozenset[int] = frozenset()  # calls that may run fused: their rows provably follow from queries and keys

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
        """The calls of a trace's stack. A single stack is an encoder or a decoder by each text's own mask: all of its calls."""
        if len(self.stacks) == 1 and stack != "cross":
            return self.sites
        return tuple(site for site in self.sites if site.stack == stack)

    def refuse_chosen_heads(self, stack: Stack, what: str) -> None:
        """Refuse what runs whole layers again on a trace of some heads: it would speak of the others, too."""
        for layer in stack:
            if len(layer.heads) != (heads := self.site(stack.name, layer.index).heads):
                raise InputError(
                    f"{what} is of all {heads} heads of a layer together, and this trace holds {len(layer.heads)} of layer "
                    f"{layer.index}: give the whole trace."
                )

    def site(self, stack: str, layer: int) -> AttentionSite:
        """The call behind one layer of a trace."""
        return next(site for site in self.of(stack) if site.layer == layer)


def proof_of(model: nn.Module, inputs: Mapping[str, Any]) -> Proof:
    """The model's proof: the one made before on such inputs, or a new one on (the beginning of) these."""

    def find() -> Proof:
        proof: Proof = own_copy(prove(model, inputs))
        return proof

    return remembered(model, ("proof", *kind_of(inputs)), find)


def prove(model: nn.Module, inputs: Mapping[str, Any]) -> Proof:
    """Read the model in every way there is until one holds; raises `ModelError` with what was tried otherwise."""
    check_weights(model)
    inputs = accepted(model, long_enough(model, inputs))
    batch = next(iter(t for _, t in walk(dict(inputs)))).shape[0]
    plain = _plain_outputs(model, inputs)
    tolerance = state_agreement(next(model.parameters()).dtype)
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


def _plain_outputs(model: nn.Module, inputs: Mapping[str, Any]) -> dict[Any, Tensor]:
    """What the model gives when nothing watches it, after a first pass in which it may not write into itself."""
    with evaluating(model):
        model(**inputs)
    with evaluating(model, unwatched=True):
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
    expected: Mapping[Any, Tensor],
    tolerance: float,
    tried: tuple[str, ...],
) -> Proof:
    recorder, graph, unseen = AttentionRecorder(), OpGraph(batch), AttentionRecorder()
    recorder.lineage = Lineage(dict(inputs))
    with ExitStack() as stack:
        stack.enter_context(recorder.lineage.within(submodule(model, "get_decoder")))
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
    error_d = max((deviation(outputs[k], expected[k]) for k in expected if k in outputs), default=float("inf"))
    if error_d > tolerance:
        raise NotRecognised(
            f"the outputs with the recorder differ by {error_d:.1e} from those without it"
            f"{_why(model, inputs, expected, tolerance)}"
        )
    readings = [read_site(graph, call, tolerance) for call in recorder.calls]
    wrong = [i for i, reading in enumerate(readings) if reading[0] > tolerance]
    if wrong:
        raise NotRecognised(
            f"attention · values misses the head output by {readings[wrong[0]][0]:.1e} in call {wrong[0]}"
        )
    sites, claims = number_sites(model, graph, recorder, readings, tolerance)
    parted = parted_streams([s.stack for s in sites], recorder.roles, [s.module for s in sites])
    errors = intervene(model, capture, inputs, recorder.calls, claims, tolerance)
    sites = [tested(site, *pushed) for site, pushed in zip(sites, errors.pushed, strict=True)]
    fused = _fused_calls(model, capture, inputs, batch, expected, tolerance, recorder, sites)
    return Proof(capture, tuple(sites), error_d, tolerance, tried, errors.held, errors.mixes or parted, fused)


_FEW = 5  # weights at a time while eager attention in blocks is tried, so that even a short text has several blocks


def _fused_calls(
    model: nn.Module,
    capture: str,
    inputs: Mapping[str, Any],
    batch: int,
    expected: Mapping[Any, Tensor],
    tolerance: float,
    eager: AttentionRecorder,
    sites: list[AttentionSite],
) -> frozenset[int]:
    """Which calls may run without their weights: those whose rows follow from queries and keys, if a pass in which they
    do gives the outputs of a plain one and the head outputs that were seen with weights."""
    calls = frozenset(s.number for s in sites if s.rows_error is not None and s.rows_error <= tolerance)
    if not calls:
        return calls
    recorder = AttentionRecorder(fused=calls, all_fused=len(calls) == len(sites), block=_FEW)
    with attached(model, capture, recorder, batch):
        outputs = _numbers(model(**inputs))
    if len(recorder.calls) != len(sites):
        return frozenset()
    error = max((deviation(outputs[k], expected[k]) for k in expected if k in outputs), default=float("inf"))
    for ours, theirs in zip(recorder.calls, eager.calls, strict=True):
        same = ours.output.shape == theirs.output.shape
        error = max(error, deviation(ours.output, theirs.output) if same else float("inf"))
        error = max(error, _mask_error(ours, theirs))
    return calls if error <= tolerance else frozenset()


def _mask_error(ours: Call, theirs: Call) -> float:
    """0 where the fused call's mask leaves the very keys visible that the weights were seen on."""
    if ours.weights.dim() == 4 or theirs.weights.dim() != 4:
        return 0.0
    visible = torch.ones((), dtype=torch.bool) if ours.visible is None else ours.visible
    hidden = ~visible.to(theirs.weights.device).expand(theirs.weights.shape)
    return float(theirs.weights.masked_fill(~hidden, 0.0).abs().amax())


def _why(model: nn.Module, inputs: Mapping[str, Any], expected: Mapping[Any, Tensor], tolerance: float) -> str:
    """Whose fault it is when (d) fails: a model that is never twice the same, or that differs from its own eager self."""
    if not all(bool(torch.isfinite(t).all()) for t in expected.values()):
        return "; without it, they are NaN or infinite themselves"
    again = _plain_outputs(model, inputs)
    noise = max(deviation(again[k], expected[k]) for k in expected)
    if noise > tolerance:
        return f"; two plain runs differ by {noise:.1e} from each other, so the model is not deterministic"
    own = getattr(getattr(model, "config", None), "_attn_implementation_internal", None)
    if own in (None, "eager"):
        return ""
    with attached(model, INTERFACE, AttentionRecorder(), 1):  # only a pass that is recorded runs eager
        eager = _numbers(model(**inputs))
    gap = max(deviation(eager[k], expected[k]) for k in expected)
    if gap <= tolerance:
        return ""
    return (
        f"; the model's own {own!r} and eager attention differ by {gap:.1e}: load it with attn_implementation='eager'"
    )
