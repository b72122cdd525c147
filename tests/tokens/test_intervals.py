from __future__ import annotations

import random

import pytest
import torch

from whence.tokens.intervals import bootstrap, by_sentence


def test_against_a_loop() -> None:
    """Sentences drawn one by one: the same interval, up to the noise of 4,000 draws."""
    source = random.Random(0)
    counts = [source.randint(2, 9) for _ in range(25)]
    right = [source.randint(0, n) for n in counts]
    hits = torch.cat([torch.tensor([1.0] * h + [0.0] * (n - h)) for h, n in zip(right, counts, strict=True)])
    sentence = torch.repeat_interleave(torch.arange(25), torch.tensor(counts))
    rates = []
    for _ in range(4000):
        drawn = [source.randrange(25) for _ in range(25)]
        rates.append(sum(right[i] for i in drawn) / sum(counts[i] for i in drawn))
    rates.sort()
    low, high = bootstrap(hits, torch.ones_like(hits), sentence, draws=4000)
    assert low.item() == pytest.approx(rates[100], abs=0.015)
    assert high.item() == pytest.approx(rates[3900], abs=0.015)
    rate = hits.mean()
    assert low <= rate <= high


def test_seed_and_shape() -> None:
    hits = (torch.rand(2, 3, 40) > 0.5).float()
    sentence = torch.arange(40) // 4
    one = bootstrap(hits, torch.ones_like(hits), sentence, seed=3)
    two = bootstrap(hits, torch.ones_like(hits), sentence, seed=3)
    assert one[0].shape == (2, 3)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_nothing_counted_is_nan() -> None:
    low, high = bootstrap(torch.zeros(6), torch.zeros(6), torch.arange(6) // 2)
    assert low.isnan()
    assert high.isnan()


def test_sums() -> None:
    assert by_sentence(torch.tensor([1.0, 2, 3, 4]), torch.tensor([0, 0, 1, 2]), 3).tolist() == [3, 3, 4]
