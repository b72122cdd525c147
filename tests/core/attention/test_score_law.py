"""The score law against its definition, written in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from whence.core.attention.score_law import score_law


@pytest.mark.parametrize("size", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("causal", [False, True])
def test_scale_residual_and_bias_are_those_of_the_definition(size: float, causal: bool) -> None:
    rng = np.random.default_rng(int(10 * size) + causal)
    seen = np.tril(np.ones((7, 7), dtype=bool)) if causal else np.ones((7, 7), dtype=bool)
    products = rng.normal(size=(2, 2, 7, 7))
    bias, noise = size * rng.normal(size=(2, 7, 7)), 0.01 * rng.normal(size=(2, 2, 7, 7))
    scores = np.where(seen, 0.7 * products + bias + noise, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    rows = [(h, i) for h in range(2) for i in range(7)]

    def within(x: np.ndarray) -> np.ndarray:
        """Each row less its mean over the keys that it sees, one after the other."""
        return np.concatenate([x[h, i, seen[i]] - x[h, i, seen[i]].mean() for h, i in rows])

    logs = np.log(np.where(seen, weights, 1.0))
    change, moved = within(logs[0] - logs[1]), within(products[0] - products[1])
    scale = change @ moved / (moved @ moved)
    law = score_law(tuple(map(torch.from_numpy, weights)), tuple(map(torch.from_numpy, products)))
    assert law.scale == pytest.approx(scale, rel=1e-9)
    assert law.residual == pytest.approx(np.linalg.norm(change - scale * moved) / np.linalg.norm(change), rel=1e-6)
    left = within(logs[0] - scale * products[0])
    assert law.biased == pytest.approx(np.linalg.norm(left) / np.linalg.norm(within(logs[0])), rel=1e-6)
    assert law.sink is None
