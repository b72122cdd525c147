"""Explanations of one text put to the test: removal curves and Δ of each method, and how far the computation fixes it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from whence import method_table
from whence.core.numerics.tolerances import SAME_ROW
from whence.errors import InputError, WhenceError
from whence.faithful.contribution_bounds import contribution_bounds
from whence.faithful.determined import Determined, determined
from whence.faithful.evaluate import faithfulness
from whence.faithful.result import Faithfulness
from whence.mixing.prediction import prediction_of
from whence.model.load import Model
from whence.reading.trace import Trace
from whence.reporting.attention import json_value
from whence.reporting.runs import REMOVED, curves_card, table_card

SECONDS = 6.0
"""What a report spends on it unasked: about as long as on the rest of the page."""
SEARCH = 3.0
"""Seconds for other attention with the same outputs."""
ORDERS = 4  # random orders, for the grey line
MOST_WEIGHTS = 1600  # bounded unasked: a few seconds
FIXED = 0.05
"""Bounds of a share that are this near say what it is."""


def removal_data(trace: Trace, methods: Sequence[str], asked: bool | None = None) -> dict[str, Any] | None:
    """Cards for the page, or the `reason` why there are none; None where it was not wanted (`asked` False)."""
    if asked is False or not methods:
        return None
    try:
        if trace.model is None or trace.text is None or trace.prompt_length is not None:
            raise InputError(
                "words are removed from a text given to a model: this trace has ids, no model, or an answer."
            )
        _affordable(trace.model, trace, len(methods), asked)
        text = trace.text if trace.text_pair is None else (trace.text, trace.text_pair)
        result = faithfulness(trace.model, [text], list(methods), random=ORDERS, ceiling="none")
        if not result.paired:
            raise InputError("; ".join(reason for lines in result.failures.values() for _, reason in lines))
    except WhenceError as problem:
        return {"reason": str(problem)}
    try:
        fixed: Determined | str = determined(trace, _determinable(methods), budget=SEARCH)
    except WhenceError as problem:
        fixed = str(problem)
    sentences = [fixed] if isinstance(fixed, str) else [*fixed.verdict()[:1]]
    cards = [_methods(result, fixed), *(_curves(result, operator) for operator in result.operators)]
    moves = isinstance(fixed, Determined) and fixed.total_variation >= SAME_ROW
    return {"cards": cards, "sentences": sentences, "certain": certain_data(trace, asked) if moves else None}


def certain_data(trace: Trace, asked: bool | None = None) -> dict[str, Any]:
    """Each token's share of the state that is read out, by ALTI and by norms, with its proved bounds; or a `reason`.

    The bounds hold for *every* attention of the last layer with the same head outputs. The row is the one that the head
    reads most; a share counts as fixed if its bounds are within `FIXED` of each other.
    """
    model, stack = trace.model, trace.of()
    last = stack.layers[-1]
    weights = len(last.heads) * len(stack.key_tokens)
    try:
        if model is None:
            raise InputError("the trace came without its model.")
        if weights > MOST_WEIGHTS and not asked:
            raise InputError(
                f"{weights:,} weights would have to be bounded; whence.report(trace, removal=True) does it."
            )
        row = int(prediction_of(model, trace, None, None, None).rows.argmax())
        bounds = contribution_bounds(trace, last.index, row)
    except WhenceError as problem:
        return {"reason": str(problem)}
    alti, norms = (
        [np.maximum(getattr(bounds, name), 0) / np.maximum(getattr(bounds, name), 0).sum(), *bounds.shares(name)]
        for name in ("alti", "norms")
    )
    fixed = {name: shares[2] - shares[1] <= FIXED for name, shares in (("ALTI", alti), ("norms", norms))}
    words = {(True, True): "yes", (True, False): "ALTI's", (False, True): "the norms'", (False, False): "no"}
    rows = [
        [
            f"{j} {bounds.tokens[j]}",
            *(json_value(round(float(part[j]), 4)) for part in (*alti, *norms)),
            words[bool(fixed["ALTI"][j]), bool(fixed["norms"][j])],
        ]
        for j in np.argsort(-alti[0], kind="stable").tolist()
    ]
    columns = ["token", "ALTI", "at least", "at most", "norms", "norms at least", "norms at most", "fixed?"]
    n = len(rows)
    note = (
        f"Shares of the state of {bounds.tokens[row]!r} in layer {last.index}, which the prediction is read from, with bounds "
        f"over every attention that gives the same head outputs. Fixed to {FIXED:g}: {int(fixed['ALTI'].sum())} of {n} by ALTI, "
        f"{int(fixed['norms'].sum())} of {n} by norms. {bounds.sentence()}"
    )
    return table_card("Which contributions are determined?", "certain", columns, rows, note)


def _affordable(model: Model, trace: Trace, methods: int, asked: bool | None) -> None:
    """Refuse what would take long, unless it was asked for: one pass is timed, and passes are counted."""
    if asked:
        return
    passes = 2 * 2 * (methods + ORDERS) * len(trace.tokens)
    seconds = passes * one_pass(model, trace) / 4  # texts without words are shorter, and go in batches
    if seconds > SECONDS:
        raise InputError(
            f"it would take about {seconds:.0f} seconds on this text; whence.report(trace, removal=True) takes them."
        )


def one_pass(model: Model, trace: Trace) -> float:
    """Seconds that the model takes for what was traced."""
    started = time.monotonic()
    with torch.no_grad():
        model.model(**{name: value.to(model.device) for name, value in trace.inputs.items()})
    return time.monotonic() - started


def _determinable(methods: Sequence[str]) -> list[str]:
    entries = [method_table.method(name) for name in methods]
    return [m.name for m in entries if m.determined == "map" or (m.gives == "matrix" and not m.contrast)]


def _methods(result: Faithfulness, fixed: Determined | str) -> dict[str, Any]:
    """A line for each method: Δ under each way of removing words, and how far the computation fixes it."""
    table = result.table()
    delta = {(row["method"], row["operator"]): row["delta"] for row in table.to_dict("records")}
    rows = []
    for name in (m for m in dict.fromkeys(table["method"]) if m in result.methods):
        entry = method_table.method(name)
        known = [json_value(float(delta[name, operator])) for operator in result.operators]
        rows.append([entry.title, "yes" if entry.signed else "no", *known, _fixed(name, fixed)])
    columns = ["method", "signed", *(f"Δ, words {REMOVED[o]}" for o in result.operators), "fixed by the computation?"]
    note = (
        f"Words are removed in each method's order. Δ is the area between the two curves: 0 for a random order, larger is "
        f"better; what is watched is the probability of {result.records[0].target!r}. One text ranks no methods."
    )
    return table_card("Does the model react as they say?", "removal", columns, rows, note)


def _fixed(name: str, fixed: Determined | str) -> str:
    if isinstance(fixed, str):
        return "not known"
    if fixed.total_variation < SAME_ROW:
        return "yes: no other attention has these outputs"
    found: Mapping[str, Any] = next((vars(a) for a in fixed.agreements if a.method == name), {})
    if not found:
        return "not asked"
    if found["kind"] == "map":
        return "yes: it does not read attention"
    if found["kind"] == "theorem" or found["spearman"] is None:
        return "yes, by theorem"
    kept = f"top token kept in {found['kept']} of {found['rows']} rows"
    return f"not shown to be: Spearman {found['spearman']:.2f} with itself under other attention; {kept}"


def _curves(result: Faithfulness, operator: str) -> dict[str, Any]:
    card = curves_card(result, operator)
    titles = {name: method_table.method(name).title for name in result.methods}
    card["lines"] = [{**line, "name": titles.get(line["name"], line["name"])} for line in card["lines"]]
    return {**card, "y_label": card["y_label"].removeprefix("mean ")}
