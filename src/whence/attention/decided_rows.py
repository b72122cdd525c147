"""From a trace to the rows that a decision is made from: chosen heads and queries, with names and, where there are any, sinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whence.attention.heads import find_row, find_token, row_of
from whence.attention.position_names import position_names
from whence.core.attention.claim import Claim
from whence.errors import InputError
from whence.model.catalogue import find
from whence.reading.trace import Layer, Stack, Trace
from whence.results.labels import Tokens


@dataclass(frozen=True)
class Gathered:
    """rows [head, query, key], values [head, key, d_v], visible [head, query, key], all float64; `sink`: the last key is one.

    queries: positions; query_names of all positions; key_names, the sink left out.
    """

    stack: Stack
    rows: Tensor
    values: Tensor
    visible: Tensor
    queries: tuple[int, ...]
    query_names: tuple[str, ...]
    key_names: tuple[str, ...]
    sink: bool

    def find_key(self, key: int | str) -> int:
        """A key by position, name or token text."""
        return find_named(self.stack.key_tokens, self.key_names, key)

    def padded_costs(self, costs: Tensor | None) -> Tensor | None:
        """Costs with a 0 for the sink, which no rule asks about."""
        if costs is None or not self.sink:
            return costs
        return torch.cat([costs, costs.new_zeros(1)])

    def padded(self, claim: Claim) -> Claim:
        """A claim with a cost for the sink."""
        costs = self.padded_costs(claim.costs)
        return claim if costs is None else replace(claim, costs=costs)


def gather_rows(
    trace: Trace,
    heads: Sequence[tuple[int, int]],
    queries: Sequence[int | str] | None,
    attention: str | None,
    names: Sequence[str] | None = None,
) -> Gathered:
    """The rows of these (layer, head) pairs and queries (None: all), each divided by its sum."""
    stack = trace.of(attention)
    model = trace.provenance.model
    keys = _names(stack.key_tokens, names, model)
    same = len(stack.tokens) == len(stack.key_tokens) and tuple(stack.tokens) == tuple(stack.key_tokens)
    asked = keys if same else _names(stack.tokens, None, model)
    wanted = range(len(stack.tokens)) if queries is None else queries
    places = tuple(find_named(stack.tokens, asked, q) for q in wanted)
    if not places:
        raise InputError("no query was given: name at least one, or none at all for every one.")
    rows, values, masks = [], [], []
    layers = [stack[layer] for layer, _ in heads]
    sink = any(layer.sink is not None for layer in layers)
    n = len(keys)
    for (layer, head), at in zip(heads, layers, strict=True):
        place = find_row(trace, layer, head, 0, attention)[2]
        value = row_of(at, place, 0)[1].detach().to(torch.float64)[:n]
        visible = at.visible_mask
        seen = (visible if visible.dim() == 2 else visible[place])[list(places)]
        row = _rows(at.select([at.heads[place]]), places).detach().to(torch.float64)
        if sink:
            # A learned sink is one more key, always visible, with value 0; a head without one cannot look at it.
            rest = torch.zeros(len(row)) if at.sink is None else at.sink[place, list(places)]
            row = torch.cat([row, rest.to(row)[:, None]], -1)
            seen = torch.cat([seen, torch.full((len(row), 1), at.sink is not None)], -1)
            value = torch.cat([value, value.new_zeros(1, value.shape[-1])])
        rows.append(row)
        values.append(value)
        masks.append(seen)
    width = max(v.shape[-1] for v in values)
    value = torch.stack([torch.nn.functional.pad(v, (0, width - v.shape[-1])) for v in values])
    attention_rows, visible = torch.stack(rows), torch.stack(masks)
    attention_rows = attention_rows.masked_fill(~visible, 0.0)
    attention_rows = attention_rows / attention_rows.sum(-1, keepdim=True)
    return Gathered(stack, attention_rows, value, visible, places, asked, keys, sink)


def _names(tokens: Tokens, given: Sequence[str] | None, model: str) -> tuple[str, ...]:
    """What positions are called: as given, else by what they are in this model (atoms, residues), else their texts."""
    if given is None:
        entry = find(model)
        return position_names(tokens, "tokens" if entry is None else entry.positions)
    if len(given) != len(tokens):
        raise InputError(f"{len(given)} names were given for {len(tokens)} tokens; give one for each.")
    return tuple(str(name) for name in given)


def find_named(tokens: Tokens, names: Sequence[str], key: int | str) -> int:
    """A position given as a number, as a name, or as a token's text where that stands once."""
    if isinstance(key, str) and names.count(key) == 1:
        return list(names).index(key)
    return find_token(tokens, key)


_FEW = 32  # rows that are made one by one; more of them are quicker together


def _rows(head: Layer, places: Sequence[int]) -> Tensor:
    """[row, key]: these rows of a layer with one head."""
    if len(places) > _FEW:
        return head.attention[0, list(places)]
    return torch.stack([head.rows(place, place + 1)[0, 0] for place in places])
