"""A state after attention as a sum of one vector per token, for every wiring that the reader proves.

    y_i = Σ_j T_ij + b_i,     T_ij = s_i · Σ_h A^h_ij U^h_j + δ_ij ρ_i

U^h_j = V^h_j L(W^h): the transformed values with the linear part L of whatever norm follows folded into the projection,
s_i = 1/σ_i: the scale of that norm, ρ_i: what the residual carries through it. By wiring:

    post-norm   L of the norm after the add, on both parts
    pre-norm    no L, s = 1, ρ_i = r_i
    sandwich    L of the branch's own norm, on the attention part only
    parallel    as pre-norm; the feed-forward part never left token i, so it is in ρ_i

b_i (output bias, norm bias) belongs to no token. (Ferrando et al., EMNLP 2022; Kobayashi et al., EMNLP 2021.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from whence.core.numerics.tolerances import LOW_RANK, state_agreement
from whence.errors import InputError, WiringError
from whence.reading.trace import Layer
from whence.reading.wiring.equation import Wiring
from whence.reading.wiring.row_map import turn
from whence.results.short_repr import short_repr


@dataclass(frozen=True)
class Decomposition:
    """One attention layer's output, split by where it came from; the (query, key, d) tensor itself is never made.

    Shapes: attention (head, query, key), values (head, key, d_v), weight (head, d_v, d) with the norms' L in it, scale
    (query, 1), own, bias and state (query, d). Several sequences of one length at once: all but `weight` have the
    sequence as their first axis, and so have the results.

    `own` is the residual's part ρ. It belongs to the query's own token; where queries and keys are different tokens
    (cross-attention) it is a source of its own, after the keys.
    """

    __repr__ = short_repr

    attention: Tensor
    values: Tensor
    weight: Tensor
    scale: Tensor | None  # None: 1
    own: Tensor
    bias: Tensor
    state: Tensor
    causal: bool = False
    crossed: bool = False  # own is a further column, not the diagonal
    first_row: int = 0  # where the first query's own token is among the keys: a block of rows begins further down

    @property
    def columns(self) -> int:
        return self.attention.shape[-1] + int(self.crossed)

    @property
    def sources(self) -> Tensor:
        """(head, key, d): U, made when asked for."""
        return torch.matmul(self.values, self.weight)

    @cached_property
    def by_key(self) -> Tensor:
        """(head, sequence · key, query): the attention laid out for one product per key, without the scale.

        Weights so small that their products leave the range of normal numbers (below 1e-31 in float32, where the
        largest of a row is at least 1/n) are 0 here: far below rounding, and the processor is many times slower on them.
        """
        attention = self.attention if self.attention.dim() == 4 else self.attention[None]
        limits = torch.finfo(attention.dtype)
        laid_out = attention.permute(1, 0, 3, 2).flatten(1, 2)
        return torch.hardshrink(laid_out, limits.tiny / limits.eps)

    @property
    def values_by_key(self) -> Tensor:
        """(head, sequence · key, d_v)"""
        if self.values.dim() == 3:
            return self.values
        return self.values.transpose(0, 1).flatten(1, 2)

    @cached_property
    def diagonal(self) -> Tensor:
        """(query, d): T_ii, the token's own part: residual and attention to itself. Crossed: the residual alone."""
        if self.crossed:
            return self.own
        weights = torch.diagonal(self.attention, self.first_row, dim1=-2, dim2=-1)  # (head, token)
        own = self.values.narrow(-2, self.first_row, weights.shape[-1])
        return self._owned(joined(own * weights[..., None]) @ self.weight.flatten(0, 1))

    def _owned(self, visible: Tensor) -> Tensor:
        return self.own + (visible if self.scale is None else visible * self.scale)

    @property
    def own_weights(self) -> Tensor:
        """(sequence · token, head): how much each token attends to itself."""
        return torch.diagonal(self.attention, dim1=-2, dim2=-1).movedim(-2, -1).flatten(0, -2).contiguous()

    def remember(self, visible: Tensor) -> None:
        """The diagonal need not be worked out again: `visible` (sequence · token, d) is Σ_h A^h_ii U^h_i."""
        vars(self)["diagonal"] = self._owned(visible.view_as(self.own))

    def parts(self) -> Tensor:
        """(query, source, d): every T_ij. For short texts and tests: n² d numbers."""
        parts = torch.einsum("...hqk,...hkd->...qkd", self.attention, self.sources)
        parts = parts if self.scale is None else parts * self.scale[..., None, :]
        if self.crossed:
            return torch.cat([parts, self.own[..., None, :]], dim=-2)
        torch.diagonal(parts, self.first_row, dim1=-3, dim2=-2).copy_(self.diagonal.transpose(-1, -2))
        return parts

    def through(self, wiring: Wiring, before: Tensor) -> Decomposition:
        """The parts after the norm of a further half that read `before`, state and feed-forward part: L(T_ij) / σ(before).

        The feed-forward part belongs to no token. The same where there is no such norm.
        """
        norm = wiring.norm
        if norm is None:
            return self
        state, factor = norm.with_factor(before)
        scale = factor if self.scale is None else self.scale * factor
        weight, own, bias = (norm.linear(wiring.carried(x)) for x in (self.weight, self.own, self.bias))
        new = replace(self, weight=weight, scale=scale, own=own * factor, bias=bias * factor, state=state)
        vars(new)["by_key"] = self.by_key  # the attention is the same
        if "diagonal" in vars(self):
            vars(new)["diagonal"] = norm.linear(wiring.carried(self.diagonal)) * factor
        return new


