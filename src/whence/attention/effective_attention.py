"""Effective attention (Brunner et al. 2020, section 3.2) of tensors, or of every layer and head of a trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, overload

import torch
from torch import Tensor

from whence.attention.heads import by_group, key_labels, sink_last
from whence.core.attention.effective_attention import effective_attention as effective
from whence.core.numerics.checks import Constraint
from whence.errors import InputError
from whence.reading.joined_layers import JoinedLayers
from whence.reading.streaming import Stream
from whence.reading.trace import Layer, Trace
from whence.results.declared import Array
from whence.results.result import Result


class EffectiveAttention(Result):
    """A⊥ of every layer and head, [layer, head, query, key]; entries may be negative."""

    kind: ClassVar[str] = "effective-attention"
    arrays: ClassVar[Mapping[str, Array]] = {"values": Array("layer head query key")}


@overload
def effective_attention(
    first: Tensor, second: Tensor = ..., /, *, values: Tensor | None = ..., constraint: Constraint = ...,
    visible: Tensor | None = ..., outputs: Tensor | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def effective_attention(
    first: Trace | Stream, /, *, attention: str | None = ..., constraint: Constraint = ...
) -> EffectiveAttention: ...  # fmt: skip
@overload
def effective_attention(
    *, attention: Tensor, values: Tensor, constraint: Constraint = ..., visible: Tensor | None = ...,
    outputs: Tensor | None = ...,
) -> Tensor: ...  # fmt: skip
def effective_attention(
    first: Tensor | Trace | Stream | None = None,
    second: Tensor | None = None,
    /,
    *,
    attention: Tensor | str | None = None,
    values: Tensor | None = None,
    constraint: Constraint = "output",
    visible: Tensor | None = None,
    outputs: Tensor | None = None,
) -> Tensor | EffectiveAttention:
    """A⊥ = A · P, the part of attention that the head output depends on.

    On tensors: attention (…, n_query, n_key) and values (…, n_key, d_v), any leading batch; `visible` a boolean mask,
    rows × keys; a tensor comes back. On a trace: all layers and heads at once, a result comes back; `attention` then
    names the stack of an encoder–decoder ("encoder", "decoder", "cross").
    A learned sink is a column of its own, the last, named "sink".
    `constraint`: "output", the paper's: the row of least norm with the same output; "simplex": rows keep their sum.

    >>> import torch, whence
    >>> whence.effective_attention(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[1.0], [1.0], [-1.0]]))
    tensor([[ 0.2000,  0.2000, -0.2000]])
    >>> trace = whence.trace(whence.load(), "The bank raised its rates.")
    >>> whence.effective_attention(trace).axes
    ('layer', 'head', 'query', 'key')
    """
    if isinstance(first, (Trace, Stream)):
        if isinstance(attention, Tensor) or second is not None or values is not None or visible is not None:
            raise InputError("a trace brings its own attention, values and masks: give none beside it.")
        return of_trace(first, constraint=constraint, attention=attention)
    if isinstance(attention, str):
        raise InputError(
            f"attention={attention!r} names a stack of a trace; with bare tensors it is the attention itself."
        )
    a, v = first if first is not None else attention, second if second is not None else values
    if not isinstance(a, Tensor) or not isinstance(v, Tensor):
        given = ", ".join(type(x).__name__ for x in (a, v))
        raise InputError(f"effective_attention takes a trace, or attention and values as two tensors; not {given}.")
    return effective(a, v, constraint=constraint, visible=visible, outputs=outputs)


def of_layer(layer: Layer, constraint: Constraint = "output", *, columns: int | None = None) -> Tensor:
    """[head, query, key] of one layer; with `columns`, one more than the keys, a sink is the last of them."""
    weights, values, visible = by_group(layer)
    projection, outputs = layer._projection, layer._outputs
    known = None
    if outputs is not None and projection is not None and projection.full_rank:
        known = outputs.cpu().unflatten(0, (values.shape[0], -1))  # C = A V, already computed by the model
    found = effective(weights, values, constraint=constraint, visible=visible, outputs=known).flatten(0, 1)
    keys = layer.shape[-1]
    return sink_last(layer, found, max(found.shape[-1], columns or 0))[..., : columns or keys]


def of_trace(
    trace: Trace | Stream, *, constraint: Constraint = "output", attention: str | None = None
) -> EffectiveAttention:
    """All layers and heads of one stack of a trace."""
    if isinstance(trace, Stream):
        joined: EffectiveAttention = trace.read(
            JoinedLayers(lambda one: of_trace(one, constraint=constraint)), attention
        )
        return joined
    stack = trace.of(attention)
    labels = key_labels(stack)
    found = [of_layer(layer, constraint, columns=len(labels)) for layer in stack]
    if len({f.shape for f in found}) > 1:
        raise InputError("the layers differ in shape: select those that agree with trace.select(layers=…).")
    origin = trace.provenance.by("effective-attention", constraint=constraint, attention=stack.name)
    axes = ("layer", "head", "query", "key")
    return EffectiveAttention.of_stack(stack, torch.stack(found), origin, axes=axes, key_tokens=labels)
