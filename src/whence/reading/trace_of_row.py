"""From a padded batch to one trace: the part that belongs to one sequence, with its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from whence.errors import InputError, ModelError
from whence.model.load import Model
from whence.reading.capture.recorder import Call
from whence.reading.inputs import Prepared
from whence.reading.rerun.run import Outcome
from whence.reading.tokenised import label_ids
from whence.reading.trace import NOT_KEPT, ROWS_NEED, Layer, Stack, Trace
from whence.reading.wiring.handles import Handle
from whence.reading.wiring.projection import Projection
from whence.reading.wiring.proof import Proof
from whence.reading.wiring.proof_inputs import check_weights
from whence.reading.wiring.sites import AttentionSite
from whence.reading.wiring.stacks import is_causal, is_decoder
from whence.results.labels import Tokens
from whence.results.provenance import Provenance


def trace_of_row(
    model: Model,
    proof: Proof,
    outcome: Outcome,
    row: int,
    prepared: Prepared,
    wanted: frozenset[str],
    sites: Sequence[AttentionSite] | None = None,
) -> Trace:
    """The part of the batch that is sequence `row`, without padding. `sites`: whose calls these are; None: all of the model's."""
    source = prepared.inputs["input_ids"].shape[1] if "input_ids" in prepared.inputs else None
    decoder_ids = prepared.inputs.get("decoder_input_ids")
    target = None if decoder_ids is None else decoder_ids.shape[1]
    padded_source = outcome.batch["input_ids"].shape[1] if source is not None else None
    padded_target = outcome.batch["decoder_input_ids"].shape[1] if target is not None else None

    shown = prepared.shown

    def real(n: int, is_target: bool) -> Tensor:
        """Which of n positions are real: padding is on the right, or hidden by the mask that was given."""
        if not is_target and shown is not None and n == prepared.inputs["attention_mask"].shape[1]:
            return shown
        if is_target and target is not None and n == padded_target:
            n = target
        if not is_target and source is not None and n == padded_source:
            n = source
        return torch.arange(n)

    stacks: dict[str, Stack] = {}
    layers: dict[str, list[Layer]] = {}
    sizes: dict[str, set[tuple[int, int]]] = {}
    two = len(proof.stacks) > 1
    for site, call in zip(proof.sites if sites is None else sites, outcome.calls, strict=True):
        queries = real(_length(call, outcome, site, query=True), two and site.stack in ("decoder", "cross"))
        keys = real(_length(call, outcome, site, query=False), two and site.stack == "decoder")
        layers.setdefault(site.stack, []).append(
            _layer(site, call, outcome, row, queries, keys, wanted, proof.tolerance)
        )
        sizes.setdefault(site.stack, set()).add((len(queries), len(keys)))
    for proved, found in layers.items():
        n_query, n_key = next(iter(sizes[proved])) if len(sizes[proved]) == 1 else (-1, -1)
        name = proved
        if not two and n_query != 1 and proved != "cross":  # the text's own mask says what a single stack is
            name = "decoder" if is_decoder(found) else "encoder"
        labels = _labels(model, prepared, two and name in ("decoder", "cross"), n_query)
        key_labels = labels if name != "cross" and n_key == n_query else _labels(model, prepared, False, n_key)
        stacks[name] = Stack(name, tuple(found), labels, key_labels)
    logits = getattr(outcome.output, "logits", None)
    final = outcome.final_states
    if isinstance(logits, Tensor):
        logits = logits[row]
        dropped = logits.dim() == 2 and "logits" not in wanted
        if logits.dim() == 2 and not dropped:
            logits = _at(logits, real(logits.shape[0], two))
        _check_finite(model, logits)
        logits = None if dropped else logits
    else:
        logits, dropped = None, False
    if final is not None and final.dim() == 3:
        final = _at(final[row], real(final.shape[1], two))
        _check_finite(model, final)
    order = [s for s in ("encoder", "decoder", "cross") if s in stacks]
    return Trace(
        stacks={name: stacks[name] for name in order},
        provenance=Provenance(
            model.name,
            "trace",
            {"capture": proof.capture, "keep": sorted(wanted), **({"logits": NOT_KEPT} if dropped else {})},
            source=model,
            mark=outcome.mark,
        ),
        text=prepared.text,
        text_pair=prepared.text_pair,
        target=prepared.target,
        prompt_length=prepared.prompt_length,
        logits=logits,
        final_states=final if final is not None and final.dim() == 2 else None,
        inputs=dict(prepared.inputs),
        model=model,
        mark=outcome.mark,
        mixes=proof.mixes,
    )


def _at(tensor: Tensor, positions: Tensor, axis: int = 0) -> Tensor:
    """The tensor at these positions of an axis: a view where they are the first ones."""
    n = len(positions)
    if n == 0 or int(positions[-1]) == n - 1:
        return tensor.narrow(axis, 0, min(n, tensor.shape[axis]))
    return tensor.index_select(axis, positions.to(tensor.device))


