"""Tracing: run a proved model once and hand out what it showed, sequence by sequence, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from whence.errors import InputError, ModelError
from whence.model.load import Model, as_model
from whence.reading.capture.attach import accepted, attached, picking_up
from whence.reading.capture.recorder import Call, Edit, Tap
from whence.reading.inputs import Prepared, beginning, label_ids, pad_together, prepare
from whence.reading.labels import Tokens
from whence.reading.trace import KEEP, Layer, Stack, Trace
from whence.reading.wiring.op_graph import deviation
from whence.reading.wiring.proof import AttentionSite, Proof, check_weights, proof_of
from whence.reading.wiring.residual import Handle
from whence.results.provenance import Provenance

BATCH = 8  # sequences in one forward pass


@overload
def trace(
    model: Any, text: str, text_pair: str | None = ..., target: Any = ..., *,
    keep: Iterable[str] | None = ..., truncate: bool = ..., batch_size: int = ...,
) -> Trace: ...  # fmt: skip
@overload
def trace(
    model: Any, text: Any, text_pair: Any = ..., target: Any = ..., *,
    keep: Iterable[str] | None = ..., truncate: bool = ..., batch_size: int = ...,
) -> Any: ...  # fmt: skip
def trace(
    model: Any,
    text: Any,
    text_pair: Any = None,
    target: Any = None,
    *,
    keep: Iterable[str] | None = None,
    truncate: bool = False,
    batch_size: int = BATCH,
) -> Trace | list[Trace]:
    """Run `model` on `text` once and return everything the measures need, with proved meaning.

    `model`: what `whence.load` gives, a bare transformers model, or a name. `text`: a text (a `Trace` comes back), a
    list of texts or a padded batch of ready tensors (a list comes back, padding removed), token ids, an image.
    `text_pair`: a second text, for models that read two. `target`: for encoder–decoders, what the decoder reads
    (text or ids); None: what the model itself writes. `keep`: which of "attention", "queries", "keys", "values",
    "outputs", "states" to hold; None: all. `truncate`: cut a text that is too long instead of refusing it.

    On the first trace of a model the four proofs of `whence.reading.wiring.proof` are made; a model that cannot be read is
    refused with what was tried.

    >>> import whence
    >>> whence.trace(whence.load(), "The bank raised its rates.").attention[0, 0].sum(-1).round().tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    chosen = as_model(model)
    wanted = _wanted(keep)
    prepared, single = prepare(chosen, text, text_pair, target, truncate=truncate)
    proof = prove_model(chosen, prepared[0])
    traces = []
    for group, batch in _batches(chosen, prepared, batch_size, proof):
        outcome = run(chosen, proof, batch, len(group), wanted)
        traces += [(i, _cut(chosen, proof, outcome, row, prepared[i], wanted)) for row, i in enumerate(group)]
    ordered = [t for _, t in sorted(traces, key=lambda pair: pair[0])]
    return ordered[0] if single else ordered


def _wanted(keep: Iterable[str] | None) -> frozenset[str]:
    if keep is None:
        return frozenset(KEEP)
    wanted = frozenset([keep] if isinstance(keep, str) else keep)
    unknown = wanted - set(KEEP)
    if unknown:
        raise InputError(f"keep={sorted(unknown)} is not something a trace holds; choose among {', '.join(KEEP)}.")
    return wanted


def prove_model(model: Model, prepared: Prepared) -> Proof:
    """The model's proof, made on the beginning of this sequence if there is none yet."""
    return proof_of(model.model, on_device(model, beginning(prepared.inputs)))


