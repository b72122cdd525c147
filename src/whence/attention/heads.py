"""From a trace to what the mathematics needs: values with the column space of what each head adds to the output."""

from __future__ import annotations

import torch
from torch import Tensor

from whence.errors import InputError
from whence.reading.labels import Tokens
from whence.reading.trace import Layer, Stack, Trace


def identifying_values(layer: Layer) -> Tensor:
    """[kv head, key, d_v] (or [head, key, d_v]): values with the column space of T = V W.

    col(T) = col(V) where the head's slice of the output projection has full row rank; that is measured. Where it has
    not, the values are first projected on the directions that the projection passes on. Where no projection was
    proved, V itself: the statement is then about the head output alone.
    """
    values = layer.grouped_values
    if values is None:
        raise InputError(
            f"layer {layer.index} has no values: they were not kept. Trace again with keep including 'values'."
        )
    projection = layer._projection
    if projection is None or projection.full_rank:
        return values
    left, singular, _ = torch.linalg.svd(projection.weight.to(torch.float64), full_matrices=False)
    passed = singular > singular[..., :1] * max(projection.weight.shape[-2:]) * torch.finfo(projection.weight.dtype).eps
    kept: Tensor = layer.values.to(torch.float64) @ (left * passed[:, None])
    return kept.to(values.dtype)


def by_group(layer: Layer) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention [group, head in group, query, key] and values [group, 1, key, d_v] that broadcast, and the mask."""
    attention, values = layer.attention, identifying_values(layer)
    groups = values.shape[0]
    visible = layer.visible
    if visible is not None and visible.dim() == 3:
        visible = visible.unflatten(0, (groups, -1)) if visible.shape[0] == attention.shape[0] else visible[:, None]
    return attention.unflatten(0, (groups, -1)), values[:, None], visible


def find_row(
    trace: Trace, layer: int, head: int, query: int | str, attention: str | None
) -> tuple[Stack, Layer, int, int]:
    """The stack, the layer with that head, the head's place in it, and the row; each checked against the trace."""
    stack = trace.of(attention)
    found = stack[layer]
    if head not in found.heads:
        raise InputError(f"layer {layer} has no head {head}; it has heads {found.heads[0]} … {found.heads[-1]}.")
    return stack, found, found.heads.index(head), find_token(stack.tokens, query)


def find_token(tokens: Tokens, query: int | str) -> int:
    """A position given as a number (negative from the end) or as the token's text where that stands once."""
    n = len(tokens)
    if isinstance(query, str) and not query.lstrip("-").isdigit():
        places = [i for i, text in enumerate(tokens) if text.lower() == query.lower()]
        if len(places) == 1:
            return places[0]
        shown = " ".join(f"{i}:{t}" for i, t in enumerate(tokens))
        what = f"stands at {places}: give one of these positions" if places else f"is no token here; there are: {shown}"
        raise InputError(f"the token {query!r} {what}.")
    place = int(query)
    if not -n <= place < n:
        raise InputError(f"query {place} is out of range: there are {n} tokens (0 … {n - 1}).")
    return place % n


def row_of(layer: Layer, place: int, query: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """One attention row [key], the values of its head [key, d_v], and which keys it sees."""
    values = identifying_values(layer)
    group = place * values.shape[0] // len(layer.heads)
    visible = layer.visible
    if visible is not None:
        visible = visible[query] if visible.dim() == 2 else visible[place, query]
    return layer.attention[place, query], values[group], visible
