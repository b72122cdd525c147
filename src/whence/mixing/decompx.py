"""DecompX: every state as a sum of one vector per input token, carried through all layers.

Modarressi et al., "DecompX: Explaining Transformers Decisions by Propagating Token Decomposition" (ACL 2023). Linear
parts act on every vector; a norm divides by the scale that the model itself used; the activation is the line through
the origin, act(u) = θ ⊙ u with θ = act(u)/u; a bias is shared out by the absolute dot product of each vector with it;
as in the authors' code, what attention's biases add, b_V W_O + b_O, over attention plus residual vectors.
A gated feed-forward layer keeps its activated factor as it is, and the vectors go through the other one (the paper has
only plain ones). The vectors add up to the model's own state in every layer, which is asserted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whence.core.numerics.tolerances import state_agreement
from whence.errors import InputError, WiringError
from whence.mixing.budget import as_bytes
from whence.mixing.contributions import EMBEDDINGS, Contributions
from whence.mixing.mixture import check_rows
from whence.reading.inputs import Prepared
from whence.reading.rerun.run import prove_model
from whence.reading.trace import Layer, Trace
from whence.reading.wiring.block_tail import read_blocks
from whence.reading.wiring.feedforward import FeedForward
from whence.reading.wiring.linear_ops import LinearMap
from whence.reading.wiring.norms import Norm
from whence.reading.wiring.op_graph import deviation

_ROWS = 256  # vectors of a piece: enough for the products, and what is done to them stays in the cache


def decompx(
    trace: Trace, *, attention: str | None = None, model: Any = None, memory: str | float = "2GB"
) -> Contributions:
    """[layer, hidden, input embedding]: the length of each token's vector in each state, rows divided by their sums."""
    if (attention is None and len(trace.stacks) > 1) or trace.of(attention).name == "cross":
        raise InputError("decompx reads one stack of its own tokens: choose attention='encoder' (or 'decoder').")
    trace.follow("decompx")
    stack = trace.of(attention)
    if stack.layers[0].index != 0:
        raise InputError("decompx starts from the embeddings: give the whole trace, and select layers afterwards.")
    n, width = stack.layers[0].block_input.shape
    dtype = stack.layers[0].block_input.dtype
    dtype = dtype if dtype == torch.float64 else torch.float32
    size = torch.finfo(dtype).bits // 8
    if 4 * n * n * width * size > as_bytes(memory):
        needed = 4 * n * n * width * size / 1e9
        raise InputError(
            f"decompx on {n} tokens takes {needed:.1f} GB, more than memory={memory!r}: give it more, or less text."
        )
    chosen = trace.with_model(model)
    proof = prove_model(chosen, Prepared(dict(trace.inputs), trace.tokens))
    proof.refuse_chosen_heads(stack, "decompx")
    readings = read_blocks(chosen, proof, trace.inputs)
    parts = stack.layers[0].block_input.new_zeros(n, n, width, dtype=dtype)  # (hidden, input, d)
    torch.diagonal(parts, dim1=0, dim2=1).copy_(stack.layers[0].block_input.T)
    causal = all(layer.causal for layer in stack)
    rows = []
    for layer in stack:
        reading = readings[proof.site(stack.name, layer.index).number]
        if reading.values is None or reading.feedforward is None:
            why = reading.maps_reason if reading.values is None else reading.reason
            raise WiringError(
                f"layer {layer.index}: decompx needs every part of the block, and one is not proved: {why}."
            )
        mixed = _mixed(parts, layer, reading.values, reading.norm_in, causal)
        constant = _constant(layer, reading.values, mixed)
        line = _Line.of(reading.feedforward, layer.after_attention.to(parts))
        for first, last, inputs in _pieces(n, causal):
            piece = _attention(parts[first:last, :inputs], layer, mixed[:, first:last, :inputs], constant[first:last])
            _check(layer, piece, layer.after_attention[first:last], "state after attention")
            piece = _feedforward(piece, reading.feedforward, line, slice(first, last))
            _check(layer, piece, layer.block_output[first:last], "state after the block")
            parts[first:last, :inputs] = piece
        lengths = parts.norm(dim=-1)
        rows.append(lengths / lengths.sum(-1, keepdim=True))
    provenance = trace.provenance.by("decompx", attention=stack.name, origin=EMBEDDINGS, biases="absdot")
    return Contributions.of_stack(stack, check_rows(torch.stack(rows), "decompx"), provenance)


