"""Rows of attention, made again from queries and keys where the model's fused attention never showed them.

    a_i = softmax( f(s · q_i Kᵀ) + B_i ) · (1 − sink_i)

f is the identity or a soft cap c · tanh(x / c), B the mask and whatever bias the model adds, sink_i the weight of a learned sink.
That this is how the model makes its weights is proved once per model (`keys` in `whence.reading.wiring.sites`); every block of
rows that is made is checked against the head outputs that the model itself computed: A (V r) = z r for a random r.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from whence.core.numerics.tolerances import HEAD_OUTPUT, state_agreement
from whence.reading.capture.recorder import mix

BLOCK = 1 << 22
"""Weights made at a time: 16 MB in float32."""


def rows_at_a_time(heads: int, keys: int, block: int = BLOCK) -> int:
    """How many rows of all heads go into a block."""
    return max(1, block // max(1, heads * keys))


def attention_rows(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    cap: float | None = None,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """(batch, head, row, key): the weights of these rows, in float32 or float64; a row that sees nothing is zero.

    query (batch, head, row, d_k), key (batch, kv head, key, d_k); visible, bias broadcast to the result, sink to
    (batch, head, row).

    >>> query, key = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 2, 4)
    >>> attention_rows(query, key, scale=0.5).flatten().tolist()
    [0.5, 0.5]
    """
    kind = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = mix(query.to(kind), key.to(kind).transpose(-1, -2)).mul_(scale)
    if cap is not None:
        scores = scores.div_(cap).tanh_().mul_(cap)
    if bias is not None:
        scores += bias.to(kind)
    if visible is not None:
        scores.masked_fill_(~visible, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    if visible is not None:
        blind = ~visible.any(-1, keepdim=True)
        if bool(blind.any()):
            weights.masked_fill_(blind, 0.0)
    return weights if sink is None else weights.mul_(1 - sink.to(kind)[..., None])


def output_error(weights: Tensor, value: Tensor, output: Tensor) -> float:
    """How far weights · values is from the head outputs along a random direction, relative to each head's largest value.

    weights (batch, head, row, key), value (batch, kv head, key, d_v), output (batch, head, row, d_v).
    """
    direction = unit(value.shape[-1], weights.dtype, weights.device)
    along = along_direction(value.to(weights.dtype), direction)[..., None]  # (batch, kv head, key, 1)
    made, theirs = mix(weights, along)[..., 0], along_direction(output.to(weights.dtype), direction)
    size = along.abs().amax((-1, -2))[..., None]
    if weights.shape[1] != value.shape[1]:
        size = size.repeat_interleave(weights.shape[1] // value.shape[1], dim=1)
    apart = (made - theirs).abs_() / torch.where(size > 0, size, 1.0)
    seen = weights.amax(-1) > 0  # a row that sees nothing has an output that means nothing
    found = torch.where(seen, apart, 0.0).amax()
    return float(found)


def tolerance_of(dtype: torch.dtype) -> float:
    """How far off a block may be in this dtype."""
    return HEAD_OUTPUT if dtype in (torch.float32, torch.float64) else state_agreement(dtype)


def along_direction(vectors: Tensor, direction: Tensor) -> Tensor:
    """(…, d) · (d,) → (…): heads lie side by side in memory, and torch would copy them first for a product of matrices."""
    return (vectors * direction).sum(-1)


@lru_cache(maxsize=64)
def unit(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A random unit vector, the same for every text."""
    direction = torch.randn(width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    normed: Tensor = direction / direction.norm()
    return normed.to(device, dtype)
