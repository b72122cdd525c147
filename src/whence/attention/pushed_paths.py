"""The earliest and the latest alignment found among attention rows with the same head outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from whence.attention.decided_rows import Gathered
from whence.core.attention.alignment import alignment_matrix, first_keys
from whence.core.attention.row_intervals import HeadPrograms
from whence.core.numerics.tolerances import SAME_OUTPUT, UNIT_SUM

# How far all hand-overs of the path are aimed earlier and later: in seconds where keys are times, else in keys.
_SECONDS = (0.16, 0.3, 0.5)
_KEYS = (1, 3)


def path_of(rows: Tensor, n: int, median: int, standardised: bool) -> Tensor:
    """(n_query,): the key at which the path over these rows [head, query, key], the first n keys of them, reaches each query."""
    return torch.from_numpy(first_keys(alignment_matrix(rows[..., :n], median=median, standardise=standardised)))


def pushed(
    gathered: Gathered, n: int, starts: Sequence[int], *, median: int, standardise: bool, unit: float
) -> tuple[Tensor, Tensor]:
    """Rows with the same outputs whose path is early, and whose path is late; both [head, query, key].

    starts: the queries whose times are read. Of all alignments met on the way, the one with the least and the one with
    the largest sum of these times are kept; the observed one where no other goes further.
    """
    search = _Search(gathered, n, median, standardise)
    at = list(starts)
    own = int(search.path(gathered.rows)[at].sum())
    ends = [(own, gathered.rows), (own, gathered.rows)]
    shifts = [round(s / unit) for s in _SECONDS] if unit != 1.0 else list(_KEYS)
    for direction in (-1, 1):
        for rows in search.pushes(direction, shifts):
            total = int(search.path(rows)[at].sum())
            if total < ends[0][0]:
                ends[0] = (total, rows)
            if total > ends[1][0]:
                ends[1] = (total, rows)
    return ends[0][1], ends[1][1]


class _Search:
    """The linear programs of the heads whose mean the path runs over."""

    def __init__(self, gathered: Gathered, n: int, median: int, standardise: bool) -> None:
        self.gathered, self.n, self.median, self.standardise = gathered, n, median, standardise
        self.heads = [
            HeadPrograms(rows.numpy(), values, seen.expand(rows.shape).numpy())
            for rows, values, seen in zip(gathered.rows, gathered.values, gathered.visible, strict=True)
        ]

    def path(self, rows: Tensor) -> Tensor:
        return path_of(rows, self.n, self.median, self.standardise)

    def pushes(self, direction: int, shifts: Sequence[int]) -> Iterator[Tensor]:
        """Rows whose path may lie earlier (direction −1) or later (1).

        First every row as early (late) as it can be; then, for every shift, all hand-overs of the path are aimed that much
        earlier (later): each row gains as much as it can on the keys that the shifted path gives it, against those that
        the path gives it now.
        """
        rows = self.gathered.rows
        at = torch.arange(rows.shape[-1])
        yield self._corner((-direction * at.to(torch.float64)).expand(rows.shape))
        path = self.path(rows)
        for shift in shifts:
            moved = (path + direction * shift).clamp(0, self.n - 1)
            moved[0] = 0
            costs = _covered(path, at, self.n) - _covered(moved, at, self.n)
            yield self._corner(costs.expand(rows.shape))

    def _corner(self, costs: Tensor) -> Tensor:
        """Rows with the same outputs that cost least, costs [head, query, key]; a row that cannot be made exact stays."""
        rows = self.gathered.rows.clone()
        queries = np.arange(rows.shape[1])
        for h, head in enumerate(self.heads):
            size = costs[h].abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
            points, _ = head.minima((costs[h] / size).numpy(), queries)
            for i, point in enumerate(points):
                other = torch.from_numpy(head.polished(i, point))
                if _is_same(other, self.gathered.rows[h, i], self.gathered.values[h]):
                    rows[h, i] = other
        return rows


def _covered(path: Tensor, at: Tensor, n: int) -> Tensor:
    """(n_query, n_key): 1 where a path that reaches the queries at these keys gives a query this key."""
    ends = torch.cat([path[1:], torch.tensor([n - 1])])
    return ((at >= path[:, None]) & (at <= ends[:, None])).to(torch.float64)


def _is_same(row: Tensor, original: Tensor, values: Tensor) -> bool:
    """Whether this is an attention row with the output of the original one, to 1e-10."""
    moved = float(torch.linalg.vector_norm((row - original) @ values))
    size = float(torch.linalg.vector_norm(original @ values))
    return float(row.min()) >= 0 and abs(float(row.sum()) - 1) <= UNIT_SUM and moved <= SAME_OUTPUT * size
