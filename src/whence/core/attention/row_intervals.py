"""Row after row of one head: the exact interval of each of its heaviest weights, and the farthest alternative met.

The same programs as in a certificate (methods 1.2), one model for the whole head: from row to row only the right side
moves, from weight to weight only the objective. What is returned are numbers that a dual vector proves, each within
`GAP` of a weight that some alternative attains; a row where that cannot be shown is left out. Every vertex on the way
is another attention row with the same output: the one farthest from the row comes along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whence.core.attention.polytope import Polytope, proved_minimum
from whence.core.numerics.arrays import Booleans, Integers
from whence.core.numerics.checks import as_row, check_pair, shape
from whence.core.numerics.masks import full_mask
from whence.core.numerics.tolerances import rank_eps
from whence.errors import InputError
from whence.results.short_repr import short_repr

GAP = 1e-6
NO_KEY = -1


@dataclass(frozen=True)
class RowInterval:
    """One row: lower, upper (k,) of its keys and other (n_key,), an alternative to it; in shares of the row's sum."""

    __repr__ = short_repr

    query: int
    lower: Tensor
    upper: Tensor
    other: Tensor


def row_intervals(
    attention: Tensor,
    values: Tensor,
    keys: Tensor,
    *,
    rows: Iterable[int] | None = None,
    visible: Tensor | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[RowInterval]:
    """Each of `rows` as it is solved.

    Args:
        attention: (n_query, n_key), one head.
        values: (n_key, d_v).
        keys: (n_query, k) which weights of each row; −1 for none (its interval is [0, 0]).
        rows: which rows, in this order; None, all. A row that sees nothing is left out.
        visible: boolean, broadcastable to attention.
        stop: asked before every row.

    >>> attention, values = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[1.0], [0.0], [0.0]])
    >>> for row in row_intervals(attention, values, torch.tensor([[2]])):
    ...     print(*([round(x, 6) for x in t.tolist()] for t in (row.lower, row.upper, row.other)))
    [0.0] [0.5] [0.5, 0.0, 0.5]
    """
    check_pair(attention, values, visible)
    if attention.ndim != 2 or values.ndim != 2 or keys.ndim != 2 or len(keys) != len(attention):
        raise InputError(
            f"attention {shape(attention)}, values {shape(values)}, keys {shape(keys)}: expected one head and a list of "
            "keys for each of its rows."
        )
    mask = (
        full_mask(visible, *attention.shape) if visible is not None else torch.ones(attention.shape, dtype=torch.bool)
    )
    solver: Polytope | None = None
    values64 = values.detach().to(torch.float64).numpy()
    for query in range(len(attention)) if rows is None else rows:
        if stop():
            return
        if not bool(mask[query].any()):
            continue
        row = as_row(attention[query], values, mask[query])[0].numpy()
        seen = mask[query].numpy()
        if solver is None:
            solver = Polytope(row, values64, eps=rank_eps(values.dtype), perturbed=False)
        solver.move_to(row, seen)
        found = _solve(solver, query, keys[query].numpy(), seen)
        if found is not None:
            yield found


def _solve(solver: Polytope, query: int, keys: Integers, visible: Booleans) -> RowInterval | None:
    """Both ends for each of `keys`; None where what is proved is not what is attained."""
    n = len(visible)
    row, values = solver.row[visible], solver.values[visible]
    wanted = [(k, int(j)) for k, j in enumerate(keys) if j != NO_KEY and visible[j]]
    lower, upper = np.zeros(len(keys)), np.zeros(len(keys))
    touched = np.zeros(n, dtype=bool)  # some alternative has no weight here: the lower end is 0
    farthest = solver.row
    for side in (-1.0, 1.0):
        todo = [(k, j) for k, j in wanted if side < 0 or not touched[j]]
        if not todo:
            continue
        costs, duals, attained = np.zeros((len(todo), n)), np.zeros((len(todo), values.shape[1])), np.zeros(len(todo))
        for t, (_, j) in enumerate(todo):
            costs[t, j] = side
            vertex = solver.vertex(costs[t])
            touched |= vertex <= 0.0
            farthest = max(farthest, vertex, key=solver.distance)
            duals[t], attained[t] = solver.dual(), side * vertex[j]
        proved = proved_minimum(costs[:, visible], duals, row, values, 0.0, allowance=2.0)
        if float((attained - proved).max()) > GAP:
            return None
        for (k, _), end in zip(todo, np.clip(side * proved, 0.0, 1.0), strict=True):
            (upper if side < 0 else lower)[k] = end
    other = solver.polished(max(farthest, solver.vertex(np.sign(solver.row - farthest)), key=solver.distance))
    if other[~visible].any() or solver.distance(other) < GAP:
        other = solver.row
    return RowInterval(query, torch.from_numpy(lower), torch.from_numpy(upper), torch.from_numpy(other))
