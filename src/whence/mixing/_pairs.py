"""How scores react where positions enter them through queries and keys (DeBERTa): one pair of tokens at a time.

    δS_jm = δq_j · κ_jm + δk_m · χ_jm

holds for any scores that depend on the two tokens alone. κ and χ are found from the model's own forward mode: a
direction at one token p moves row p through q_p and column p through k_p, and softmax gives δA = A ⊙ (δS − Σ A δS).
In a row j ≠ p only S_jp moves, so δA_jp = A_jp (1 − A_jp) δk_p · χ_jp. In row p

    δ log A_pm = δq_p · (κ_pm − κ̄_p) + δk_p · χ_pp ([m = p] − A_pp)

which is all that is needed, since a constant added to a row of κ changes nothing. Two d_k directions a token and a few
to spare, for all heads and layers at once. Whether the scores are of that kind is told afterwards: the folding is
proved against forward mode through the whole model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from whence.mixing._scores import Scores
from whence.reading.trace import Layer

Moved = tuple[Tensor, Tensor, Tensor]
"""δq, δk (c, head, n, d_k) and δA (c, head, n, n) of one layer."""

_SPARE = 8
_TOGETHER = 96  # directions followed at once: more only leave the cache


def paired_scores(layers: tuple[Layer, ...], push: Callable[[Tensor], list[Moved]]) -> list[Scores]:
    """κ and χ of every layer. push: directions (c, n, d) at every block's input → what moves in each layer."""
    n, width = layers[0].block_input.shape
    size = max(layer.queries.shape[-1] for layer in layers)
    count = min(width, 2 * size + _SPARE)
    generator = torch.Generator().manual_seed(2)
    random = torch.randn(width, count, generator=generator, dtype=torch.float64)
    directions = torch.linalg.qr(random).Q.T.to(layers[0].block_input)
    kappa = [torch.zeros(*layer.attention.shape, layer.queries.shape[-1], dtype=torch.float64) for layer in layers]
    chi = [torch.zeros_like(one) for one in kappa]
    together = max(1, _TOGETHER // count)  # tokens
    for first in range(0, n, together):
        tokens = range(first, min(first + together, n))
        placed = directions.new_zeros(len(tokens), count, n, width)
        for i, p in enumerate(tokens):
            placed[i, :, p] = directions
        for layer, moved, k, x in zip(layers, push(placed.flatten(0, 1)), kappa, chi, strict=True):
            query, key, weights = (t.double().unflatten(0, (len(tokens), count)) for t in moved)
            for i, p in enumerate(tokens):
                _solve(layer.attention.double(), query[i, :, :, p], key[i, :, :, p], weights[i], p, k, x)
    dtype = layers[0].block_input.dtype
    return [
        Scores(1.0, layer.attention, k.to(dtype), x.to(dtype)) for layer, k, x in zip(layers, kappa, chi, strict=True)
    ]


def _solve(attention: Tensor, query: Tensor, key: Tensor, moved: Tensor, p: int, kappa: Tensor, chi: Tensor) -> None:
    """Row p of κ and column p of χ. query, key (c, head, d_k): δ at p; moved (c, head, n, n): δA."""
    size = query.shape[-1]
    heads = attention.shape[0]
    key = key.repeat_interleave(heads // key.shape[1], dim=1)
    asked, answered = query.transpose(0, 1), key.transpose(0, 1)  # (head, c, d_k)

    column = attention[:, :, p]
    room = column * (1 - column)
    scores = torch.where(room > 0, moved[..., p] / room.clamp(min=torch.finfo(room.dtype).tiny), 0.0)  # (c, head, j)
    chi[:, :, p] = (torch.linalg.pinv(answered) @ scores.transpose(0, 1)).transpose(1, 2)

    row = attention[:, p]
    change = torch.where(row > 0, moved[:, :, p] / row.clamp(min=torch.finfo(row.dtype).tiny), 0.0)  # (c, head, m)
    both = torch.linalg.pinv(torch.cat([asked, answered], -1)) @ change.transpose(0, 1)  # (head, 2 d_k, m)
    kappa[:, p] = both[:, :size].transpose(1, 2)
    own = both[:, size:]  # χ_pp ([m = p] − A_pp)
    others = row.clone()
    others[:, p] = 0
    rest = others.sum(-1, keepdim=True)
    mean = (own * others[:, None]).sum(-1) / rest.clamp(min=torch.finfo(row.dtype).tiny)
    chi[:, p, p] = torch.where(rest > 0, own[..., p] - mean, 0.0)
