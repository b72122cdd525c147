"""Attention as lines between tokens, in which what is uncertain fades: every weight beside what is certain of it.

Every row with the same head output gives key j at least lo_j (closed-form bounds, methods 1.1 (5): always valid, exact for
unique rows, otherwise up to ten times too wide). A line is drawn solid as far as lo_j, and pale beyond.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from whence.attention.heads import head_of
from whence.core.attention.bounds import weight_bounds
from whence.errors import InputError
from whence.reading.layer import Layer
from whence.reading.trace import Stack, Trace
from whence.reporting.document import FORMAT, Document
from whence.reporting.html import policy_of, safe_json, source
from whence.reporting.report import Report

NOTHING = (
    "Nothing can be certified: the attention came without values, and which other attention has the same output depends "
    "on them. The lines show the weights as they were given."
)
CERTAIN = (
    "Solid: what every attention row with the same head output has in common. Pale: the rest of the weight, which the "
    "model's computation does not fix."
)
LARGEST = 32_000_000  # weights in one page; more is refused, since no browser would draw it


def maps_only(trace: Trace) -> Report:
    """A report of attention without values: the maps, and why there is nothing else."""
    findings = [NOTHING]
    stacks = [{"name": name, "findings": findings} for name in trace.stacks]
    manifest = {"format": FORMAT, "text": trace.text, "model": trace.provenance.model, "stacks": stacks}
    return Report(Document(manifest, {}), page=lines_page(trace, "model"))


def lines_page(
    trace: Trace,
    view: str = "head",
    *,
    layer: int | None = None,
    heads: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    split: int | None = None,
    dark: bool | None = None,
    raw: bool = False,
) -> str:
    """One HTML file. view: "head" or "model". layer, heads: shown first. layers: only these. split: where sentence B begins."""
    stacks = {name: _stack_data(stack, layers, raw) for name, stack in trace.stacks.items()}
    certified = all(data["certified"] for data in stacks.values())
    said = CERTAIN if certified else NOTHING
    data = {
        "view": view, "stacks": stacks, "layer": layer, "heads": None if heads is None else list(heads), "split": split,
        "certified": certified, "note": said, "model": trace.provenance.model,
    }  # fmt: skip
    script, style = source("lines.js"), source("lines.css")
    theme = "" if dark is None else f' data-theme="{"dark" if dark else "light"}"'
    return (
        f'<!doctype html>\n<html lang="en"{theme}>\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy_of(script))}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(trace.provenance.model)} · attention · whence</title>\n<style>{style}</style>\n</head>\n"
        f'<body>\n<main id="lines"></main>\n<script type="application/json" id="lines-data">{safe_json(data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _stack_data(stack: Stack, layers: Sequence[int] | None, raw: bool) -> dict[str, Any]:
    wanted = list(stack) if layers is None else [stack[i] for i in layers]
    if sum(layer.attention.numel() for layer in wanted) > LARGEST:
        raise InputError(
            f"{len(stack.tokens)} tokens in {len(wanted)} layers are too many lines for a page: give fewer layers."
        )
    certified = all(layer.grouped_values is not None for layer in wanted)
    return {
        "tokens": list(stack.tokens.raw if raw else stack.tokens.text),
        "keys": list(stack.key_tokens.raw if raw else stack.key_tokens.text),
        "layers": [layer.index for layer in wanted],
        "heads": list(wanted[0].heads),
        "weights": [_bytes(layer.attention) for layer in wanted],
        "certain": [_bytes(certain_part(layer)) for layer in wanted] if certified else None,
        "certified": certified,
    }


def certain_part(layer: Layer) -> torch.Tensor:
    """[head, query, key]: the least weight that any row with the same head output gives; never above the row's own."""
    parts = []
    for head in range(len(layer.heads)):
        weights, values, visible = head_of(layer, head)  # with a sink as the last key, where there is one
        lower = weight_bounds(weights.double(), values.double(), visible=visible).lower
        keys = layer.attention.shape[-1]
        parts.append(torch.minimum(lower.clamp(min=0), weights.double())[:, :keys])
    return torch.stack(parts)


def _bytes(weights: torch.Tensor) -> str:
    """Weights in [0, 1] as bytes, base64."""
    scaled = (weights.double().clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
    return base64.b64encode(np.ascontiguousarray(scaled).tobytes()).decode()