def joined(heads: Tensor) -> Tensor:
    """(…, head, token, d_v) → (…, token, head · d_v)"""
    return heads.transpose(-3, -2).flatten(-2)


def working(tensor: Tensor) -> torch.dtype:
    """Half precision is worked on in float32; float32 and float64 as they are."""
    return tensor.dtype if tensor.dtype in (torch.float32, torch.float64) else torch.float32


def decompose(layer: Layer, *, crossed: bool = False) -> Decomposition:
    """Split a traced layer, and prove it: the parts must add up to the state that the model itself had.

    >>> import whence
    >>> layer = whence.trace(whence.load(), "The bank raised its rates.")[0]
    >>> decomposition = decompose(layer)
    >>> torch.allclose(decomposition.parts().sum(1) + decomposition.bias, layer.after_attention, atol=1e-5)
    True
    """
    if layer.wiring is None:
        raise WiringError(
            f"layer {layer.index}: its wiring is not proved ({layer.reason}), so its parts are not known."
        )
    dtype = working(layer.outputs)

    def to(tensor: Tensor) -> Tensor:
        return tensor.detach().to(dtype)

    attention = to(layer.attention)
    queries, keys = attention.shape[-2:]
    if not crossed and queries != keys and layer.first_row is None:
        raise InputError(
            f"layer {layer.index} has {queries} queries and {keys} keys: it looks at other tokens "
            "than its own, and is read together with the decoder it belongs to."
        )
    projection = layer.row_projection
    weight, values = to(projection.weight), to(layer.values)  # (head, d_v, d), (head, key, d_v)
    # Head outputs in half precision are rounded sums: the parts add up only to the sums themselves.
    outputs = layer.outputs.detach() if layer.outputs.dtype == dtype else attention @ values  # (head, query, d_v)
    outputs = outputs if projection.rows is None else turn(outputs, projection.rows)
    projected = joined(outputs) @ weight.flatten(0, 1)
    own = layer.own_in(dtype).detach()
    bias = own.new_zeros(own.shape[-1]) if projection.bias is None else to(projection.bias)
    parts = layer.wiring.split(own, weight, projected, bias)
    _check(layer, parts.state)
    weight = parts.weight
    if projection.rows is not None:
        attention, values, weight = _separated(attention, values, weight, projection.rows)
    bias = parts.bias.expand_as(parts.state)
    return Decomposition(
        attention,
        values,
        weight,
        parts.scale,
        parts.own,
        bias,
        parts.state,
        layer.causal,
        crossed,
        layer.first_row or 0,
    )


def _separated(attention: Tensor, values: Tensor, weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads whose outputs are turned row by row, as more heads that are not.

    L_i = Σ_m c_m(i) B_m with few fixed matrices B_m (a rotation of d_v numbers has d_v of them), so that
    A_ij V_j L_i W = Σ_m (c_m(i) A_ij) (V_j B_m) W: head (h, m) has the weights c_m(i) A_ij, of either sign.
    """
    count, size = rows.shape[0], rows.shape[-1]
    left, singular, right = torch.linalg.svd(rows.to(torch.float64).flatten(1), full_matrices=False)
    rank = int((singular > singular[0] * LOW_RANK).sum())
    factors = (left[:, :rank] * singular[:rank]).T.to(attention)  # (m, query)
    basis = right[:rank].reshape(rank, size, size).to(values)
    attention = (attention[:, None] * factors[None, :, :count, None]).flatten(0, 1)
    values = torch.einsum("hkv,mvw->hmkw", values, basis).flatten(0, 1)
    return attention, values, weight.repeat_interleave(rank, dim=0)


def _check(layer: Layer, state: Tensor) -> None:
    """The invariant: parts and biases add up to the model's own state, on this very text."""
    theirs = layer._after_attention
    if theirs is None:
        return  # no module shows it; the sum was proved on the reader's own pass
    error, tolerance = apart(state, theirs)
    if not error <= tolerance:
        raise WiringError(
            f"layer {layer.index}: its parts miss the model's own state by {error:.1e} (tolerance {tolerance:.0e}). "
            "If heads were selected, use the whole trace: the rest of the heads are part of the state too."
        )


def apart(state: Tensor, theirs: Tensor) -> tuple[float, float]:
    """How far a state is from the model's own, relative to its largest number, and how far it may be."""
    theirs = theirs.detach()
    largest = theirs.abs().amax().to(state.dtype)
    error = (state - theirs).abs_().amax() / torch.where(largest > 0, largest, 1.0)
    return float(error), state_agreement(theirs.dtype)
