"""What the page shows of one head: raw, effective and alternative attention as pictures, and each row's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.attention.effective_attention import of_layer
from whence.attention.heads import by_group
from whence.core.alternative_attention import alternative_attention
from whence.core.bounds import weight_bounds
from whence.reading.trace import Layer
from whence.reporting.quantise import Quantised, pack, quantise, whole_numbers

NO_KEY = 65535


@dataclass(frozen=True)
class Detail:
    """How much of each head a report carries.

    heads: all of them, or only those that are listed. bits: of the pictures. levels: shades of the pictures, where
    they are fewer than the bits allow. rows: how many weights of each row come with their numbers and bounds; None,
    all. alternatives: up to how many tokens every head, and not only the listed ones, gets its other attention.
    """

    heads: str
    bits: int
    rows: int | None
    levels: int | None = None
    alternatives: int = 160


def detail_of(name: str, tokens: int) -> Detail:
    """The levels of detail by name: "light", "standard" and "full"."""
    long = tokens > 256
    return {
        "light": Detail("listed", 8, 16, 63),
        "standard": Detail("all", 8, 16 if long else 24, 63 if long else None),
        "full": Detail("all", 16, None, None, 1024),
    }[name]


def head_blocks(layer: Layer, detail: Detail, alternatives: Mapping[int, Tensor]) -> dict[int, bytes]:
    """A block for every head of `layer`; `alternatives` [query, key] for the heads that have one.

    Arrays: raw, effective and alternative [query, key], for pictures; and for the heaviest weights of each row
    [query, place]: keys (65535: none), weight, effective_weight, alternative_weight, lower, upper (closed-form bounds,
    rounded outwards so that they stay valid).
    """
    raw = layer.attention.detach().to(torch.float64)
    effective = of_layer(layer).to(torch.float64)
    weights, values, visible = by_group(layer)
    bounds = weight_bounds(weights, values, visible=visible)
    lower, upper = bounds.lower.flatten(0, 1), bounds.upper.flatten(0, 1)
    total = raw.sum(-1, keepdim=True)  # below 1 where a model has attention sinks; the bounds are of shares
    lower, upper = lower * total, upper * total
    seen = layer.visible_mask.expand(raw.shape)
    return {
        head: _head_block(
            raw[i], effective[i], alternatives.get(head), lower[i], upper[i], seen[i], detail
        )
        for i, head in enumerate(layer.heads)
    }  # fmt: skip


def _head_block(
    raw: Tensor,
    effective: Tensor,
    alternative: Tensor | None,
    lower: Tensor,
    upper: Tensor,
    seen: Tensor,
    detail: Detail,
) -> bytes:
    count = raw.shape[-1] if detail.rows is None else min(detail.rows, raw.shape[-1])
    heaviest = raw.clone()
    if alternative is not None:  # the heaviest of the row itself come first, then those that either row has
        sure = raw.topk(min(count // 2 + 1, raw.shape[-1]), dim=-1).indices
        heaviest = torch.maximum(raw, alternative).scatter_add(-1, sure, torch.full_like(raw, 2.0).gather(-1, sure))
    keys = heaviest.masked_fill(~seen, -1.0).topk(count, dim=-1).indices
    keys = keys.gather(-1, raw.gather(-1, keys).argsort(dim=-1, descending=True, stable=True))
    shown = seen.gather(-1, keys)
    picture = {"bits": detail.bits, "levels": detail.levels, "root": detail.bits == 8}

    def at(t: Tensor) -> Tensor:
        return t.gather(-1, keys) * shown

    arrays: dict[str, Quantised] = {
        "raw": quantise(raw, **picture),  # type: ignore[arg-type]
        "effective": quantise(effective, **picture),  # type: ignore[arg-type]
        "keys": whole_numbers(keys.masked_fill(~shown, NO_KEY)),
        "weight": quantise(at(raw), scale=1.0),
        "effective_weight": quantise(at(effective)),
        "lower": quantise(at(lower), scale=1.0, toward="down"),
        "upper": quantise(at(upper), scale=1.0, toward="up"),
    }
    if alternative is not None:
        arrays["alternative"] = quantise(alternative, **picture)  # type: ignore[arg-type]
        arrays["alternative_weight"] = quantise(at(alternative), scale=1.0)
    return pack(arrays)


@dataclass(frozen=True)
class Alternatives:
    """Other attention of a layer: `maps` [query, key] by head, and how far each row moved, [query] by head."""

    maps: dict[int, Tensor]
    moved: dict[int, Tensor]


def alternatives_of(layer: Layer, *, budget: float) -> Alternatives:
    """Other attention with the same head outputs, for every head of `layer` that has any."""
    weights, values, visible = by_group(layer)
    found = alternative_attention(weights, values, visible=visible, budget=budget)
    moved = dict(zip(layer.heads, found.total_variation.flatten(0, 1), strict=True))
    maps = dict(zip(layer.heads, found.attention.flatten(0, 1), strict=True))
    some = [h for h in layer.heads if float(moved[h].max()) > 1e-6]
    return Alternatives({h: maps[h] for h in some}, {h: moved[h] for h in some})
