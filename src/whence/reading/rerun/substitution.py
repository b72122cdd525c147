"""What if? Run a traced text again with other attention, or without some values, and see what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from whence.errors import InputError
from whence.model.load import Model
from whence.reading.capture.recorder import Edit
from whence.reading.capture.untouched import guarded
from whence.reading.inputs import Prepared
from whence.reading.rerun.replay import repeated
from whence.reading.rerun.run import prove_model, run
from whence.reading.trace import Trace
from whence.reading.wiring.proof import Proof
from whence.reading.wiring.sites import AttentionSite
from whence.results.short_repr import short_repr


@dataclass(frozen=True)
class Replace:
    """Put `weights` in place of a layer's attention.

    `weights`: [head, query, key] for all heads, [query, key] for one `head`, or [key] for one `head` and one `query`.
    `attention`: which stack of an encoder–decoder.
    """

    layer: int
    weights: Tensor
    head: int | None = None
    query: int | None = None
    attention: str | None = None


@dataclass(frozen=True)
class ZeroValues:
    """Set the values of these keys to zero in one layer, for one head or for all."""

    layer: int
    keys: Sequence[int]
    head: int | None = None
    attention: str | None = None


Change = Replace | ZeroValues


@dataclass(frozen=True)
class Substituted:
    """What the model gave with the change in place.

    `states`: [layer + 1, token, d] of the chosen stack, where the wiring is proved; `outputs`: the head outputs,
    [head, query, d_v] per layer.
    """

    __repr__ = short_repr

    logits: Tensor | None
    final_states: Tensor | None
    trace: Trace

    @property
    def states(self) -> Tensor:
        return self.trace.states


def substitute(trace: Trace, changes: Change | Sequence[Change], *, model: Any = None) -> Substituted:
    """Run the traced text again with `changes`, on the path that the model really takes.

    >>> import torch, whence
    >>> from whence.reading.rerun.substitution import Replace
    >>> trace = whence.trace(whence.load(), "The bank raised its rates.")
    >>> same = whence.substitute(trace, Replace(layer=2, weights=trace[2].attention))
    >>> torch.allclose(same.final_states, trace.final_states, atol=1e-5)
    True
    """
    from whence.reading.trace_of_row import trace_of_row
    from whence.reading.tracing import kept_parts

    chosen = trace.with_model(model)
    prepared = Prepared(
        dict(trace.inputs), trace.tokens, _target_tokens(trace), trace.text, trace.text_pair, trace.target
    )
    proof = prove_model(chosen, prepared)
    edits = edits_by_call(trace, proof, [changes] if isinstance(changes, (Replace, ZeroValues)) else changes)
    outcome = guarded(chosen.model, lambda: run(chosen, proof, prepared.inputs, 1, kept_parts(None), edits))
    changed = trace_of_row(chosen, proof, outcome, 0, prepared, kept_parts(None))
    if len(trace.stacks) == 1:  # what was put in the place of the attention does not make another model of it
        ((name, _),), (stack,) = trace.stacks.items(), changed.stacks.values()
        changed = replace(changed, stacks={name: replace(stack, name=name)})
    return Substituted(changed.logits, changed.final_states, changed)


TOGETHER = 2048
"""Tokens that `substitute_each` runs in one batch: more gain nothing, and long texts go one by one."""


def substitute_each(trace: Trace, changes: Sequence[Replace], *, model: Any = None) -> list[Substituted]:
    """`substitute` with each of `changes` alone, several copies of the text side by side in a batch.

    The traces that come with the outcomes hold the head outputs only.
    """
    from whence.reading.trace_of_row import trace_of_row

    chosen = trace.with_model(model)
    prepared = Prepared(
        dict(trace.inputs), trace.tokens, _target_tokens(trace), trace.text, trace.text_pair, trace.target
    )
    proof, wanted = prove_model(chosen, prepared), frozenset({"outputs", "logits"})
    size = max(1, TOGETHER // max(len(stack.tokens) for stack in trace.stacks.values()))
    outcomes = []
    for first in range(0, len(changes), size):
        some = [edits_by_call(trace, proof, [change]) for change in changes[first : first + size]]
        copies, edits = repeated(prepared.inputs, len(some)), _side_by_side(some)
        work = partial(run, chosen, proof, copies, len(some), wanted, edits)
        outcome = guarded(chosen.model, work)
        for row in range(len(some)):
            changed = trace_of_row(chosen, proof, outcome, row, prepared, wanted)
            outcomes.append(Substituted(changed.logits, changed.final_states, changed))
    return outcomes


def _side_by_side(edits: Sequence[Mapping[int, Sequence[Edit]]]) -> dict[int, list[Edit]]:
    """Edits of one copy each, for a batch in which the copies follow one another."""
    together: dict[int, list[Edit]] = {}
    for copy, of_calls in enumerate(edits):
        for number, (edit,) in of_calls.items():
            assert edit.weights is not None
            assert edit.where is not None
            if number not in together:
                shape = (len(edits), *edit.where.shape[1:])
                together[number] = [Edit(edit.weights.new_zeros(shape), edit.where.new_zeros(shape))]
            (whole,) = together[number]
            whole.weights[copy], whole.where[copy] = edit.weights[0], edit.where[0]  # type: ignore[index]
    return together


def _target_tokens(trace: Trace) -> Any:
    return trace.stacks["decoder"].tokens if len(trace.stacks) > 1 and "decoder" in trace.stacks else None


def edits_by_call(trace: Trace, proof: Proof, changes: Sequence[Change]) -> Mapping[int, Sequence[Edit]]:
    """The changes, checked against the trace, as edits of numbered attention calls."""
    edits: dict[int, list[Edit]] = {}
    for change in changes:
        stack = trace.of(change.attention)
        layer = stack[change.layer]
        site = proof.site(stack.name, change.layer)
        shape = (len(layer.heads), len(stack.tokens), len(stack.key_tokens))
        if change.head is not None and not 0 <= change.head < site.heads:
            raise InputError(f"layer {change.layer} has no head {change.head}; it has heads 0 … {site.heads - 1}.")
        edit = _zero(change, site, shape) if isinstance(change, ZeroValues) else _replace(change, site, shape)
        edits.setdefault(site.number, []).append(edit)
    return edits


def _zero(change: ZeroValues, site: AttentionSite, shape: tuple[int, int, int]) -> Edit:
    zero = torch.zeros(site.heads, shape[2], dtype=torch.bool)
    bad = [k for k in change.keys if not 0 <= k < shape[2]]
    if bad:
        raise InputError(f"key {bad[0]} is out of range: there are {shape[2]} keys (0 … {shape[2] - 1}).")
    heads = slice(None) if change.head is None else slice(change.head, change.head + 1)
    zero[heads, list(change.keys)] = True
    return Edit(zero=zero[None])


def _replace(change: Replace, site: AttentionSite, shape: tuple[int, int, int]) -> Edit:
    _, n_query, n_key = shape
    where = torch.zeros(site.heads, n_query, n_key, dtype=torch.bool)
    heads = slice(None) if change.head is None else slice(change.head, change.head + 1)
    rows = slice(None) if change.query is None else slice(change.query, change.query + 1)
    if change.query is not None and not 0 <= change.query < n_query:
        raise InputError(f"query {change.query} is out of range: there are {n_query} (0 … {n_query - 1}).")
    expected = tuple(where[heads, rows].shape)
    squeezed = tuple(
        n
        for n, fixed in zip(expected, (change.head is not None, change.query is not None, False), strict=True)
        if not fixed
    )
    if tuple(change.weights.shape) not in (expected, squeezed):
        raise InputError(
            f"attention of shape {tuple(change.weights.shape)} cannot replace layer {change.layer}, head {change.head}, "
            f"query {change.query}: expected {squeezed}."
        )
    where[heads, rows] = True
    weights = torch.zeros(site.heads, n_query, n_key, dtype=change.weights.dtype, device=change.weights.device)
    weights[heads, rows] = change.weights.reshape(expected)
    return Edit(weights=weights[None], where=where[None])


__all__ = ["Change", "Model", "Replace", "Substituted", "ZeroValues", "substitute", "substitute_each"]
