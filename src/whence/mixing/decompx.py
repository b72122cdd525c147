"""DecompX: every state as a sum of one vector per input token, carried through all layers.

Modarressi et al., "DecompX: Explaining Transformers Decisions by Propagating Token Decomposition" (ACL 2023). Linear
parts act on every vector; a norm divides by the scale that the model itself used; the activation is the line through
the origin, act(u) = θ ⊙ u with θ = act(u)/u; a bias is shared out by the absolute dot product of each vector with it;
as in the authors' code, what attention's biases add, b_V W_O + b_O, over attention plus residual vectors.
A gated feed-forward layer keeps its activated factor as it is, and the vectors go through the other one (the paper has
only plain ones). The vectors add up to the model's own state in every layer, which is asserted.
"""

from __future__ import annotations

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
    parts = torch.zeros(n, n, width, dtype=dtype)  # (hidden, input, d)
    torch.diagonal(parts, dim1=0, dim2=1).copy_(stack.layers[0].block_input.T)
    rows = []
    for layer in stack:
        reading = readings[proof.site(stack.name, layer.index).number]
        if reading.values is None or reading.feedforward is None:
            why = reading.maps_reason if reading.values is None else reading.reason
            raise WiringError(
                f"layer {layer.index}: decompx needs every part of the block, and one is not proved: {why}."
            )
        parts = _attention(parts, layer, reading.values, reading.norm_in)
        _check(layer, parts, layer.after_attention, "state after attention")
        parts = _feedforward(parts, reading.feedforward)
        _check(layer, parts, layer.block_output, "state after the block")
        lengths = parts.norm(dim=-1)
        rows.append(lengths / lengths.sum(-1, keepdim=True))
    provenance = trace.provenance.by("decompx", attention=stack.name, origin=EMBEDDINGS, biases="absdot")
    return Contributions.of_stack(stack, check_rows(torch.stack(rows), "decompx"), provenance)


def share_bias(parts: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias (d) or (hidden, d) to vectors (hidden, input, d), shared out by |vector · bias|."""
    if bias is None:
        return parts
    bias = bias.to(parts).expand(parts.shape[0], parts.shape[2])
    weights = torch.einsum("iud,id->iu", parts, bias).abs()
    total = weights.sum(-1, keepdim=True)
    # Nothing points along the bias: it is shared out by the vectors' lengths.
    weights = torch.where(total > 0, weights, parts.norm(dim=-1))
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(parts.dtype).tiny)
    return parts + weights[..., None] * bias[:, None]


def _norm(norm: Norm | None, parts: Tensor) -> Tensor:
    """Through a norm, with the scale of the whole state."""
    if norm is None:
        return parts
    scale = norm.scale(parts.sum(1))[:, None]
    return share_bias(norm.linear(parts) / scale, norm.bias)


def _attention(parts: Tensor, layer: Layer, values: LinearMap, norm_in: Norm | None) -> Tensor:
    """Through attention, its residual and the norm after it.

    What the biases add whatever is attended to, b_V W_O + b_O, is shared out over attention plus residual vectors; where
    the branch has a norm of its own, which reads it, over the attention vectors.
    """
    attention = layer.attention.to(parts)
    projection = layer.projection
    heads, size = attention.shape[0], projection.weight.shape[1]
    read = _norm(norm_in, parts) @ values.weight.to(parts)  # (key, input, kv head · d_v)
    groups = read.shape[-1] // size
    mixed = torch.zeros_like(parts)
    constant = parts.new_zeros(parts.shape[0], parts.shape[2])
    for head in range(heads):
        group = head // (heads // groups)
        at, weight = slice(group * size, (group + 1) * size), projection.weight[head].to(parts)
        mixed += torch.tensordot(attention[head], read[..., at] @ weight, dims=1)
        if values.bias is not None:  # rows sum to 1, or to less where there is a sink
            constant += attention[head].sum(-1, keepdim=True) * (values.bias.to(parts)[at] @ weight)
    constant = constant if projection.bias is None else constant + projection.bias.to(parts)
    wiring = layer.equation("attention branch")
    if wiring.branch_norm is not None:
        return wiring.rebuild(parts, share_bias(mixed, constant), normed=_norm)
    total = wiring.carried(parts) + wiring.branch(mixed)
    return wiring.finish(share_bias(total, wiring.branch(constant)), normed=_norm)


def _feedforward(parts: Tensor, rest: FeedForward) -> Tensor:
    """Position by position: only one position's hidden vectors exist at a time."""
    read = _norm(rest.norm_in, parts)
    whole = read.sum(1)
    before = rest.first(whole)
    active = rest.activation(before)
    made = torch.empty_like(parts)
    for i in range(parts.shape[0]):
        linear = rest.first if rest.gate is None else rest.gate
        inner = share_bias(read[i : i + 1] @ linear.weight.to(parts), linear.bias)
        inner *= slope(active[i], before[i]) if rest.gate is None else active[i]
        made[i] = share_bias(inner @ rest.second.weight.to(parts), rest.second.bias)[0]
    return rest.wiring.rebuild(parts, made, normed=_norm)


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
