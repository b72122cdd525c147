"""From a trace to what the mathematics needs: values with the column space of what each head adds to the output.

Ranks, null spaces and certificates are float64 linear algebra, which some devices do not have: they are worked out on the
CPU, and here, once, is where a layer's tensors go there. A result of such a measure is on the CPU, too.

A learned sink (gpt_oss) is one more key, always visible, with value 0. Inside it comes first, so that a causal mask
stays one; in results it is the last column, named "sink".
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from whence.core.numerics.tolerances import measured_in, weight_rank_tolerance
from whence.errors import InputError
from whence.reading.trace import Layer, Stack, Trace
from whence.results.labels import Tokens

SINK = "sink"


def identifying_values(layer: Layer) -> Tensor:
    """[kv head, key, d_v] (or [head, key, d_v]): values with the column space of T = V W.

    col(T) = col(V) where the head's slice of the output projection has full row rank; that is measured. Where it has
    not, the values are first projected on the directions that the projection passes on. Where no projection was
    proved, V itself: the statement is then about the head output alone.
    """
    values = layer._if_kept(layer.grouped_values, "values").cpu()
    projection = layer._projection
    if projection is None or projection.full_rank:
        return values
    projection = layer.projection  # refused where every row has a map of its own
    left, singular, _ = torch.linalg.svd(projection.weight.to("cpu", torch.float64), full_matrices=False)
    passed = singular > singular[..., :1] * weight_rank_tolerance(projection.weight.dtype)
    projected: Tensor = layer.values.to("cpu", torch.float64) @ (left * passed[:, None])
    return projected.to(measured_in(values.dtype))


def _to_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()


def by_group(layer: Layer) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention [group, head in group, query, key] and values [group, 1, key, d_v] that broadcast, and the mask.

    With a sink there is one key more, the first (`sink_last` puts it last).
    """
    attention, sink = layer.attention.cpu(), layer.sink
    if sink is not None:
        attention = torch.cat([sink.to(attention)[..., None], attention], -1)
    values, visible = values_by_group(layer)
    return attention.unflatten(0, (values.shape[0], -1)), values, visible


def values_by_group(layer: Layer) -> tuple[Tensor, Tensor | None]:
    """Values and mask of `by_group`, without the attention."""
    values, visible = identifying_values(layer), _to_cpu(layer.visible)
    if layer.sink is not None:
        values = pad(values, (0, 0, 1, 0))
        visible = None if visible is None else pad(visible, (1, 0), value=True)
    if visible is not None and visible.dim() == 3:
        groups = values.shape[0]
        visible = visible.unflatten(0, (groups, -1)) if visible.shape[0] == len(layer.heads) else visible[:, None]
    return values[:, None], visible


def sink_last(layer: Layer, by_key: Tensor, columns: int) -> Tensor:
    """What was computed by key (…, key) from `by_group`, with the sink as the last of `columns` columns.

    A layer without a sink in a stack that has them elsewhere gets 0 there.
    """
    if layer.sink is None:
        return pad(by_key, (0, columns - by_key.shape[-1]))
    return torch.cat([pad(by_key[..., 1:], (0, columns - by_key.shape[-1])), by_key[..., :1]], -1)


def key_labels(stack: Stack) -> Tokens:
    """The keys of a stack's results: its tokens, and the sink after them where the stack has one."""
    tokens = stack.key_tokens
    if all(layer.sink is None for layer in stack):
        return tokens
    return replace(
        tokens,
        text=(*tokens.text, SINK),
        raw=(*tokens.raw, SINK),
        ids=None,
        spans=None if tokens.spans is None else (*tokens.spans, None),
        words=None if tokens.words is None else (*tokens.words, None),
        special=(*tokens.special, True),
    )


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


def head_of(layer: Layer, index: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """One head: attention [query, key], its values [key, d_v] and which keys each row sees; a sink is the last key."""
    values = identifying_values(layer)
    weights, values = layer.attention[index].cpu(), values[index * values.shape[0] // len(layer.heads)]
    visible, sink = _to_cpu(layer.visible_of(index)), layer.sink
    if sink is not None:
        weights = torch.cat([weights, sink[index].to(weights)[:, None]], -1)
        values = pad(values, (0, 0, 0, 1))
        visible = None if visible is None else pad(visible, (0, 1), value=True)
    return weights, values, visible


def row_of(layer: Layer, index: int, query: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """One attention row [key], the values of its head [key, d_v], and which keys it sees; a sink is the last key."""
    values = identifying_values(layer)
    weights, values = layer.weights_of(index, query).cpu(), values[index * values.shape[0] // len(layer.heads)]
    visible, sink = layer.visible_of(index), layer.sink
    visible = None if visible is None else visible[query].cpu()
    if sink is not None:
        weights = torch.cat([weights, sink[index, query].to(weights)[None]], -1)
        values = pad(values, (0, 0, 0, 1))
        visible = None if visible is None else pad(visible, (0, 1), value=True)
    return weights, values, visible
