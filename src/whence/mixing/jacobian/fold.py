"""Forward mode with everything position-wise folded into matrices: how a direction travels through one block.

A block is o_j = Φ_j(r_j, z_j), with z the head outputs, and z_j = attention(q_j(r_j), {k_m(r_m), v_m(r_m)}). Only the
attention joins positions; all the rest is one matrix per position (row vectors, so that δo = δr · matrix):

    δo_j = δr_j F_j + δz_j P_j,       P_j = ∂o_j/∂z_j,     F_j = ∂o_j/∂r_j|_z + ∂q_j/∂r_j · Cov_j · P_j
    δz_j = Σ_m A_jm ( δv_m + s f′ (v_m − z_j) (q_j · δk_m) ),   Cov_j = s Σ_m A_jm f′ k_m (v_m − z_j)ᵀ

(the query's own part of δz is inside F; s and f′: `whence.mixing.jacobian.scores`). Where the block's parts were read
(`whence.reading.wiring.block_tail`) the matrices are written down; elsewhere they are taken from the model itself by forward
mode, all positions and layers at once, with every block reading its own recorded input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.mixing.jacobian.forward_mode import Runner
from whence.mixing.jacobian.scores import Scores
from whence.reading.trace import Layer
from whence.reading.wiring.block_tail import BlockReading
from whence.reading.wiring.feedforward import FeedForward
from whence.reading.wiring.norms import Norm


@dataclass(frozen=True)
class Fold:
    """One block at one text. Rows are positions: d_residual (n, d, d), d_heads (n, head·d_v, d)."""

    d_residual: Tensor
    d_heads: Tensor
    keys: Tensor  # (d, kv head · d_k), or (n, d, kv head · d_k) where it depends on the position
    values: Tensor  # (d, kv head · d_v), likewise
    norm_in: Norm | None  # keys and values read the input through this norm
    block_input: Tensor  # (n, d)
    attention: Tensor  # (head, n, n)
    softmax_slope: Tensor  # (head, n, n): A ⊙ f′
    queries: Tensor  # (head, n, d_k), the scale in them
    heads: Tensor  # values, (head, n, d_v)
    outputs: Tensor  # (head, n, d_v)
    query: Tensor  # (n, d, head · d_v): ∂q_j/∂r_j · Cov_j, the query's own part of δz
    pairs: Tensor | None = None  # (head, n, n, d_k): what δk_m meets in row j, where that is not the query alone

    def read(self, tangent: Tensor, at: Tensor | slice = slice(None)) -> tuple[Tensor, Tensor]:
        """(position, c, d) → δk, δv of these positions, each (position, c, head, …)."""
        if self.norm_in is not None:
            tangent = self.norm_in.tangent(self.block_input[at], tangent)
        count = self.heads.shape[0]
        parts = []
        for matrix in (self.keys, self.values):
            out = tangent @ (matrix if matrix.dim() == 2 else matrix[at])
            groups = out.shape[-1] // (self.queries if matrix is self.keys else self.heads).shape[-1]
            out = out.unflatten(-1, (groups, -1))
            parts.append(out if groups == count else out.repeat_interleave(count // groups, dim=-2))
        return parts[0], parts[1]

    def start(self, tangent: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """Directions (c, d) at one token each → (δo (n, c, d), δz (n, c, head, d_v) without the query's own part).

        The first layer: each direction touches one token only, so there is no sum over keys.
        """
        if self.norm_in is None and self.keys.dim() == 2:
            key, value = (x[0] for x in self.read(tangent[None], slice(0, 1)))
        else:
            key, value = (x[:, 0] for x in self.read(tangent[:, None], source))
        weights = self.attention[:, :, source]  # (head, n, c)
        if self.pairs is None:
            scores = torch.einsum("hid,chd->hic", self.queries, key)
        else:
            scores = torch.einsum("hicd,chd->hic", self.pairs[:, :, source], key)
        scores = scores * self.softmax_slope[:, :, source]
        mixed = weights[..., None] * value.transpose(0, 1)[:, None]  # (head, n, c, d_v)
        mixed = mixed + scores[..., None] * (self.heads[:, source][:, None] - self.outputs[:, :, None])
        mixed = mixed.permute(1, 2, 0, 3)  # (n, c, head, d_v)
        out = torch.bmm(mixed.flatten(2), self.d_heads)
        for token in source.unique().tolist():
            at = (source == token).nonzero()[:, 0]
            out[token, at] += tangent[at] @ self.d_residual[token]
        return out, mixed

    def __call__(self, tangent: Tensor) -> tuple[Tensor, Tensor]:
        """(n, c, d) → (δo (n, c, d), δz (n, c, head, d_v) without the query's own part)."""
        n, columns, _ = tangent.shape
        key, value = self.read(tangent)
        count, size = self.heads.shape[0], self.heads.shape[2]
        if self.pairs is None:
            flat_key = key.permute(2, 3, 0, 1).reshape(count, -1, n * columns)
            weights = torch.bmm(self.queries, flat_key).view(count, n, n, columns)
        else:
            # One product per key, written where row and key are the outer axes.
            met = torch.matmul(self.pairs.transpose(1, 2), key.permute(2, 0, 3, 1))  # (head, key, query, c)
            weights = met.transpose(1, 2).contiguous()
        weights.mul_(self.softmax_slope[..., None])
        # One product gives Σ_m w_m v_m and Σ_m w_m: the values with a row of ones below them.
        lifted = torch.cat([self.heads, self.heads.new_ones(count, n, 1)], dim=-1).transpose(1, 2)
        moved = torch.matmul(lifted[:, None], weights)  # (head, n, d_v + 1, c)
        moved = moved[:, :, :-1] - self.outputs[..., None] * moved[:, :, -1:]
        flat_value = value.permute(2, 0, 1, 3).reshape(count, n, columns * size)
        mixed = torch.bmm(self.attention, flat_value).view(count, n, columns, size) + moved.transpose(2, 3)
        mixed = mixed.permute(1, 2, 0, 3)
        return torch.baddbmm(torch.bmm(tangent, self.d_residual), mixed.flatten(2), self.d_heads), mixed

    def query_part(self, tangent: Tensor) -> Tensor:
        """(n, c, d) → (n, c, head, d_v): the query's own part of δz, which `d_residual` already holds for δo."""
        moved: Tensor = torch.bmm(tangent, self.query).unflatten(-1, (self.heads.shape[0], -1))
        return moved

    @property
    def bytes(self) -> int:
        return sum(
            t.numel() * t.element_size()
            for t in (self.d_residual, self.d_heads, self.keys, self.values, self.query, self.pairs)
            if t is not None
        )


# -- from the block's parts ----------------------------------------------------------------------------------------


def fold_read(layer: Layer, reading: BlockReading, scores: Scores) -> Fold:
    """The matrices of a block whose every part was read and proved, a few positions at a time."""
    assert reading.feedforward is not None
    assert reading.maps is not None
    r, weight = layer.block_input, layer.projection.weight.to(layer.block_input).flatten(0, 1)  # (head · d_v, d)
    n, width = r.shape
    projected, total = layer.projected, layer.before_norm
    wiring = layer.equation("attention branch")
    state = wiring.finish(total)
    query_map, key_map, value_map = (m.weight.to(r) for m in reading.maps)
    covariance = _covariance(layer, scores)  # (n, head, d_k, d_v)
    d_residual, d_heads = r.new_empty(n, width, width), r.new_empty(n, len(weight), width)
    query = r.new_empty(n, width, len(weight))
    per_head = query_map.unflatten(-1, (covariance.shape[1], -1)).transpose(0, 1).contiguous()  # (head, d, d_k)
    for first in range(0, n, _TOGETHER):
        at = slice(first, min(first + _TOGETHER, n))
        # Everything after the sum of residual and attention.
        base = wiring.norm_jacobian_times(total[at], _tail(reading.feedforward, state[at]))
        onward = wiring.branch_tangent(projected[at], weight.expand(at.stop - first, *weight.shape))
        torch.bmm(onward, base, out=d_heads[at])
        query_part = torch.matmul(per_head, covariance[at]).transpose(1, 2).flatten(2)  # (many, d, head · d_v)
        if reading.norm_in is not None:
            query_part = reading.norm_in.jacobian_times(r[at], query_part)
        query[at] = query_part
        torch.baddbmm(wiring.carried_jacobian_times(base), query_part, d_heads[at], out=d_residual[at])
    queries = layer.queries * scores.scale
    return Fold(
        d_residual,
        d_heads,
        key_map,
        value_map,
        reading.norm_in,
        r,
        layer.attention,
        scores.softmax_slope,
        queries,
        layer.values,
        layer.outputs,
        query,
        scores.by_key,
    )


_TOGETHER = 4  # positions worked on together: their matrices stay in the processor's cache


def _tail(rest: FeedForward, state: Tensor) -> Tensor:
    """(n, d, d): the derivative of the feed-forward part of the block at each position."""
    width = state.shape[1]
    read = rest.read(state)
    before = rest.first(read)
    slope = _slope(rest.activation, before)  # (n, m)
    into, second = rest.first.weight.to(state), rest.second.weight.to(state)
    if rest.gate is not None:
        slope = slope * rest.gate(read)
    # Directions are unit vectors, so that the first product is the matrix itself.
    hidden = into * slope[:, None]
    if rest.gate is not None:
        hidden = hidden + rest.gate.weight.to(state) * rest.activation(before)[:, None]
    made = hidden @ second
    if rest.norm_in is not None:
        made = rest.norm_in.jacobian_times(state, made)
    wiring = rest.wiring
    branch = made if wiring.branch_norm is None else rest.second(rest.hidden(read))
    total = wiring.branch_tangent(branch, made) + wiring.carried(torch.eye(width).to(state))
    return wiring.norm_tangent(rest.before_norm(state), total)


def _slope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The derivative of an element-wise function."""
    with torch.enable_grad():
        at = x.detach().requires_grad_()
        return torch.autograd.grad(function(at).sum(), at)[0]


# -- from the model itself -----------------------------------------------------------------------------------------


def _covariance(layer: Layer, scores: Scores) -> Tensor:
    """(n, head, d_k, d_v): s Σ_m A_jm f′ k_m (v_m − z_j)ᵀ, with κ_jm for k_m where the scores are of pairs."""
    attention, v, z = (t.to(layer.block_input) for t in (scores.softmax_slope, layer.values, layer.outputs))
    k = (layer.keys if scores.by_query is None else scores.by_query).to(layer.block_input)
    seen = v.new_empty(attention.shape[1], attention.shape[0], k.shape[-1], v.shape[2])
    for head in range(attention.shape[0]):
        seen[:, head] = torch.matmul(k[head].transpose(-1, -2), attention[head][:, :, None] * v[head])
    if scores.by_query is None:
        mean_key = torch.bmm(attention, k).transpose(0, 1)
    else:
        mean_key = torch.matmul(attention[:, :, None], k)[:, :, 0].transpose(0, 1)
    return scores.scale * (seen - mean_key[..., None] * z.transpose(0, 1)[:, :, None])


@dataclass(frozen=True)
class BlockJacobians:
    """One block by itself: ∂o/∂r with the head outputs held, ∂o/∂z, and how its queries, keys and values move with r.

    d_residual (n, d, d), d_heads (n, head·d_v, d), maps (n, d, head · size) each.
    """

    d_residual: Tensor
    d_heads: Tensor
    maps: tuple[Tensor, Tensor, Tensor]

    def fold(self, layer: Layer, scores: Scores) -> Fold:
        """Joined with how the scores react."""
        dtype, count = layer.block_input.dtype, layer.outputs.shape[0]
        query_part, key, value = self.maps
        per_head = query_part.unflatten(-1, (count, -1)).transpose(1, 2)  # (n, head, d, d_k)
        query = torch.matmul(per_head, _covariance(layer, scores)).transpose(1, 2).flatten(2)
        folded = torch.baddbmm(self.d_residual, query, self.d_heads)
        attention, softmax_slope, queries, heads, outputs = (
            t.to(dtype)
            for t in (layer.attention, scores.softmax_slope, layer.queries * scores.scale, layer.values, layer.outputs)
        )
        return Fold(
            folded, self.d_heads, key, value, None, layer.block_input, attention, softmax_slope, queries, heads, outputs,
            query, scores.by_key,
        )  # fmt: skip


def block_jacobians(runner: Runner, chunk: int = 64) -> list[BlockJacobians]:
    """Every block from the model's own forward mode: one direction at all positions at once."""
    layers = runner.layers
    n, width = layers[0].block_input.shape
    dtype = layers[0].block_input.dtype
    eye = torch.eye(width, dtype=dtype)
    d_residual: list[list[Tensor]] = [[] for _ in layers]
    maps: list[list[list[Tensor]]] = [[[], [], []] for _ in layers]
    for first in range(0, width, chunk):
        states, parts = runner.block_directions(eye[first : first + chunk, None].expand(-1, n, -1))
        for i in range(len(layers)):
            d_residual[i].append(states[i].transpose(0, 1))
            for j, part in enumerate(parts[i]):
                # Some models work on queries and keys in float32 whatever their dtype.
                maps[i][j].append(part.permute(2, 0, 1, 3).flatten(2).to(dtype))  # (n, c, head · d)
    count, size = layers[0].outputs.shape[0], layers[0].outputs.shape[2]
    unit = torch.eye(count * size, dtype=dtype).view(count * size, count, 1, size)
    d_heads: list[list[Tensor]] = [[] for _ in layers]
    for first in range(0, count * size, chunk):
        for i, state in enumerate(runner.d_heads(unit[first : first + chunk].expand(-1, -1, n, -1))):
            d_heads[i].append(state.transpose(0, 1))
    blocks = []
    for block, moved, out in zip(d_residual, maps, d_heads, strict=True):
        query_part, key, value = (torch.cat(m, dim=1) for m in moved)
        blocks.append(BlockJacobians(torch.cat(block, 1), torch.cat(out, 1), (query_part, key, value)))
    return blocks


__all__ = ["BlockJacobians", "Fold", "block_jacobians", "fold_read"]
