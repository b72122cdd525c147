"""The earliest and the latest alignment found among attention rows with the same head outputs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from whence.attention.decided_rows import Gathered
from whence.core.attention.alignment import alignment_matrix, first_keys
from whence.core.attention.decision import Heads
from whence.core.numerics.tolerances import SAME_OUTPUT, UNIT_SUM

# How far all hand-overs of the path are aimed earlier and later: in seconds where keys are times, else in keys.
_SECONDS = (0.16, 0.3, 0.5)
_KEYS = (1, 3)


def path_of(rows: Tensor, n: int, median: int, standardised: bool) -> Tensor:
    """(n_query,): the key at which the path over these rows [head, query, key], the first n keys of them, reaches each query."""
    return torch.from_numpy(first_keys(alignment_matrix(rows[..., :n], median=median, standardise=standardised)))


def pushed(gathered: Gathered, n: int, *, median: int, standardise: bool, unit: float) -> tuple[Tensor, Tensor]:
    """Rows with the same outputs whose path is early, and whose path is late; both [head, query, key].

    For every shift, all hand-overs of the path are aimed that much earlier (later): each row gains as much as it can on the
    keys that the shifted path gives it, against those that the path gives it now. Of the alignments that follow, the
    earliest and the latest are kept (by the sum of their keys), the observed one where no other goes further.
    """
    path = path_of(gathered.rows, n, median, standardise)
    solver = Heads(gathered.rows, gathered.values, torch.ones(len(gathered.rows)), gathered.visible)
    shifts = [round(s / unit) for s in _SECONDS] if unit != 1.0 else list(_KEYS)
    ends = [(int(path.sum()), gathered.rows), (int(path.sum()), gathered.rows)]
    for shift in (*(-s for s in shifts), *shifts):
        rows = _aimed(gathered, solver, path.numpy(), shift, n)
        total = int(path_of(rows, n, median, standardise).sum())
        if total < ends[0][0]:
            ends[0] = (total, rows)
        if total > ends[1][0]:
            ends[1] = (total, rows)
    return ends[0][1], ends[1][1]


def _aimed(gathered: Gathered, solver: Heads, path: np.ndarray, shift: int, n: int) -> Tensor:
    """The rows pushed towards the path with every hand-over `shift` keys on."""
    moved = np.clip(path + shift, 0, n - 1)
    moved[0] = 0
    rows = gathered.rows.clone()
    at = np.arange(rows.shape[-1])
    for i in range(rows.shape[1]):
        cost = np.zeros(rows.shape[-1])
        for starts, sign in ((path, 1.0), (moved, -1.0)):
            end = starts[i + 1] if i + 1 < len(starts) else n - 1
            cost += sign * ((at >= starts[i]) & (at <= end))
        if not cost.any():
            continue
        for h, row in enumerate(solver.at(i)):
            other = torch.from_numpy(row.polished(row.exact(cost)[2]))
            if _is_same(other, gathered.rows[h, i], gathered.values[h]):
                rows[h, i] = other
    return rows


def _is_same(row: Tensor, original: Tensor, values: Tensor) -> bool:
    """Whether this is an attention row with the output of the original one, to 1e-10."""
    moved = float(torch.linalg.vector_norm((row - original) @ values))
    size = float(torch.linalg.vector_norm(original @ values))
    return float(row.min()) >= 0 and abs(float(row.sum()) - 1) <= UNIT_SUM and moved <= SAME_OUTPUT * size
