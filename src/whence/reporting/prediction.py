"""The prediction part of the page's data: which input tokens the output came from, by several methods."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from whence.errors import WhenceError
from whence.mixing.contributions import Contributions
from whence.mixing.mixture import Mixture
from whence.reading.trace import Trace
from whence.reporting.attention import plain, tokens_data
from whence.reporting.mixing import PAPERS, TITLES
from whence.reporting.outputs import describe_output, read_out_position

SIGNED = ("gradient-x-input", "integrated-gradients", "occlusion", "alti-logit")


def prediction_data(trace: Trace, methods: Iterable[str | Mixture]) -> dict[str, Any] | None:
    """The output, where it is read, and each method's share per input token. None where the model has no head."""
    if trace.logits is None:
        return None
    ids = trace.inputs.get("decoder_input_ids", trace.inputs.get("input_ids"))
    place = 0 if trace.logits.dim() == 1 else read_out_position(ids, trace.model, trace.logits.shape[0])
    if trace.logits.dim() == 1 and trace.of().layers[0].causal:
        place = len(trace.tokens) - 1
    entries: list[dict[str, Any]] = []
    for method in methods:
        name = method if isinstance(method, str) else method.provenance.method
        try:
            values = _row(trace, method, place)
        except WhenceError as problem:
            entries.append({"name": name, "title": TITLES.get(name, name), "reason": str(problem)})
            continue
        entries.append(attribution_entry(name, values))
    stack = list(trace.stacks.values())[-1] if len(trace.stacks) == 1 else trace.of("encoder")
    return {
        "output": describe_output(trace.logits, None, trace.model, ids),
        "position": place,
        "tokens": tokens_data(stack.tokens),
        "attributions": entries,
    }


def attribution_entry(name: str, values: list[float]) -> dict[str, Any]:
    """One method's line: a number per input token, signed where some push against the output."""
    return {
        "name": name,
        "title": TITLES.get(name, name.replace("-", " ").capitalize()),
        "paper": PAPERS.get(name, ""),
        "values": [plain(v) for v in values],
        "signed": any(v is not None and v < 0 for v in values),
    }


def _row(trace: Trace, method: str | Mixture, place: int) -> list[float]:
    """What the position that is read out is made of, from the embeddings."""
    from whence.mixing.contributions import contributions

    found = contributions(trace, method) if isinstance(method, str) else method
    rolled = found.rollout() if isinstance(found, Contributions) else found
    row = rolled.values[-1, place].to(torch.float64)
    return [float(v) for v in row[: len(trace.tokens)]]
