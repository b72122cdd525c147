"""Monotone alignments: queries (words) laid along keys (frames of sound) by dynamic time warping over attention.

Whisper's recipe as transformers has it: frames beyond the sound cut off, every frame standardised over the tokens, a
running median over frames, the mean of the alignment heads, then dynamic time warping over minus that.

What can be proved of it (methods 1.4). A weight lies in an interval [lo, hi] in every row with the same head output. The
median is monotone, a mean adds intervals, so without the standardisation each cell of the cost matrix lies in an interval,
and a cell is on no optimal path where the best path through it under the lowest costs is dearer than the best path under
the highest. Standardising a frame divides by the spread of all rows there: it couples all of them, and nothing is proved.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from whence.core.numerics.arrays import Array, Integers
from whence.core.numerics.tolerances import SUM_ROUNDING
from whence.errors import InputError


def running_median(weights: Tensor, width: int) -> Tensor:
    """weights (…, n_key): the median over `width` neighbours, mirrored at the ends; shorter rows stay as they are."""
    if width < 1 or width % 2 == 0:
        raise InputError(f"width={width!r}; a running median takes an odd number of neighbours, 1 for none.")
    half = width // 2
    if half == 0 or weights.shape[-1] <= half:
        return weights
    left = weights[..., 1 : half + 1].flip(-1)
    right = weights[..., -half - 1 : -1].flip(-1)
    windows = torch.cat([left, weights, right], -1).unfold(-1, width, 1)
    return windows.sort(-1).values[..., half]


def alignment_matrix(weights: Tensor, *, median: int = 7, standardise: bool = True) -> Tensor:
    """weights (head, n_query, n_key) → (n_query, n_key): what the path is found on, large where a query belongs to a key."""
    if standardise:
        spread = weights.std(-2, keepdim=True, unbiased=False)
        # A frame that all queries weigh alike tells nothing about any of them: 0, where the division would give NaN.
        weights = torch.where(spread > 0, (weights - weights.mean(-2, keepdim=True)) / spread, 0.0)
    return running_median(weights, median).mean(0)


def warping_path(costs: Array) -> tuple[Integers, Integers]:
    """The cheapest monotone path from the first cell to the last: its rows and columns.

    costs (n_query, n_key). A step goes on by a row, a column or both; equal ones are broken as transformers breaks them.
    """
    rows, columns = costs.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    total[0, 0] = 0.0
    step = np.zeros((rows + 1, columns + 1), dtype=np.int8)
    for j in range(1, columns + 1):
        before, here = total[:, j - 1], total[:, j]
        for i in range(1, rows + 1):
            both, down, along = before[i - 1], here[i - 1], before[i]
            if both < down and both < along:
                best, step[i, j] = both, 0
            elif down < both and down < along:
                best, step[i, j] = down, 1
            else:
                best, step[i, j] = along, 2
            here[i] = costs[i - 1, j - 1] + best
    step[0, :], step[:, 0] = 2, 1
    i, j = rows, columns
    path = []
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        move = step[i, j]
        i, j = i - (move != 2), j - (move != 1)
    found = np.array(path[::-1], dtype=np.int64)
    return found[:, 0], found[:, 1]


def first_keys(matrix: Tensor) -> Integers:
    """(n_query,): the key at which the path over −matrix, matrix (n_query, n_key), first reaches each query."""
    queries, keys = warping_path(-matrix.detach().to(torch.float64).numpy())
    return np.asarray(keys[np.r_[True, np.diff(queries) > 0]], dtype=np.int64)


def possible_first_keys(lower: Tensor, upper: Tensor) -> tuple[Integers, Integers]:
    """(n_query,) each: the earliest and the latest key at which an optimal path can first reach a query.

    lower, upper (n_query, n_key): between them lies every cell of the (not standardised) matrix.
    """
    cheap, dear = -upper.to(torch.float64).numpy(), -lower.to(torch.float64).numpy()
    ahead = _path_costs(cheap)
    behind = _path_costs(cheap[::-1, ::-1])[::-1, ::-1]
    limit = _path_costs(dear)[-1, -1] + SUM_ROUNDING
    n_query, n_key = cheap.shape
    first, last = np.zeros(n_query, dtype=np.int64), np.zeros(n_query, dtype=np.int64)
    for i in range(1, n_query):
        above = ahead[i - 1]
        enter = np.minimum(above, np.r_[np.inf, above[:-1]]) + behind[i]
        possible = np.flatnonzero(enter <= limit)
        first[i], last[i] = (possible[0], possible[-1]) if len(possible) else (0, n_key - 1)
    return first, last


def _path_costs(costs: Array) -> Array:
    """(n_query, n_key): the cost of the cheapest path from the first cell to each, both included."""
    rows, _columns = costs.shape
    total = np.empty_like(costs)
    total[0] = np.cumsum(costs[0])
    for i in range(1, rows):
        above = total[i - 1]
        enter = np.minimum(above, np.r_[np.inf, above[:-1]])
        # Along a row: total[j] = c[j] + min(enter[j], total[j−1]), a running minimum once the row's own sums are out.
        sums = np.cumsum(costs[i])
        total[i] = sums + np.minimum.accumulate(enter - np.r_[0.0, sums[:-1]])
    return total
