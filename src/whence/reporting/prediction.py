"""The prediction part of the page's data: which input tokens the output came from, by several methods."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from whence import method_table
from whence.errors import InputError, WhenceError
from whence.model.load import Model
from whence.reading.trace import Trace
from whence.reporting.analysis import Analysis
from whence.reporting.attention import json_value, tokens_data
from whence.reporting.mixing import title_of
from whence.reporting.outputs import describe_output
from whence.reporting.removal import removal_data


def default_attributions(trace: Trace) -> tuple[str, ...]:
    """What is shown unless told: quick ones of each kind."""
    decoder = (
        trace.of().layers[0].causal and len(trace.stacks) == 1 and trace.logits is not None and trace.logits.dim() == 2
    )
    return ("alti", *(("alti-logit",) if decoder else ()), "norms", "rollout", "gradient", "input-x-gradient")


def prediction_data(
    analysis: Analysis, methods: Iterable[str] | None = None, removal: bool | None = None
) -> dict[str, Any] | None:
    """The output, each method's score per input token, and their removal curves. None where the model has no head."""
    trace = analysis.trace
    if trace.logits is None:
        return None
    ids = trace.inputs.get("decoder_input_ids", trace.inputs.get("input_ids"))
    entries: list[dict[str, Any]] = []
    for name in default_attributions(trace) if methods is None else methods:
        try:
            if trace.model is None:
                raise InputError("the trace came without its model")
            entries.append(attribution_of(trace.model, trace, name, analysis))
        except WhenceError as problem:
            entries.append({"name": name, "title": title_of(name), "reason": str(problem)})
    return {
        "output": describe_output(trace.logits, None, trace.model, ids),
        "attributions": entries,
        "removal": removal_data(trace, [e["name"] for e in entries if "reason" not in e], removal),
    }


def attribution_of(model: Model, trace: Trace, method: str, analysis: Analysis | None = None) -> dict[str, Any]:
    """One method's line: a number per input token, signed where some push against the output."""
    from whence.mixing.attribute import attribute
    from whence.mixing.attribute_one import read_out
    from whence.mixing.contributions import Contributions
    from whence.mixing.prediction import prediction_of

    entry = method_table.method(method)
    mixed = analysis.mixture(entry.name) if analysis and entry.gives == "matrix" and not entry.contrast else None
    if isinstance(mixed, Contributions):
        found = read_out(prediction_of(model, trace, None, None, None), entry, mixed)
    else:
        found = attribute(model, trace, method)
    return {
        "name": entry.name,
        "title": entry.title,
        "paper": entry.paper,
        "tokens": tokens_data(found.key_tokens or found.tokens),
        "values": [json_value(float(v)) for v in found.values.tolist()],
        "signed": entry.signed,
    }
