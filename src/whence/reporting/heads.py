"""What the page shows of one head: raw, effective and alternative attention as pictures, and each row's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.attention.effective_attention import of_layer
from whence.attention.heads import by_group, sink_last
from whence.core.attention.alternatives import alternative_attention
from whence.core.attention.bounds import weight_bounds
from whence.core.numerics.tolerances import GAP
from whence.reading.trace import Layer
from whence.reporting.exact import WEIGHTS, HeadIntervals
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
    return {
        "light": Detail("listed", 8, WEIGHTS, 63),
        "standard": Detail("all", 8, WEIGHTS, 63 if tokens > 256 else None),
        "full": Detail("all", 16, None, None, 1024),
    }[name]


def heaviest_keys(raw: Tensor, visible: Tensor, count: int | None) -> Tensor:
    """[query, place]: the keys that a row is drawn with, heaviest first; −1 where it sees fewer than `count`."""
    count = raw.shape[-1] if count is None else min(count, raw.shape[-1])
    keys = raw.masked_fill(~visible, -1.0).sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return keys.masked_fill(~visible.gather(-1, keys), -1)


def head_blocks(
    layer: Layer,
    detail: Detail,
    alternatives: Mapping[int, tuple[Tensor, Tensor]],
    intervals: Mapping[int, HeadIntervals] | None = None,
) -> dict[int, bytes]:
    """A block for every head of `layer`; `alternatives` and `intervals` for the heads that have them.

    `alternatives`: the map [query, key], and which of its rows [query] were searched before the time was up.

    Arrays: raw, effective and alternative [query, key], for pictures; and for the heaviest weights of each row
    [query, place]: keys (65535: none), weight, effective_weight, alternative_weight, lower and upper (rounded outwards
    so that they stay valid), and exact: 1 where these were proved by linear programs, 0 where they are closed-form
    bounds; searched [query, 1]: 0 where the time was up before the row's alternative was looked for. The header says by
    how much the alternative has moved the searched rows on average (total variation), and how many these are.
    """
    weights, values, visible = by_group(layer)
    columns = weights.shape[-1]
    bounds = weight_bounds(weights, values, visible=visible)
    raw, lower, upper = (
        sink_last(layer, t.detach().to(torch.float64).flatten(0, 1), columns)
        for t in (weights, bounds.lower, bounds.upper)
    )
    effective = of_layer(layer, columns=columns).to(torch.float64)
    total = raw.sum(-1, keepdim=True)  # 1 up to the rounding of the model's dtype; the bounds are of shares
    lower, upper = lower * total, upper * total
    seen = torch.ones(weights.shape, dtype=torch.bool) if visible is None else visible.expand(weights.shape)
    seen = sink_last(layer, seen.reshape(raw.shape), columns)
    return {
        head: _head_block(
            raw[i], effective[i], alternatives.get(head), lower[i], upper[i], seen[i], detail, (intervals or {}).get(head)
        )
        for i, head in enumerate(layer.heads)
    }  # fmt: skip


def _head_block(
    raw: Tensor,
    effective: Tensor,
    alternative: tuple[Tensor, Tensor] | None,
    lower: Tensor,
    upper: Tensor,
    visible: Tensor,
    detail: Detail,
    intervals: HeadIntervals | None,
) -> bytes:
    keys = heaviest_keys(raw, visible, detail.rows)
    shown = keys >= 0
    exact = torch.zeros(raw.shape, dtype=torch.bool)
    if intervals is not None:
        lower, upper, exact = _with_exact(lower, upper, exact, intervals)
    picture = {"bits": detail.bits, "levels": detail.levels, "root": detail.bits == 8}

    def at(t: Tensor) -> Tensor:
        return t.gather(-1, keys.clamp(min=0)) * shown

    arrays: dict[str, Quantised] = {
        "raw": quantise(raw, **picture),  # type: ignore[arg-type]
        "effective": quantise(effective, **picture),  # type: ignore[arg-type]
        "keys": whole_numbers(keys.masked_fill(~shown, NO_KEY)),
        "weight": quantise(at(raw), scale=1.0),
        "effective_weight": quantise(at(effective)),
        "lower": quantise(at(lower), scale=1.0, toward="down"),
        "upper": quantise(at(upper), scale=1.0, toward="up"),
        "exact": Quantised(at(exact.to(torch.uint8)).numpy(), 1.0, 1, 1),
    }
    about: dict[str, float] = {}
    if alternative is not None:
        other, searched = alternative
        total = raw.sum(-1).clamp(min=1e-12)
        searched = searched | ((upper - lower).amax(-1) < GAP)
        moved = (0.5 * (other - raw).abs().sum(-1) / total)[searched]
        about = {"moved": float(moved.mean()) if len(moved) else 0.0, "searched": len(moved)}
        arrays["alternative"] = quantise(other, **picture)  # type: ignore[arg-type]
        arrays["alternative_weight"] = quantise(at(other), scale=1.0)
        arrays["searched"] = Quantised(searched[:, None].to(torch.uint8).numpy(), 1.0, 1, 1)
    return pack(arrays, about)


def _with_exact(lower: Tensor, upper: Tensor, exact: Tensor, intervals: HeadIntervals) -> tuple[Tensor, Tensor, Tensor]:
    """[query, key] bounds with the exact ones in their places."""
    there = intervals.solved[:, None] & (intervals.keys >= 0)
    rows, places = there.nonzero(as_tuple=True)
    keys = intervals.keys[rows, places]
    lower, upper, exact = lower.clone(), upper.clone(), exact.clone()
    lower[rows, keys], upper[rows, keys] = intervals.lower[rows, places], intervals.upper[rows, places]
    exact[rows, keys] = True
    return lower, upper, exact


@dataclass(frozen=True)
class Alternatives:
    """Other attention of a layer, by head: `maps` [query, key]; how far each row moved, and which were searched, [query]."""

    maps: dict[int, Tensor]
    moved: dict[int, Tensor]
    searched: dict[int, Tensor]

    def by_head(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Map and searched rows, by head."""
        return {head: (other, self.searched[head]) for head, other in self.maps.items()}


def alternatives_of(layer: Layer, rows: Tensor | None = None) -> Alternatives:
    """Other attention with the same head outputs, for every head of `layer` that has any: one round of the search.

    rows: boolean [head, query], the rows that are searched; the others take one step only. None: all.
    """
    weights, values, visible = by_group(layer)
    chosen = None if rows is None else rows.reshape(weights.shape[:-1])
    found = alternative_attention(weights, values, visible=visible, rounds=1, rows_searched=chosen)
    moved = dict(zip(layer.heads, found.total_variation.flatten(0, 1), strict=True))
    maps = dict(zip(layer.heads, sink_last(layer, found.attention.flatten(0, 1), weights.shape[-1]), strict=True))
    some = [h for h in layer.heads if float(moved[h].max()) > GAP]
    searched = dict(zip(layer.heads, found.searched.flatten(0, 1), strict=True))
    return Alternatives({h: maps[h] for h in some}, {h: moved[h] for h in some}, {h: searched[h] for h in some})
