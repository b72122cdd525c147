"""The alignment recipe against transformers' own functions and a plain second writing of it, on random matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from whence.core.attention.alignment import (
    alignment_matrix,
    first_keys,
    possible_first_keys,
    running_median,
    warping_path,
)
from whence.errors import InputError


def weights(seed: int, heads: int = 3, queries: int = 6, keys: int = 25) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.softmax(2 * torch.randn(heads, queries, keys, generator=g, dtype=torch.float64), -1)


def cheapest(costs: np.ndarray) -> float:
    """The cost of the cheapest path, by trying every one."""
    rows, columns = costs.shape
    best = [np.inf]

    def walk(i: int, j: int, paid: float) -> None:
        paid += costs[i, j]
        if (i, j) == (rows - 1, columns - 1):
            best[0] = min(best[0], paid)
        for di, dj in ((1, 1), (1, 0), (0, 1)):
            if i + di < rows and j + dj < columns:
                walk(i + di, j + dj, paid)

    walk(0, 0, 0.0)
    return best[0]


@pytest.mark.parametrize("seed", range(5))
def test_the_recipe_is_that_of_transformers(seed):
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

    w = weights(seed)
    std, mean = torch.std_mean(w, dim=-2, keepdim=True, unbiased=False)
    theirs = _median_filter(((w - mean) / std)[None], 7)[0].mean(0)
    torch.testing.assert_close(alignment_matrix(w, median=7), theirs, atol=1e-12, rtol=0)
    text, time = _dynamic_time_warping(-theirs.numpy())
    jumps = np.pad(np.diff(text), (1, 0), constant_values=1).astype(bool)
    assert first_keys(alignment_matrix(w, median=7)).tolist() == time[jumps].tolist()


@pytest.mark.parametrize("seed", range(4))
def test_the_path_is_the_cheapest_there_is(seed):
    costs = np.random.default_rng(seed).normal(size=(4, 6))
    rows, columns = warping_path(costs)
    assert costs[rows, columns].sum() == pytest.approx(cheapest(costs))
    assert (rows[0], columns[0], rows[-1], columns[-1]) == (0, 0, 3, 5)
    assert ((np.diff(rows) >= 0) & (np.diff(columns) >= 0) & (np.diff(rows) + np.diff(columns) > 0)).all()


def test_the_median_is_the_median():
    w = weights(1)[0]
    padded = np.pad(w.numpy(), ((0, 0), (2, 2)), mode="reflect")
    plain = [[np.median(row[j : j + 5]) for j in range(w.shape[1])] for row in padded]
    np.testing.assert_allclose(running_median(w, 5).numpy(), plain)
    assert running_median(w, 1) is w
    with pytest.raises(InputError, match="odd number"):
        running_median(w, 4)


@pytest.mark.parametrize("seed", range(6))
def test_no_matrix_within_the_intervals_has_a_path_outside_the_proved_range(seed):
    """Corners and random matrices of the box; and the range is not everything."""
    g = np.random.default_rng(seed)
    middle = np.zeros((4, 12))
    for i in range(4):
        middle[i, 3 * i : 3 * i + 3] = 1.0
    width = 0.02 * g.random(middle.shape)
    lower, upper = torch.from_numpy(middle - width), torch.from_numpy(middle + width)
    first, last = possible_first_keys(lower, upper)
    for _ in range(60):
        corner = np.where(g.random(middle.shape) < 0.5, lower.numpy(), upper.numpy())
        inside = lower.numpy() + g.random(middle.shape) * (upper - lower).numpy()
        for matrix in (corner, inside):
            found = first_keys(torch.from_numpy(matrix))
            assert (first <= found).all()
            assert (found <= last).all()
    assert (last - first < 11).all()
    wide = possible_first_keys(torch.from_numpy(middle - 1), torch.from_numpy(middle + 1))
    assert (wide[1] - wide[0])[1:].min() > (last - first).max()


def test_a_frame_that_all_queries_weigh_alike_says_nothing():
    w = weights(2)
    w[..., 5] = 0.25
    assert torch.isfinite(alignment_matrix(w)).all()