def _pieces(n: int, causal: bool) -> Iterator[tuple[int, int, int]]:
    """(first, last, inputs): some positions at a time, and how many inputs their vectors can come from."""
    step = max(1, _ROWS // n)
    for first in range(0, n, step):
        last = min(first + step, n)
        yield first, last, last if causal else n


def share_bias_(parts: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias (d) or (hidden, d) to vectors (hidden, input, d), shared out by |vector · bias|; in place."""
    if bias is None:
        return parts
    bias = bias.to(parts)
    dots = parts @ bias if bias.dim() == 1 else torch.bmm(parts, bias[..., None])[..., 0]
    bias = bias.expand(parts.shape[0], parts.shape[2])[:, None]
    return parts.baddbmm_(_shares(dots, lambda: parts)[..., None], bias)


def _shares(dots: Tensor, vectors: Callable[[], Tensor]) -> Tensor:
    """(hidden, input): how a bias is shared out, from the vectors' dot products with it."""
    shares = dots.abs_()
    total = shares.sum(-1, keepdim=True)
    if not bool((total > 0).all()):  # nothing points along the bias: it is shared out by the vectors' lengths
        shares = torch.where(total > 0, shares, vectors().norm(dim=-1))
        total = shares.sum(-1, keepdim=True).clamp(min=torch.finfo(shares.dtype).tiny)
    return shares / total


def _norm(norm: Norm | None, parts: Tensor) -> Tensor:
    """Through a norm, with the scale of the whole state."""
    if norm is None:
        return parts
    scale = norm.scale(parts.sum(1))[:, None]
    return share_bias_(norm.linear(parts) / scale, norm.bias)


def _mixed(parts: Tensor, layer: Layer, values: LinearMap, norm_in: Norm | None, causal: bool) -> Tensor:
    """(head, hidden, input, d_v): every head's mixture of what it reads from the vectors, value biases left out."""
    n, attention = len(parts), layer.attention.to(parts)
    size = layer.projection.weight.shape[1]
    weight = values.weight.to(parts)
    groups = weight.shape[1] // size
    read = parts.new_zeros(groups, n, n, size)  # (key-value head, key, input, d_v)
    for first, last, inputs in _pieces(n, causal):
        made = _norm(norm_in, parts[first:last, :inputs]).flatten(0, 1) @ weight
        read[:, first:last, :inputs] = made.view(last - first, inputs, groups, size).movedim(2, 0)
    return torch.bmm(attention.reshape(groups, -1, n), read.view(groups, n, n * size)).view(-1, n, n, size)


def _constant(layer: Layer, values: LinearMap, mixed: Tensor) -> Tensor:
    """(hidden, d): what the biases add whatever is attended to, b_V W_O + b_O."""
    projection = layer.projection
    weight = projection.weight.to(mixed)  # (head, d_v, d)
    constant = mixed.new_zeros(mixed.shape[1], weight.shape[2])
    if values.bias is not None:  # rows sum to 1, or to less where there is a sink
        groups = values.bias.numel() // weight.shape[1]
        bias = values.bias.to(mixed).view(groups, 1, -1).repeat_interleave(len(weight) // groups, 0)
        constant += layer.attention.to(mixed).sum(-1).T @ (bias @ weight)[:, 0]
    return constant if projection.bias is None else constant + projection.bias.to(constant)


def _attention(parts: Tensor, layer: Layer, mixed: Tensor, constant: Tensor) -> Tensor:
    """Some positions through attention, its residual and the norm after it.

    The constant is shared out over attention plus residual vectors; where the branch has a norm of its own, which reads
    it, over the attention vectors.
    """
    projected = mixed.movedim(0, -2).flatten(-2) @ layer.projection.weight.to(parts).flatten(0, 1)
    wiring = layer.equation("attention branch")
    if wiring.branch_norm is not None:
        return wiring.rebuild(parts, share_bias_(projected, constant), normed=_norm)
    total = wiring.carried(parts) + wiring.branch(projected)
    return wiring.finish(share_bias_(total, wiring.branch(constant)), normed=_norm)


@dataclass(frozen=True)
class _Line:
    """A feed-forward layer at the states that it read, as what it does to vectors: v → (v W₁ ⊙ θ) W₂, and its biases."""

    inward: Tensor  # (d, 4d)
    factors: Tensor  # (hidden, 4d): θ, or the activated factor of a gated layer
    outward: Tensor  # (4d, d)
    toward_bias: Tensor | None  # (d,): W₁ b₁, so that v W₁ · b₁ needs no vector of width 4d
    bias: Tensor | None  # (hidden, d): (b₁ ⊙ θ) W₂, what becomes of the whole first bias
    hidden: list[Tensor]  # memory for the vectors of width 4d of one piece

    @classmethod
    def of(cls, rest: FeedForward, state: Tensor) -> _Line:
        read = rest.read(state)
        before = rest.first(read)
        factors = rest.activation(before)
        factors = slope(factors, before) if rest.gate is None else factors
        linear = rest.first if rest.gate is None else rest.gate
        inward, outward = linear.weight.to(state), rest.second.weight.to(state)
        if linear.bias is None:
            return cls(inward, factors, outward, None, None, [])
        bias = linear.bias.to(state)
        return cls(inward, factors, outward, inward @ bias, (bias * factors) @ outward, [])

    def through(self, read: Tensor, at: slice) -> Tensor:
        """Vectors (position, input, d) of the positions `at`."""
        rows = read.reshape(-1, read.shape[-1])
        if not self.hidden or self.hidden[0].shape[0] < len(rows):
            self.hidden[:] = [rows.new_empty(len(rows), self.inward.shape[1])]
        hidden = torch.mm(rows, self.inward, out=self.hidden[0][: len(rows)])
        hidden.view(*read.shape[:2], -1).mul_(self.factors[at, None])
        vectors = (hidden @ self.outward).view_as(read)
        if self.bias is None or self.toward_bias is None:
            return vectors
        shares = _shares(read @ self.toward_bias, lambda: read @ self.inward)
        return vectors.baddbmm_(shares[..., None], self.bias[at, None])


def _feedforward(parts: Tensor, rest: FeedForward, line: _Line, at: slice) -> Tensor:
    """The positions `at` through the feed-forward layer, its residual and the norm after it."""
    vectors = line.through(_norm(rest.norm_in, parts), at)
    return rest.wiring.rebuild(parts, share_bias_(vectors, rest.second.bias), normed=_norm)


def slope(active: Tensor, before: Tensor) -> Tensor:
    """θ = act(u)/u; 0 where u is 0 and nothing is carried."""
    return torch.where(before == 0, 0.0, active / torch.where(before == 0, 1.0, before))


def _check(layer: Layer, parts: Tensor, state: Tensor, name: str) -> None:
    error = deviation(parts.sum(1), state)
    tolerance = state_agreement(state.dtype)
    if error > tolerance:
        raise WiringError(
            f"layer {layer.index}: the vectors add up to the {name} only to {error:.1e} ({tolerance:.0e} allowed)."
        )