def _check_hidden(weights: Tensor, keys: Tensor) -> None:
    """Refuse a model that looks at tokens which the mask hides: a trace without them would not be what it computed."""
    hidden = torch.ones(weights.shape[-1], dtype=torch.bool)
    hidden[keys] = False
    if float(weights[..., hidden.to(weights.device)].abs().max()) > 0:
        raise InputError(
            "the model looks at tokens that the given attention_mask hides, so that they cannot be left out of the trace. "
            "Leave these tokens out of the input."
        )


def _shown(call: Call) -> Tensor:
    """(batch, head, query, key): 1 where a fused call's mask shows a key, in place of its weights."""
    shape = (*call.output.shape[:3], call.value.shape[2])
    return torch.ones(()).expand(shape) if call.visible is None else call.visible.float().expand(shape)


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
    handle = site.state_handles.residual if site.state_handles is not None else None
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
    sound = prepared.inputs.get("input_features")
    if sound is not None and not target and n > 0 and sound.shape[-1] == 2 * n:
        return Tokens.seconds(n, 0.02)  # a spectrum every hundredth of a second, two to a frame
    return Tokens.positions(max(n, 0))


def _projection(site: AttentionSite, outcome: Outcome, row: int, queries: Tensor) -> Projection | None:
    """The site's projection, with the maps of this text's own rows where rows are turned before they are projected."""
    if site.projection is None or site.projection.rows is None:
        return site.projection
    rows = outcome.row_maps.get(site.number)
    return None if rows is None else replace(site.projection, rows=_at(rows[row], queries))


def _layer(
    site: AttentionSite,
    call: Call,
    outcome: Outcome,
    row: int,
    queries: Tensor,
    keys: Tensor,
    wanted: frozenset[str],
    tolerance: float,
) -> Layer:
    n_query, n_key = len(queries), len(keys)
    if int(keys[-1]) >= n_key and (call.weights.dim() == 4 or call.fused):
        shown = call.weights if call.weights.dim() == 4 else _shown(call)
        _check_hidden(_at(shown[row], queries, 1), keys)

    def head(tensor: Tensor | None, at: Tensor, name: str) -> Tensor | None:
        return _at(tensor[row], at, 1) if name in wanted and tensor is not None and tensor.dim() == 4 else None

    def pairs(tensor: Tensor) -> Tensor:
        """What is broadcast to [head, query, key], at the real positions."""
        tensor = tensor[min(row, tensor.shape[0] - 1)]
        tensor = tensor if tensor.shape[-2] == 1 else _at(tensor, queries, -2)
        return tensor if tensor.shape[-1] == 1 else _at(tensor, keys, -1)

    def state(handle: Handle | None) -> Tensor | None:
        tensor = outcome.states.get(handle) if handle is not None else None
        if tensor is None:
            return None
        if tensor.dim() == 2:
            tensor = tensor[None]
        if tensor.shape[0] != outcome.sequences:
            return None
        return _at(tensor[row], queries)

    attention = head(call.weights, queries, "attention")
    visible = call.visible
    if visible is not None:
        while visible.dim() < 4:
            visible = visible[None]
        visible = pairs(visible)
        visible = visible[0] if visible.shape[0] == 1 else visible
        visible = None if bool(visible.all()) else visible
    bias = call.bias
    if bias is not None:
        bias = pairs(bias)
    rebuilt = call.fused and "attention" in wanted and wanted >= ROWS_NEED
    handles = None if site.proved_wiring is None else site.state_handles
    second = site.second_norm
    keys_proved = site.keys_error is not None and site.keys_error <= tolerance
    return Layer(
        index=site.layer,
        heads=tuple(range(site.heads)),
        _attention=None if attention is None else _at(attention, keys, -1),
        _queries=head(call.query, queries, "queries"),
        grouped_keys=head(call.key, keys, "keys"),
        grouped_values=head(call.value, keys, "values"),
        _outputs=head(call.output, queries, "outputs"),
        visible=visible,
        scale=call.scale if call.scale is None else float(call.scale),
        keys_proved=keys_proved,
        causal=site.causal if n_query < 2 else is_causal(attention, visible, n_query, n_key),
        _block_input=None if handles is None else state(handles.residual),
        _after_attention=None if handles is None else state(handles.after),
        _block_output=None if handles is None else state(site.block_output),
        _projection=_projection(site, outcome, row, queries),
        wiring=site.proved_wiring,
        bias=bias if "keys" in wanted else None,
        reason=site.reason_b or site.reason_c,
        second_norm=None if second is None else second.norm,
        _before_second_norm=None if second is None else state(second.before),
        _side=None if handles is None else handles.side_part(state),
        sink=None if call.sink is None else _at(call.sink[row], queries, 1),
        cap=call.cap,
        rebuilt=rebuilt,
    )
