"""A state after attention as a sum of one vector per token, for every wiring that the reader proves.

    y_i = Σ_j T_ij + b_i,     T_ij = s_i · Σ_h A^h_ij U^h_j + δ_ij ρ_i

U^h_j = L(V^h_j W^h): the transformed values with the linear part L of whatever norm follows folded into the projection,
s_i = 1/σ_i: the scale of that norm, ρ_i: what the residual carries through it. By wiring:

    post-norm   L of the norm after the add, on both parts
    pre-norm    no L, s = 1, ρ_i = r_i
    sandwich    L of the branch's own norm, on the attention part only
    parallel    as pre-norm; the feed-forward part never left token i, so it is in ρ_i

b_i (output bias, norm bias) belongs to no token. (Ferrando et al., EMNLP 2022; Kobayashi et al., EMNLP 2021.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from whence.errors import InputError, WiringError
from whence.reading.norms import Norm
from whence.reading.tape import deviation
from whence.reading.trace import Layer

TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""How far the parts may be from the model's own state, relative; 1e-4 for float32 and float64."""


@dataclass(frozen=True)
class Decomposition:
    """One attention layer's output, split by where it came from; the (query, key, d) tensor itself is never made.

    Shapes: attention (head, query, key), sources (head, key, d), scale (query, 1), own, bias and state (query, d).
    `own` is the residual's part ρ. It belongs to the query's own token; where queries and keys are different tokens
    (cross-attention) it is a source of its own, after the keys.
    """

    attention: Tensor
    sources: Tensor
    scale: Tensor | None  # None: 1
    own: Tensor
    bias: Tensor
    state: Tensor
    causal: bool = False
    crossed: bool = False  # own is a further column, not the diagonal

    @property
    def columns(self) -> int:
        return self.attention.shape[2] + int(self.crossed)

    @cached_property
    def weights_by_key(self) -> Tensor:
        """(key, query, head): the attention laid out for one product per key, without the scale.

        A transposed matrix and a view of it: many times faster than permuting three axes.
        """
        heads, queries, keys = self.attention.shape
        return self.attention.reshape(heads, -1).T.contiguous().view(queries, keys, heads).transpose(0, 1)

    @property
    def sources_by_key(self) -> Tensor:
        """(key, head, d)"""
        return self.sources.transpose(0, 1)

    def diagonal(self) -> Tensor:
        """(query, d): T_ii, the token's own part: residual and attention to itself. Crossed: the residual alone."""
        if self.crossed:
            return self.own
        weights = torch.diagonal(self.attention, dim1=1, dim2=2)  # (head, token)
        seen = torch.einsum("hn,hnd->nd", weights, self.sources)
        return self.own + (seen if self.scale is None else seen * self.scale)

    def parts(self) -> Tensor:
        """(query, source, d): every T_ij. For short texts and tests: n² d numbers."""
        parts = torch.bmm(self.weights_by_key, self.sources_by_key).transpose(0, 1).contiguous()
        parts = parts if self.scale is None else parts * self.scale[:, None]
        if self.crossed:
            return torch.cat([parts, self.own[:, None]], dim=1)
        torch.diagonal(parts, dim1=0, dim2=1).copy_(self.diagonal().T)
        return parts

    def through(self, norm: Norm, before: Tensor, state: Tensor) -> Decomposition:
        """The parts after a further norm that read `before` and belongs to `state`: L(T_ij) / σ(before)."""
        factor = norm.scale(before).reciprocal()
        scale = factor if self.scale is None else self.scale * factor
        own, bias = (norm.linear(x) * factor for x in (self.own, self.bias))
        new = replace(self, sources=norm.linear(self.sources), scale=scale, own=own, bias=bias, state=state)
        new.__dict__["weights_by_key"] = self.weights_by_key  # the attention is the same
        return new


def working(tensor: Tensor) -> torch.dtype:
    """Half precision is worked on in float32; float32 and float64 as they are."""
    return tensor.dtype if tensor.dtype in (torch.float32, torch.float64) else torch.float32


