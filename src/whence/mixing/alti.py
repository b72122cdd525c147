"""ALTI: how much closer to a state does each token's part bring it?

Ferrando, Gállego & Costa-jussà, "Measuring the Mixing of Contextual Information in the Transformer" (EMNLP 2022):

    c_ij = max(0, ‖y_i‖₁ − ‖y_i − T_ij‖₁),     C_ij = c_ij / Σ_k c_ik

With several key stacks, ALTI+ (Ferrando et al., EMNLP 2022, "Towards Opening the Black Box of Neural Machine
Translation"): see `whence.mixing.encoder_decoder`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from whence.errors import InputError
from whence.mixing.decomposition import Decomposition
from whence.mixing.layerwise import LayerView
from whence.mixing.mixture import normalise_rows

_BLOCK = 1 << 18  # numbers worked on at a time: 1 MB in float32, so that they stay in the processor's cache
_ROWS = 128
_KEYS = 60  # keys whose sources are made together


@dataclass(frozen=True)
class Alti:
    """C_ij ∝ max(0, ‖y_i‖ − ‖y_i − T_ij‖); for encoder–decoders ALTI+.

    distance: "l1" (the paper's) or "l2". second_norm: compare after the block's second norm, with L₂(T_ij)/σ₂ against
    the block's own output (the feed-forward part belongs to no token).
    """

    distance: str = "l1"
    second_norm: bool = False
    model: Any = None
    batched: ClassVar[bool] = True
    by_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.distance not in ("l1", "l2"):
            raise InputError(f"distance={self.distance!r} is not 'l1' or 'l2'.")

    @property
    def joint(self) -> bool:
        """The second norm comes after the feed-forward layer, which cross-attention is not next to."""
        return not self.second_norm

    def matrix(self, layer: LayerView) -> tuple[Tensor, Tensor]:
        """(query, source), rows summing to 1, and which rows are degenerate."""
        return alti(layer.after_second_norm(self.model) if self.second_norm else layer.decomposition, self.distance)


def alti(decomposition: Decomposition, distance: str = "l1") -> tuple[Tensor, Tensor]:
    """C, (query, source), rows summing to 1, and which rows were degenerate, (query).

    A row whose closeness is nowhere positive says nothing about its origin: it is given to the token itself.
    """
    scores = closeness(decomposition, distance).clamp_(min=0)
    return normalise_rows(scores, crossed=decomposition.crossed, first_row=decomposition.first_row)


def closeness(decomposition: Decomposition, distance: str = "l1") -> Tensor:
    """(query, source): ‖y_i‖ − ‖y_i − T_ij‖, before clipping. Never holds more than a block of the (n, n, d) tensor.

    For L1 the identity |y − t| = 2 max(y, t) − y − t leaves one pass over the block, and its last two terms are
    linear, so that they cost nothing.
    """
    # max(s t, y) = s max(t, y / s) for s > 0: the norm's scale is applied to the sums, not to every part.
    state = decomposition.state
    scaled = state if decomposition.scale is None else state / decomposition.scale
    y = scaled if scaled.dim() == 3 else scaled[None]
    weights = decomposition.by_key
    square = weights.shape[1] == y.shape[0] * y.shape[1]  # else a block of rows, or other tokens than their own
    known = decomposition.crossed or not square or "diagonal" in vars(decomposition)
    own_weights = None if known else decomposition.own_weights
    before = decomposition.first_row if decomposition.causal else None
    out, seen = _sums(weights, decomposition.values_by_key, decomposition.weight, y, before, distance, own_weights)
    if seen is not None:
        decomposition.remember(seen)
    if distance == "l1":
        # (head, sequence · key, 1): Σ_d U
        totals = decomposition.values_by_key @ decomposition.weight.sum(-1, keepdim=True)
        linear = torch.bmm(totals.permute(1, 2, 0), weights.transpose(0, 1))[:, 0]  # Σ_d T
        out = linear.sub_(out, alpha=2).view(y.shape[0], -1, y.shape[1]).add_((y.abs() + y).sum(-1)[:, None])
    else:
        out = y.norm(dim=-1)[:, None] - out.sqrt_().view(y.shape[0], -1, y.shape[1])
    closer = out.mT.contiguous()
    closer = closer if decomposition.scale is None else closer.mul_(decomposition.scale.view(*y.shape[:2], 1))
    closer = closer if scaled.dim() == 3 else closer[0]
    if decomposition.causal:
        closer = closer.tril_(decomposition.first_row)  # what is not seen contributes exactly nothing
    own = _lengths(state, distance) - _lengths(state - decomposition.diagonal, distance)
    if decomposition.crossed:
        return torch.cat([closer, own[..., None]], dim=-1)
    torch.diagonal(closer, decomposition.first_row, dim1=-2, dim2=-1).copy_(own)
    return closer


def _sums(
    weights: Tensor,
    values: Tensor,
    weight: Tensor,
    y: Tensor,
    before: int | None,
    distance: str,
    own_weights: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """(sequence · key, query): Σ_d max(t, y), or Σ_d (t − y)² for L2, with t_ij = Σ_h A^h_ij U^h_j.

    weights (head, sequence · key, query), values (head, sequence · key, d_v), weight (head, d_v, d), y (sequence, query, d).
    before: under a causal mask, how many keys come before the first query's own; None: every key may be seen.
    With own_weights (sequence · key, head), A_jj, also t_jj (sequence · key, d), while the U are there.
    """
    n_query, width = y.shape[1:]
    by_key = weights.permute(1, 2, 0)  # (sequence · key, query, head)
    out = y.new_zeros(weights.shape[1:])
    # Few queries with several keys: the targets, which every key meets again, then take little of the cache.
    rows = min(n_query, _ROWS, max(32, _BLOCK // width))
    buffer = y.new_empty(max(_BLOCK, rows * width))
    made = y.new_empty(0)
    seen = None if own_weights is None else y.new_empty(len(own_weights), 1, width)
    for first, last, at in _blocks(y.shape[0], weights.shape[1], rows * width):
        size = len(values) * (last - first) * width
        made = made if made.numel() >= size else y.new_empty(size)
        sources = made[:size].view(len(values), last - first, width)
        sources = torch.bmm(values[:, first:last], weight, out=sources).transpose(0, 1)  # (key, head, d)
        if own_weights is not None and seen is not None:
            torch.bmm(own_weights[first:last, None], sources, out=seen[first:last])
        # Under a causal mask no query before the block's first key sees any of them.
        begin = 0 if before is None else max(0, first % (weights.shape[1] // y.shape[0]) - before)
        for row in range(begin, n_query, rows):
            end = min(row + rows, n_query)
            target = y[at, None, row:end]
            keys = max(1, len(buffer) // ((end - row) * width))
            pieces = (x.split(keys) for x in (by_key[first:last, row:end], sources, out[first:last, row:end]))
            part = near = buffer[:0]
            for w, u, total in zip(*pieces, strict=True):
                if part.shape[:2] != total.shape:  # only the last piece is smaller
                    part = buffer[: total.numel() * width].view(*total.shape, width)
                    near = part.view(len(target), -1, *part.shape[1:])
                torch.bmm(w, u, out=part)
                if distance == "l1":
                    torch.maximum(near, target, out=near)
                else:
                    near.sub_(target).square_()
                torch.sum(part, dim=-1, out=total)
    return out, None if seen is None else seen[:, 0]


def _blocks(sequences: int, total: int, each: int) -> Iterator[tuple[int, int, slice]]:
    """(first key, last key, which sequences): whole sequences together while they fit in a block, else keys of one.

    total: keys of all sequences; each: numbers in a block of one key.
    """
    keys = total // sequences
    together = max(1, _BLOCK // (keys * each))
    if together > 1:
        for start in range(0, sequences, together):
            stop = min(start + together, sequences)
            yield start * keys, stop * keys, slice(start, stop)
        return
    for sequence in range(sequences):
        for key in range(0, keys, _KEYS):
            yield sequence * keys + key, sequence * keys + min(key + _KEYS, keys), slice(sequence, sequence + 1)


def _lengths(x: Tensor, distance: str) -> Tensor:
    return x.abs().sum(-1) if distance == "l1" else x.norm(dim=-1)
