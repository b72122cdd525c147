"""Bootstrap intervals over sentences: tokens of one sentence are not independent, so whole sentences are drawn."""

from __future__ import annotations

import torch
from torch import Tensor


def by_sentence(values: Tensor, sentence: Tensor, sentences: int) -> Tensor:
    """Sums over the tokens of each sentence: (…, N) → (…, S)."""
    out = values.new_zeros(*values.shape[:-1], sentences)
    return out.index_add_(-1, sentence, values)


def bootstrap(
    hits: Tensor, counted: Tensor, sentence: Tensor, *, draws: int = 1000, level: float = 0.95, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Percentile interval of Σ hits / Σ counted when the S sentences are drawn anew, S at a time, with replacement.

    `hits` (…, N) and `counted` (…, N) per token, `sentence` (N,) the number of each token's sentence, from 0. Returns
    low and high, each (…); NaN where nothing was counted.

    >>> low, high = bootstrap(torch.tensor([1., 1., 0., 0.]), torch.ones(4), torch.tensor([0, 0, 1, 1]))
    >>> low.item(), high.item()
    (0.0, 1.0)
    """
    total = int(sentence.max()) + 1
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(total, (draws, total), generator=generator)
    weights = torch.zeros(draws, total, dtype=torch.float64)
    weights.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    top, bottom = (by_sentence(t.double(), sentence, total) @ weights.T for t in (hits, counted))
    rates = top / bottom  # NaN for a draw in which nothing was counted
    tail = (1 - level) / 2
    return rates.nanquantile(tail, dim=-1), rates.nanquantile(1 - tail, dim=-1)