_shared: ContextVar[dict[tuple[int, bool], tuple[Layer, Decomposition]] | None] = ContextVar(
    "whence_split", default=None
)


@contextmanager
def sharing() -> Iterator[None]:
    """While the block runs, a layer is decomposed once, however many methods ask for it."""
    token = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(token)


def decompose(layer: Layer, *, crossed: bool = False) -> Decomposition:
    """Split a traced layer, and prove it: the parts must add up to the state that the model itself had.

    >>> import whence
    >>> layer = whence.trace(whence.load(), "The bank raised its rates.")[0]
    >>> split = decompose(layer)
    >>> torch.allclose(split.parts().sum(1) + split.bias, layer.after_attention, atol=1e-5)
    True
    """
    known = _shared.get()
    if known is None:
        return _decompose(layer, crossed)
    if (id(layer), crossed) not in known:
        known[id(layer), crossed] = (
            layer,
            _decompose(layer, crossed),
        )  # the layer is held, so that its id stays its own
    return known[id(layer), crossed][1]


def _decompose(layer: Layer, crossed: bool) -> Decomposition:
    if layer.wiring is None:
        raise WiringError(
            f"layer {layer.index}: its wiring is not proved ({layer.reason}), so its parts are not known."
        )
    dtype = working(layer.attention)

    def to(tensor: Tensor) -> Tensor:
        return tensor.detach().to(dtype)

    attention = to(layer.attention)
    if not crossed and attention.shape[1] != attention.shape[2]:
        raise InputError(
            f"layer {layer.index} has {attention.shape[1]} queries and {attention.shape[2]} keys: it looks at other tokens "
            "than its own, and is read together with the decoder it belongs to."
        )
    weight = to(layer.projection.weight)  # (head, d_v, d)
    projected_bias = None if layer.projection.bias is None else to(layer.projection.bias)
    projected = torch.einsum("hqv,hvd->qd", to(layer.outputs), weight)
    bias = torch.zeros_like(projected) if projected_bias is None else projected_bias.expand_as(projected)
    own = _times(to(layer.block_input), layer.residual_scale)
    scale: Tensor | None = None
    if layer.branch_norm is not None:
        norm = layer.branch_norm
        scale = norm.scale(projected + bias).reciprocal()
        weight, projected, bias = norm.linear(weight), norm.linear(projected) * scale, norm.linear(bias) * scale
        bias = bias if norm.bias is None else bias + to(norm.bias)
    weight, projected, bias = (_times(t, layer.branch_scale) for t in (weight, projected, bias))
    if layer.wiring == "parallel":
        own = to(layer.after_attention) - projected - bias
    state = own + projected + bias
    if layer.norm is not None:
        norm = layer.norm
        factor = norm.scale(state).reciprocal()
        scale = factor if scale is None else scale * factor
        weight = norm.linear(weight)
        own, projected, bias = (norm.linear(t) * factor for t in (own, projected, bias))
        bias = bias if norm.bias is None else bias + to(norm.bias)
        state = own + projected + bias
    _check(layer, state)
    sources = torch.bmm(to(layer.values), weight)
    return Decomposition(attention, sources, scale, own, bias, state, layer.causal, crossed)


def _check(layer: Layer, state: Tensor) -> None:
    """The invariant: parts and biases add up to the model's own state, on this very text."""
    theirs = layer._after_attention
    if theirs is None:
        return  # no module shows it; the sum was proved on the reader's own pass
    error = deviation(state, theirs)
    tolerance = TOLERANCE.get(theirs.dtype, 1e-4)
    if error > tolerance:
        raise WiringError(
            f"layer {layer.index}: its parts miss the model's own state by {error:.1e} (tolerance {tolerance:.0e}). "
            "If heads were selected, use the whole trace: the rest of the heads are part of the state too."
        )


def _times(x: Tensor, factor: Tensor | float | None) -> Tensor:
    if factor is None:
        return x
    return x * (factor.to(x) if isinstance(factor, Tensor) else factor)
