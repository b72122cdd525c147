"""ALTI: how much closer to a state does each token's part bring it?

Ferrando, Gállego & Costa-jussà, "Measuring the Mixing of Contextual Information in the Transformer" (EMNLP 2022):

    c_ij = max(0, ‖y_i‖₁ − ‖y_i − T_ij‖₁),     C_ij = c_ij / Σ_k c_ik

With several key stacks, ALTI+ (Ferrando et al., EMNLP 2022, "Towards Opening the Black Box of Neural Machine
Translation"): see `whence.mixing.encoder_decoder`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whence.mixing.decomposition import Decomposition

_BLOCK = 1 << 18  # numbers worked on at a time: 1 MB in float32, so that they stay in the processor's cache


def closeness(split: Decomposition, distance: str = "l1") -> Tensor:
    """(query, source): ‖y_i‖ − ‖y_i − T_ij‖, before clipping. Never holds more than a block of the (n, n, d) tensor.

    For L1 the identity |y − t| = 2 max(y, t) − y − t leaves one pass over the block, and its last two terms are
    linear, so that they cost nothing.
    """
    weights, sources = split.weights_by_key, split.sources_by_key
    state, width = split.state, split.state.shape[1]
    # max(s t, y) = s max(t, y / s) for s > 0: the norm's scale is applied to the sums, not to every part.
    scaled = state if split.scale is None else state / split.scale
    n_key, n_query, _ = weights.shape
    out = state.new_zeros(n_key, n_query)
    rows = min(n_query, 128)
    keys = max(1, min(n_key, _BLOCK // (rows * width)))
    buffer = state.new_empty(keys * rows * width)
    for first in range(0, n_query, rows):
        y = scaled[first : first + rows]
        last = first + y.shape[0]
        # Under a causal mask no query of this block sees a key past its last one.
        for key in range(0, min(last, n_key) if split.causal else n_key, keys):
            w, u = weights[key : key + keys, first:last], sources[key : key + keys]
            part = buffer[: w.shape[0] * w.shape[1] * width].view(w.shape[0], w.shape[1], width)
            torch.bmm(w, u, out=part)
            if distance == "l1":
                torch.maximum(part, y, out=part)
                torch.sum(part, dim=-1, out=out[key : key + keys, first:last])
            else:
                torch.sum(part.sub_(y).square_(), dim=-1, out=out[key : key + keys, first:last])
    if distance == "l1":
        linear = torch.bmm(weights, sources.sum(-1, keepdim=True))[..., 0]  # (key, query): Σ_d T
        closer = (scaled.abs() + scaled).sum(-1) + linear - 2 * out
    else:
        closer = scaled.norm(dim=-1) - out.sqrt_()
    if split.scale is not None:
        closer = closer * split.scale[:, 0]
    closer = closer.T.contiguous()
    if split.causal:
        closer = closer.tril_()  # what is not seen contributes exactly nothing
    own = _lengths(state, distance) - _lengths(state - split.diagonal(), distance)
    if split.crossed:
        return torch.cat([closer, own[:, None]], dim=1)
    closer.diagonal().copy_(own)
    return closer


def _lengths(x: Tensor, distance: str) -> Tensor:
    return x.abs().sum(-1) if distance == "l1" else x.norm(dim=-1)


def alti(split: Decomposition, distance: str = "l1") -> tuple[Tensor, int]:
    """C, (query, source), rows summing to 1, and how many rows were degenerate.

    A row whose closeness is nowhere positive says nothing about its origin: it is given to the token itself.
    """
    return normalise_rows(closeness(split, distance).clamp_(min=0), crossed=split.crossed)


def normalise_rows(scores: Tensor, *, crossed: bool = False) -> tuple[Tensor, int]:
    """Rows divided by their sums, and how many were all zero: those become their own token (crossed: the last column)."""
    total = scores.sum(-1, keepdim=True)
    empty = (total[:, 0] <= 0).nonzero()[:, 0]
    rows = scores / total.masked_fill(total <= 0, 1.0)
    if len(empty):
        rows[empty] = 0
        rows[empty, torch.full_like(empty, scores.shape[1] - 1) if crossed else empty] = 1
    return rows, len(empty)
