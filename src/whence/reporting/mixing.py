"""The provenance and identity part of the page's data: what each hidden token is made of, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from whence import method_table
from whence.core.numerics.tolerances import SUM_ROUNDING
from whence.errors import WhenceError
from whence.mixing.contributions import EMBEDDINGS, Contributions
from whence.mixing.mixture import Mixture
from whence.mixing.summaries import own_share_rows
from whence.reading.trace import Trace
from whence.reporting.analysis import Analysis
from whence.reporting.attention import json_value, tokens_data
from whence.reporting.quantise import pack, quantise


def mixture_data(mixture: Mixture) -> tuple[dict[str, Any], dict[str, bytes]]:
    """One method's manifest entry and its blocks, one per layer.

    kind "layer": each block is that layer's own matrix, which the page rolls out itself; "embeddings": the matrix
    from the embeddings to that layer's output.
    """
    name = mixture.provenance.method
    entry_of = method_table.method(name)
    rolled = mixture.rollout() if isinstance(mixture, Contributions) else mixture
    from_layer = isinstance(mixture, Contributions) and mixture.origin != EMBEDDINGS and mixture.source_length == 0
    values = mixture.values if from_layer else rolled.values
    own = own_share_rows(rolled)
    entry = {
        "name": name,
        "title": entry_of.title,
        "paper": entry_of.paper,
        "origin": "layer" if from_layer else EMBEDDINGS,
        "layers": list(mixture.layers),
        "tokens": tokens_data(mixture.tokens),
        "input_tokens": None if mixture.key_tokens is None else tokens_data(mixture.key_tokens),
        "settings": {
            k: v for k, v in mixture.provenance.settings.items() if isinstance(v, (str, int, float, bool, type(None)))
        },
        "own": {c: [json_value(row[c]) for row in own] for c in ("median", "q25", "q75", "mean", "not_largest")},
        "own_by_token": [[round(v, 5) for v in row] for row in _own(rolled.values).tolist()],
    }
    blocks = {
        f"mix/{name}/{layer}": pack({"values": quantise(values[i], bits=16)}) for i, layer in enumerate(mixture.layers)
    }
    return entry, blocks


def _own(values: Tensor) -> Tensor:
    """[layer, hidden]: each token's share of itself."""
    return torch.diagonal(values, offset=values.shape[-1] - values.shape[-2], dim1=-2, dim2=-1)


def mixtures(analysis: Analysis, methods: Iterable[str | Mixture]) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Every method that this trace allows; one that it does not is listed with its reason."""
    entries: list[dict[str, Any]] = []
    blocks: dict[str, bytes] = {}
    for method in methods:
        try:
            found = analysis.mixture(method) if isinstance(method, str) else method
            entry, some = mixture_data(found)
        except WhenceError as problem:
            name = method if isinstance(method, str) else method.provenance.method
            entries.append({"name": name, "title": title_of(name), "reason": str(problem)})
            continue
        entries.append(entry)
        blocks |= some
    return entries, blocks


def title_of(name: str) -> str:
    """A method's title; the name itself where there is no such method."""
    return {m.name: m.title for m in method_table.methods()}.get(name, name)


def naive_identifiability(trace: Trace) -> dict[str, Any] | None:
    """By layer: how often a hidden token's nearest input embedding (cosine) is its own; a tie counts as its own.

    The "naive" map of Brunner et al. 2020, section 4, on this text alone. None where the states are not known.
    """
    try:
        states = trace.states.detach().to(torch.float64)
    except WhenceError:
        return None
    unit = torch.nn.functional.normalize(states, dim=-1)
    similar = unit[1:] @ unit[0].mT  # [layer, hidden, input]
    own = torch.diagonal(similar, dim1=-2, dim2=-1)
    best = similar.amax(-1)
    hit = own >= best - SUM_ROUNDING
    rate = hit.to(torch.float64).mean(-1)
    return {
        "layers": list(range(len(rate))),
        "rate": [json_value(v) for v in rate.tolist()],
        "chance": 1 / states.shape[1],
        "hits": [[int(v) for v in row] for row in hit.tolist()],
    }