def on_device(model: Model, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inputs where the model is, floating ones in the model's dtype."""
    parameter = next(model.model.parameters())
    return {
        name: t.to(parameter.device, parameter.dtype) if t.is_floating_point() else t.to(parameter.device)
        for name, t in inputs.items()
    }


# -- batches -------------------------------------------------------------------------------------------------------

_batchable: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _batches(
    model: Model, prepared: Sequence[Prepared], size: int, proof: Proof
) -> Iterable[tuple[list[int], dict[str, Tensor]]]:
    """Groups of sequences of similar length, padded together; one by one where padding changes the model's outputs."""
    order = sorted(range(len(prepared)), key=lambda i: prepared[i].length)
    same = len({frozenset(p.inputs) for p in prepared}) == 1
    if len(prepared) > 1 and same and prepared[0].length and size > 1 and _padding_is_safe(model, proof, prepared):
        for start in range(0, len(order), size):
            group = order[start : start + size]
            yield group, pad_together(model, [prepared[i] for i in group])
    else:
        for i in order:
            yield [i], dict(prepared[i].inputs)


def _padding_is_safe(model: Model, proof: Proof, prepared: Sequence[Prepared]) -> bool:
    """Whether a sequence gives the same outputs in a padded batch as alone. Tried once per model, on short pieces."""
    if model.model not in _batchable:
        longest = max(prepared, key=lambda p: p.length)
        n = min(longest.length, 10)
        if n < 2:
            return False
        pieces = [beginning(longest.inputs, n, 7), beginning(longest.inputs, max(1, n // 2), 4)]
        parts = [Prepared(piece, None) for piece in pieces]
        together = run(model, proof, pad_together(model, parts), 2, frozenset({"outputs"}))
        safe = True
        for row, piece in enumerate(pieces):
            alone = run(model, proof, dict(piece), 1, frozenset({"outputs"}))
            for ours, theirs in zip(alone.calls, together.calls, strict=True):
                n_query = ours.output.shape[2]
                error = deviation(theirs.output[row, :, :n_query], ours.output[0])
                safe = safe and error <= proof.tolerance
        _batchable[model.model] = safe
    return _batchable[model.model]


# -- one pass ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What one forward pass of a batch gave: its outputs, its attention calls, and the states that were picked up."""

    output: Any
    calls: list[Call]
    states: Mapping[Handle, Tensor]
    final_states: Tensor | None
    batch: Mapping[str, Tensor]


def run(
    model: Model,
    proof: Proof,
    batch: Mapping[str, Tensor],
    size: int,
    wanted: frozenset[str],
    edits: Mapping[int, Sequence[Edit]] | None = None,
) -> Outcome:
    """One forward pass with the tap attached; `edits` by call number."""
    inputs = accepted(model.model, on_device(model, batch))
    if "output_hidden_states" in inputs:
        inputs.pop("output_hidden_states")
    tap = Tap(edits=edits or {}, keep=None if wanted >= frozenset(KEEP) else lambda _: wanted)
    handles = _handles(proof) if "states" in wanted else []
    final: list[Tensor] = []
    with ExitStack() as stack:
        stack.enter_context(attached(model.model, proof.way, tap, size))
        states = stack.enter_context(picking_up(model.model, handles))
        stack.callback(_watch_final(model.model, final).remove)
        output = model.model(**inputs)
    if len(tap.calls) != len(proof.sites):
        raise ModelError(
            f"{model.name} made {len(tap.calls)} attention calls on this input and {len(proof.sites)} when it was proved: "
            "its computation depends on the input, so the proof does not cover this one."
        )
    return Outcome(output, tap.calls, states, final[-1] if final else None, batch)


def _handles(proof: Proof) -> list[Handle]:
    handles = []
    for site in proof.sites:
        wiring = site.wiring
        if wiring is None or site.reason_c is not None:
            continue
        second = None if site.second_norm is None else site.second_norm.before
        handles += [h for h in (wiring.residual, wiring.after, site.block_output, second) if h is not None]
    return list(dict.fromkeys(handles))


def _watch_final(model: nn.Module, into: list[Tensor]) -> Any:
    """Take the final states from the body of the model, whatever head is on it."""
    body = getattr(model, "base_model", model)

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        states = getattr(output, "last_hidden_state", None)
        if states is None and isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            states = output[0]
        if isinstance(states, Tensor):
            into.append(states)

    return body.register_forward_hook(hook)


# -- from a batch to one trace -------------------------------------------------------------------------------------


def _cut(model: Model, proof: Proof, outcome: Outcome, row: int, prepared: Prepared, wanted: frozenset[str]) -> Trace:
    """The part of the batch that is sequence `row`, without padding."""
    source = prepared.inputs["input_ids"].shape[1] if "input_ids" in prepared.inputs else None
    decoder_ids = prepared.inputs.get("decoder_input_ids")
    target = None if decoder_ids is None else decoder_ids.shape[1]
    padded_source = outcome.batch["input_ids"].shape[1] if source is not None else None
    padded_target = outcome.batch["decoder_input_ids"].shape[1] if target is not None else None

    def real(n: int, is_target: bool) -> int:
        """How many of n positions are real: padding is on the right."""
        if is_target and target is not None and n == padded_target:
            return target
        if not is_target and source is not None and n == padded_source:
            return source
        return n

    stacks: dict[str, Stack] = {}
    layers: dict[str, list[Layer]] = {}
    sizes: dict[str, set[tuple[int, int]]] = {}
    two = len(proof.stacks) > 1
    for site, call in zip(proof.sites, outcome.calls, strict=True):
        n_query = real(_length(call, outcome, site, query=True), two and site.stack in ("decoder", "cross"))
        n_key = real(_length(call, outcome, site, query=False), two and site.stack == "decoder")
        layers.setdefault(site.stack, []).append(
            _layer(site, call, outcome, row, n_query, n_key, wanted, proof.tolerance)
        )
        sizes.setdefault(site.stack, set()).add((n_query, n_key))
    for name, found in layers.items():
        n_query, n_key = next(iter(sizes[name])) if len(sizes[name]) == 1 else (-1, -1)
        queries = _labels(model, prepared, two and name in ("decoder", "cross"), n_query)
        keys = queries if name != "cross" and n_key == n_query else _labels(model, prepared, False, n_key)
        stacks[name] = Stack(name, tuple(found), queries, keys)
    logits = getattr(outcome.output, "logits", None)
    final = outcome.final_states
    if isinstance(logits, Tensor):
        logits = logits[row]
        if logits.dim() == 2:
            logits = logits[: real(logits.shape[0], two)]
        _check_finite(model, logits)
    else:
        logits = None
    if final is not None and final.dim() == 3:
        final = final[row][: real(final.shape[1], two)]
        _check_finite(model, final)
    order = [s for s in ("encoder", "decoder", "cross") if s in stacks]
    return Trace(
        stacks={name: stacks[name] for name in order},
        provenance=Provenance(model.name, "trace", {"way": proof.way, "keep": sorted(wanted)}, source=model),
        text=prepared.text,
        text_pair=prepared.text_pair,
        target=prepared.target,
        logits=logits,
        final_states=final if final is not None and final.dim() == 2 else None,
        inputs=dict(prepared.inputs),
        model=model,
    )


def _check_finite(model: Model, tensor: Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        check_weights(model.model)  # names the weight, if it is one
        raise ModelError(
            f"{model.name} gives NaN or infinite outputs on this text although its weights are finite "
            f"({tensor.dtype} may be too small for it): load it with dtype=torch.float32."
        )


def _length(call: Call, outcome: Outcome, site: AttentionSite, *, query: bool) -> int:
    for tensor, axis in ((call.weights, 2 if query else 3), (call.output, 2) if query else (call.value, 2)):
        if tensor.dim() == 4:
            return tensor.shape[axis]
    other = call.query if query else call.key
    if other is not None:
        return other.shape[2]
    # A decoder's own tokens, but for the keys of cross-attention; a decoder without an encoder reads the input itself.
    own = site.stack == "decoder" or (site.stack == "cross" and query)
    ids = outcome.batch.get("decoder_input_ids") if own else None
    ids = outcome.batch.get("input_ids") if ids is None else ids
    if ids is not None:
        return ids.shape[1]
    # An image: the states themselves say how many positions there are.
    handle = site.wiring.residual if site.wiring is not None else None
    state = outcome.states.get(handle) if handle is not None else None
    if state is None:
        raise InputError("nothing that was kept shows how many positions this input has: keep attention or values too.")
    return state.shape[-2]


def _labels(model: Model, prepared: Prepared, target: bool, n: int) -> Tokens:
    tokens = prepared.target_tokens if target else prepared.tokens
    if tokens is None and target and "decoder_input_ids" in prepared.inputs:
        tokens = label_ids(model, prepared.inputs["decoder_input_ids"][0])
    if tokens is not None and len(tokens) == n:
        return tokens
    if "pixel_values" in prepared.inputs and not target:
        return Tokens.patches(max(n, 0))
    return Tokens.positions(max(n, 0))


def _layer(
    site: AttentionSite,
    call: Call,
    outcome: Outcome,
    row: int,
    n_query: int,
    n_key: int,
    wanted: frozenset[str],
    tolerance: float,
) -> Layer:
    def head(tensor: Tensor | None, n: int, name: str) -> Tensor | None:
        return tensor[row, :, :n] if name in wanted and tensor is not None and tensor.dim() == 4 else None

    def state(handle: Handle | None) -> Tensor | None:
        tensor = outcome.states.get(handle) if handle is not None else None
        if tensor is None:
            return None
        if tensor.dim() == 2:
            tensor = tensor[None]
        if tensor.shape[0] != outcome_rows(outcome):
            return None
        return tensor[row, :n_query]

    attention = head(call.weights, n_query, "attention")
    visible = call.visible
    if visible is not None:
        while visible.dim() < 4:
            visible = visible[None]
        visible = visible[min(row, visible.shape[0] - 1)][..., :n_query, :n_key]
        visible = visible[0] if visible.shape[0] == 1 else visible
        visible = None if bool(visible.all()) else visible
    bias = call.bias
    if bias is not None:
        bias = bias[min(row, bias.shape[0] - 1)][..., :n_query, :n_key]
    wiring = site.wiring if site.reason_c is None else None
    second = site.second_norm
    keys_proved = site.keys_error is not None and site.keys_error <= tolerance
    return Layer(
        index=site.layer,
        heads=tuple(range(site.heads)),
        _attention=None if attention is None else attention[..., :n_key],
        _queries=head(call.query, n_query, "queries"),
        grouped_keys=head(call.key, n_key, "keys"),
        grouped_values=head(call.value, n_key, "values"),
        _outputs=head(call.output, n_query, "outputs"),
        visible=visible,
        scale=call.scale if call.scale is None else float(call.scale),
        keys_proved=keys_proved,
        causal=site.causal,
        _block_input=None if wiring is None else state(wiring.residual),
        _after_attention=None if wiring is None else state(wiring.after),
        _block_output=None if wiring is None else state(site.block_output),
        _projection=site.projection,
        wiring=None if wiring is None else wiring.kind,
        norm=None if wiring is None else wiring.norm,
        branch_norm=None if wiring is None else wiring.branch_norm,
        branch_scale=None if wiring is None else wiring.branch_scale,
        residual_scale=None if wiring is None else wiring.residual_scale,
        bias=bias if "keys" in wanted else None,
        reason=site.reason_b or site.reason_c,
        second_norm=None if second is None else second.norm,
        _before_second_norm=None if second is None else state(second.before),
    )


def outcome_rows(outcome: Outcome) -> int:
    """How many sequences the batch held."""
    return next(iter(outcome.batch.values())).shape[0]
