"""Several sequences as one layer: traces of one model, padded to the longest of them and cut again afterwards.

Short texts spend their time on the calls, not on the numbers: together they cost little more than one of them.
Padded keys have no attention and no value. Padded queries repeat the sequence's last, so that all that is proved of a
layer holds for them too; their rows are cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from whence.reading.layer import STATES, Layer
from whence.reading.trace import Trace

PAIRS = 1 << 14
"""Queries × keys worked on together: 16 sequences of 32 tokens. From 91 tokens on each is worked on alone."""

_LONGER = 1.25  # how much longer than the shortest of its batch a sequence may be


def groups(traces: Sequence[Trace]) -> list[list[int]]:
    """Which traces are worked on together: those of one model, of about one length, as many as fit in `PAIRS`."""
    order = sorted(range(len(traces)), key=lambda i: _length(traces[i]))
    groups: list[list[int]] = []
    for i in order:
        if groups:
            n, first = _length(traces[i]), traces[groups[-1][0]]
            if (len(groups[-1]) + 1) * n * n <= PAIRS and n <= _LONGER * _length(first) and _alike(traces[i], first):
                groups[-1].append(i)
                continue
        groups.append([i])
    return groups


def _length(trace: Trace) -> int:
    return max(max(len(stack.tokens), len(stack.key_tokens)) for stack in trace.stacks.values())


def _alike(one: Trace, other: Trace) -> bool:
    """Read from the same weights, with the same things kept."""
    if list(one.stacks) != list(other.stacks):
        return False
    for a, b in zip(one.stacks.values(), other.stacks.values(), strict=True):
        if len(a) != len(b):
            return False
        for x, y in zip(a, b, strict=True):
            same = x._projection is y._projection and x._projection is not None and x.wiring is y.wiring
            if not same or x.heads != y.heads or x.index != y.index or x.causal != y.causal:
                return False
            if (x.rebuilt, x.scale, x.cap) != (y.rebuilt, y.scale, y.cap):
                return False
            if any((getattr(x, name) is None) != (getattr(y, name) is None) for name in STATES + _HEADS):
                return False
    return True


_HEADS = ("_attention", "grouped_values", "_outputs", "sink")


def stacked(layers: Sequence[Layer]) -> Layer:
    """One layer of several sequences: every tensor with the sequence as its first axis."""
    if len(layers) == 1:
        return layers[0]
    made = {name: _together([getattr(layer, name) for layer in layers], last=True) for name in (*STATES, "_outputs")}
    made["grouped_values"] = _together([layer.grouped_values for layer in layers], last=False)
    made["_attention"] = _attention([layer._attention for layer in layers])
    made |= dict.fromkeys(("_queries", "grouped_keys", "visible", "bias"))
    if layers[0].sink is not None:
        sinks = _together([layer.sink[..., None] for layer in layers if layer.sink is not None], last=True)
        made["sink"] = None if sinks is None else sinks[..., 0]
    if layers[0].rebuilt and made["_attention"] is None:  # made again for all of them at once
        made["_queries"] = _together([layer._queries for layer in layers], last=True)
        made["grouped_keys"] = _together([layer.grouped_keys for layer in layers], last=False)
        made["visible"] = _pairs([layer.visible_mask for layer in layers])
        if any(layer.bias is not None for layer in layers):
            biases = [torch.zeros(()) if layer.bias is None else layer.bias for layer in layers]
            made["bias"] = _pairs(
                [b.expand(*b.shape[:-2], *la.shape[1:]) for b, la in zip(biases, layers, strict=True)]
            )
    return replace(layers[0], **made)  # type: ignore[arg-type]


def _pairs(tensors: Sequence[Tensor]) -> Tensor:
    """(query, key) or (head, query, key) each → (sequence, head or 1, query, key); padded keys are 0, or not visible."""
    held = [t if t.dim() == 3 else t[None] for t in tensors]
    heads = max(len(t) for t in held)
    padded = _attention([t.expand(heads, *t.shape[1:]) for t in held])
    assert padded is not None
    return padded


def _together(tensors: Sequence[Tensor | None], last: bool) -> Tensor | None:
    """(…, token, d) each → (sequence, …, token, d); padded with zeros, or with the last token again."""
    held = [t for t in tensors if t is not None]
    if len(held) < len(tensors):
        return None
    n = max(t.shape[-2] for t in held)
    out = held[0].new_zeros(len(held), *held[0].shape[:-2], n, held[0].shape[-1])
    for row, t in zip(out, held, strict=True):
        row[..., : t.shape[-2], :] = t
        if last and t.shape[-2] < n:
            row[..., t.shape[-2] :, :] = t[..., -1:, :]
    return out


def _attention(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """(head, query, key) each → (sequence, head, query, key)"""
    held = [t for t in tensors if t is not None]
    if len(held) < len(tensors):
        return None
    keys = max(t.shape[-1] for t in held)
    return _together([torch.nn.functional.pad(t, (0, keys - t.shape[-1])) for t in held], last=True)


def unpadded(padded: Tensor, row: int, layer: Layer, crossed: bool) -> Tensor:
    """One sequence's (query, source) out of (sequence, query, source); crossed: the residual is the last column."""
    _, queries, keys = layer.shape
    mine = padded[row, :queries]
    if crossed and mine.shape[-1] > keys + 1:
        return torch.cat([mine[:, :keys], mine[:, -1:]], dim=1)
    return mine[:, : keys + int(crossed)]
