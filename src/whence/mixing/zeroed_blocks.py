"""A block's output without one token's value, for every token in turn, from the block's proved parts.

    s_i(j) = norm(x_i − c_ij),  c_ij = Σ_h A^h_ij V^h_j W^h,    o_i(j) = feed-forward(s_i(j))

x_i is the sum of residual and attention, c_ij what token j adds to it. The feed-forward layer reads a norm of x_i − c_ij
(the one after the add, or its own), and its first map needs no product of n² rows with a (d, 4d) matrix, since c_ij is
made of as many vectors as there are heads:

    n(x_i − c_ij) W₁ = (L(x_i) W₁ − Σ_h A^h_ij (L(V^h_j W^h) W₁)) / σ_ij + constant

with L the norm's linear part and σ_ij its scale. What is left is the activation and the second map.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from whence.reading.layer import Layer
from whence.reading.wiring.feedforward import FeedForward

_ROWS = 256  # rows of the feed-forward layer at once: enough for its products, and they stay in the cache


def written_down(layer: Layer, rest: FeedForward | None) -> bool:
    """Whether `zeroed_outputs` follows this block: one norm, or none, between the sum and the feed-forward layer."""
    wiring, projection = layer.wiring, layer._projection
    if rest is None or wiring is None or projection is None or projection.rows is not None:
        return False
    return not wiring.parallel and wiring.branch_norm is None and (wiring.norm is None or rest.norm_in is None)


def zeroed_outputs(layer: Layer, rest: FeedForward, memory: int) -> Iterator[tuple[int, int, int, Tensor]]:
    """(first key, last key, first row, outputs (key, row, d)): under a causal mask rows before the first key are left out."""
    wiring = layer.equation("attention branch")
    total = layer.before_norm  # (query, d)
    attention, values = layer.attention.to(total), layer.values.to(total)
    weight = wiring.branch(layer.projection.weight.to(total))  # (head, d_v, d)
    norm = rest.norm_in if wiring.norm is None else wiring.norm
    maps = [rest.first] if rest.gate is None else [rest.first, rest.gate]
    inward = torch.cat([m.weight.to(total) for m in maps], dim=1)  # (d, 4d), and as much again for a gate
    constant = torch.cat([total.new_zeros(m.weight.shape[1]) if m.bias is None else m.bias.to(total) for m in maps])
    linear = (lambda x: x) if norm is None else norm.linear
    if norm is not None and norm.bias is not None:
        constant = constant + norm.bias.to(total) @ inward
    plain = linear(total) @ inward  # (query, 4d)
    n, width = total.shape
    each = total.element_size() * n * (4 * inward.shape[1] + 6 * width)
    step = max(1, min(_ROWS // n, memory // each))
    for first in range(0, n, step):
        last, row = min(first + step, n), first if layer.causal else 0
        removed = torch.bmm(values[:, first:last], weight).transpose(0, 1).contiguous()  # (key, head, d)
        weights = attention[:, row:, first:last].permute(2, 1, 0).contiguous()  # (key, row, head)
        x = total[row:] - torch.bmm(weights, removed)
        inner = plain[row:].expand(last - first, -1, -1)
        inner = torch.baddbmm(inner, weights, linear(removed) @ inward, alpha=-1)
        state = x
        if norm is not None:
            normed, factor = norm.with_factor(x)
            inner *= factor
            state = x if wiring.norm is None else normed
        inner += constant
        if rest.gate is None:
            hidden = rest.activation(inner)
        else:
            active, gate = inner.chunk(2, dim=-1)
            hidden = rest.activation(active) * gate
        yield first, last, row, rest.wiring.rebuild(state, rest.second(hidden))
