"""How a layer's scores react to its queries and keys: what folded forward mode needs of its softmax.

    S_jm = f(s q_j · k_m) + B_jm,     δS_jm = f′ s (δq_j · k_m + q_j · δk_m)

f is the identity, or a soft cap c tanh(x / c); B (mask, positions) does not move with the text. Where the model's way
does not show s, it is inferred from the weights, log A_jm = S_jm − constant_j, or tried; either way the folding that it
leads to is proved afterwards against the model's own forward mode, so that a wrong guess costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.core.numerics.tolerances import FIRST_WEIGHT, SCORE_FIT
from whence.reading.trace import Layer

Cap = tuple[float, float]
"""s and c of a soft cap."""


@dataclass(frozen=True)
class Scores:
    """The factor s, and A ⊙ f′, (head, query, key).

    by_query, by_key (head, query, key, d_k): κ and χ of `whence.mixing.jacobian.pairs`, in place of the keys and the queries.
    """

    scale: float
    softmax_slope: Tensor
    by_query: Tensor | None = None
    by_key: Tensor | None = None


def candidates(layers: tuple[Layer, ...], caps: list[Cap | None]) -> Iterator[list[Scores]]:
    """What the scores of all layers may be, the likeliest first."""
    known = [_known(layer, cap) for layer, cap in zip(layers, caps, strict=True)]
    if all(scores is not None for scores in known):
        yield [scores for scores in known if scores is not None]
        return
    inferred = [inferred_scale(layer) for layer in layers]
    guesses: list[list[float]] = [[layer.queries.shape[-1] ** -0.5 for layer in layers], [1.0] * len(layers)]
    if all(scale is not None for scale in inferred):
        guesses.insert(0, [scale for scale in inferred if scale is not None])
    for guess in guesses:
        yield [
            found if found is not None else Scores(scale, layer.attention)
            for found, scale, layer in zip(known, guess, layers, strict=True)
        ]


def _known(layer: Layer, cap: Cap | None) -> Scores | None:
    if layer.keys_proved and layer.scale is not None:
        return Scores(layer.scale, layer.attention)
    if cap is None:
        return None
    scale, limit = cap
    bent = torch.tanh(layer.queries @ layer.keys.transpose(1, 2) * (scale / limit))
    return Scores(scale, layer.attention * (1 - bent.square()))


def inferred_scale(layer: Layer) -> float | None:
    """s from log A_jm = s q_j · k_m − constant_j, by least squares; None where that does not hold."""
    attention = layer.attention.to(torch.float64)
    products = layer.queries.to(torch.float64) @ layer.keys.to(torch.float64).transpose(1, 2)
    seen = attention > FIRST_WEIGHT
    logs = torch.where(seen, attention.clamp(min=1e-12).log(), 0.0)
    count = seen.sum(-1, keepdim=True).clamp(min=1)

    def centred(x: Tensor) -> Tensor:
        x = torch.where(seen, x, 0.0)
        return torch.where(seen, x - x.sum(-1, keepdim=True) / count, 0.0)

    x, y = centred(products), centred(logs)
    if not bool(x.abs().max() > 0):
        return None
    scale = float((x * y).sum() / x.square().sum())
    rest = (y - scale * x).abs().max() / y.abs().max().clamp(min=1e-12)
    return scale if bool(rest < SCORE_FIT) else None
