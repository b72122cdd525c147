"""A prompt and its answer on the page: what every token of the answer came from, by token, sentence and document."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from whence import method_table
from whence.errors import InputError, WhenceError
from whence.mixing.contributions import Contributions
from whence.mixing.span import Span, explain_span, has_answer, span_of
from whence.mixing.text_units import unit_groups
from whence.reporting.analysis import Analysis
from whence.reporting.attention import json_value, tokens_data
from whence.reporting.mixing import title_of
from whence.reporting.outputs import token_name
from whence.reporting.quantise import pack, quantise
from whence.reporting.removal import one_pass

METHODS = ("alti-logit", "alti", "input-x-gradient", "gradient")
"""Shown unless told: what made each token likely, what its state is made of, and two gradients."""

UNITS = ("sentence", "document")
SECONDS = 10.0
"""What a report spends unasked on one method that explains token by token."""


def answer_data(
    analysis: Analysis, methods: Iterable[str] | None = None
) -> tuple[dict[str, Any] | None, dict[str, bytes]]:
    """The manifest's part and its blocks, one for each method; None where the trace has no answer.

    methods: names of `whence.attribute` methods; None: those of `METHODS` that take some seconds at most.
    """
    trace, model = analysis.trace, analysis.trace.model
    if model is None or not has_answer(model, trace):
        return None, {}
    span = span_of(model, trace)
    entries: list[dict[str, Any]] = []
    blocks: dict[str, bytes] = {}
    for name in METHODS if methods is None else methods:
        try:
            if methods is None:
                _affordable(span, name)
            entry, block = method_data(span, name, analysis)
        except WhenceError as problem:
            entries.append({"name": name, "title": title_of(name), "reason": str(problem)})
            continue
        entries.append(entry)
        blocks |= block
    inputs = span.inputs
    return {
        "tokens": tokens_data(span.tokens),
        "inputs": tokens_data(inputs),
        "prompt": len(inputs) if trace.prompt_length is None else trace.prompt_length,
        "units": {unit: _units(span, unit) for unit in UNITS},
        "choices": _choices(span),
        "methods": entries,
    }, blocks


def method_data(span: Span, method: str, analysis: Analysis | None = None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """One method's manifest entry, and its block: scores [explained, input], and [explained, unit] for each kind of unit."""
    entry = method_table.method(method)
    shares = entry.gives in ("matrix", "contributions") and not entry.contrast
    mixed = analysis.mixture(entry.name) if analysis is not None and shares else None
    scores = explain_span(span, entry, {}, mixed if isinstance(mixed, Contributions) else None)
    arrays = {"values": quantise(scores.values)}
    about: dict[str, Any] = {"name": entry.name, "title": entry.title, "paper": entry.paper, "signed": entry.signed}
    if scores.inputs != span.inputs:  # an encoder–decoder's states are made of its source and of the answer so far
        about["inputs"] = tokens_data(scores.inputs)
        return about, {f"answer/{entry.name}": pack(arrays)}
    for unit in UNITS:
        if not isinstance(_units(span, unit), str):
            arrays[unit] = quantise(scores.by(unit).values)
    return about, {f"answer/{entry.name}": pack(arrays)}


def _units(span: Span, unit: str) -> list[dict[str, Any]] | str:
    """Name and input positions of each sentence or document; the reason where there are none."""
    try:
        groups = unit_groups(span.inputs, span.trace.text, unit, answer=span.trace.prompt_length)
    except InputError as problem:
        return str(problem)
    return [{"name": name, "inputs": positions} for name, positions in groups]


def _choices(span: Span) -> list[dict[str, Any]]:
    """Of each token of the answer: its probability, its place among all tokens, and the one the model preferred."""
    assert span.trace.logits is not None
    rows = span.trace.logits[list(span.positions)].to(torch.float64)
    probabilities = rows.softmax(-1)
    choices = []
    for row, logits, token in zip(probabilities, rows, span.ids, strict=True):
        best = int(logits.argmax())
        choices.append(
            {
                "probability": json_value(float(row[token])),
                "rank": 1 + int((logits > logits[token]).sum()),
                "first": token_name(span.model, best),
                "first_probability": json_value(float(row[best])),
            }
        )
    return choices


def _affordable(span: Span, method: str) -> None:
    """Refuse a method that runs the model for every token of a long answer: one pass is timed."""
    entry = method_table.method(method)
    if entry.gives != "scores" or entry.name == "alti-logit":
        return
    seconds = 3 * len(span.ids) * one_pass(span.model, span.trace)  # a backward pass takes about two forward ones
    if seconds > SECONDS:
        raise InputError(
            f"{entry.title} runs the model for each of the {len(span.ids)} tokens, about {seconds:.0f} seconds here: "
            f"whence.report(trace, attributions=[{entry.name!r}]) takes them."
        )
