"""Row after row of one head: the exact interval of each of its heaviest weights, and the farthest alternative met.

The same programs as in a certificate (methods 1.2), many rows at once by an interior-point method
(`whence.core.attention.interior_point`); what that leaves unproved, and rows that see few keys, go to one warm-started
simplex model for the whole head: from row to row only the right side moves, from weight to weight only the objective.
What is returned are numbers that a dual vector proves, each within `GAP` of a weight that some alternative attains; a row
where that cannot be shown is left out. Every point on the way is another attention row with the same output: the one
farthest from the row comes along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whence.core.attention.interior_point import BATCH, InteriorPoint
from whence.core.attention.polytope import Polytope, polished, proved_minimum
from whence.core.numerics.arrays import Array, Booleans, Integers
from whence.core.numerics.checks import as_rows, check_pair, shape
from whence.core.numerics.masks import full_mask
from whence.core.numerics.tolerances import GAP, rank_eps
from whence.errors import InputError
from whence.results.short_repr import short_repr

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
    head = HeadPrograms(as_rows(attention, values, mask).numpy(), values, mask.numpy())
    some, size = [], max(1, BATCH // max(1, keys.shape[1]))
    for query in range(len(attention)) if rows is None else rows:
        if stop():
            break
        if head.visible[query].any():
            some.append(query)
        if len(some) == size:
            yield from head.solve(some, keys[some].numpy())
            some = []
    if some:
        yield from head.solve(some, keys[some].numpy())


class HeadPrograms:
    """The linear programs of one head. rows and visible (n_query, n_key), rows float64 that sum to 1; values (n_key, d_v)."""

    def __init__(self, rows: Array, values: Tensor, visible: Booleans) -> None:
        self.rows, self.visible = rows, visible
        self._interior = InteriorPoint(values.detach().to(torch.float64).numpy(), rank_eps(values.dtype))
        self._simplex: Polytope | None = None

    def solve(self, queries: list[int], keys: Integers) -> Iterator[RowInterval]:
        """The rows `queries`, whose keys (m, k) are wanted."""
        roomy = self._interior.roomy(self.visible[queries])
        together = [q for q, fits in zip(queries, roomy, strict=True) if fits]
        found = self._together(together, keys[roomy]) if together else {}
        for query, wanted in zip(queries, keys, strict=True):
            one = found[query] if query in found else _solve(self.simplex(query), query, wanted, self.visible[query])
            if one is not None:
                yield one

    def simplex(self, query: int) -> Polytope:
        """The head's simplex model, at this row."""
        if self._simplex is None:
            values, constraints = self._interior.values, self._interior.constraints
            self._simplex = Polytope(self.rows[query], values, perturbed=False, constraints=constraints)
        self._simplex.move_to(self.rows[query], self.visible[query])
        return self._simplex

    def _together(self, queries: list[int], keys: Integers) -> dict[int, RowInterval | None]:
        """Both ends for keys (m, k) of each row; None where what is proved is not what is attained."""
        m, k = keys.shape
        at = np.array(queries)
        line, place = np.nonzero((keys != NO_KEY) & np.take_along_axis(self.visible[at], np.maximum(keys, 0), 1))
        ends = {-1.0: np.zeros((m, k)), 1.0: np.zeros((m, k))}
        sure = np.ones(m, dtype=bool)
        # Where some alternative has no weight, the lower end is 0.
        touched = np.zeros((m, len(self.rows[0])), dtype=bool)
        farthest = self.rows[at].copy()
        for side in (-1.0, 1.0):
            todo = np.flatnonzero(~touched[line, keys[line, place]])
            own, spot = line[todo], place[todo]
            costs = np.zeros((len(todo), farthest.shape[1]))
            costs[np.arange(len(todo)), keys[own, spot]] = side
            points, proved = self.minima(costs, at[own])
            sure[own[(costs * points).sum(1) - proved > GAP]] = False
            np.logical_or.at(touched, own, points <= GAP / 4)
            ends[side][own, spot] = np.clip(side * proved, 0.0, 1.0)
            _keep_farthest(farthest, points, self.rows[at], own)
        points, _ = self.minima(np.sign(self.rows[at] - farthest), at)
        _keep_farthest(farthest, points, self.rows[at], np.arange(m))
        return {
            query: RowInterval(
                query,
                torch.from_numpy(ends[1.0][i]),
                torch.from_numpy(ends[-1.0][i]),
                torch.from_numpy(self._other(query, farthest[i])),
            )
            if sure[i]
            else None
            for i, query in enumerate(queries)
        }

    def minima(self, costs: Array, queries: Integers) -> tuple[Array, Array]:
        """Points (k, n) that minimise costs (k, n) for the rows `queries` (k,), and proved bounds (k,).

        What the interior-point method leaves unproved is solved by the simplex method.
        """
        found = self._interior.minima(costs, self.rows[queries], self.visible[queries])
        points, proved = found.points, found.proved
        for t in np.flatnonzero(~found.solved):
            best = self.simplex(int(queries[t])).minimum(costs[t], self.visible[queries[t]])
            points[t], proved[t] = best.vertex, best.bound
        return points, proved

    def polished(self, query: int, point: Array) -> Array:
        """A point that a program gave, as an attention row with the same output."""
        return polished(point, self.rows[query], self._interior.constraints.q)

    def _other(self, query: int, point: Array) -> Array:
        row, visible = self.rows[query], self.visible[query]
        other = self.polished(query, point)
        return row if other[~visible].any() or 0.5 * np.abs(other - row).sum() < GAP else other


def _keep_farthest(farthest: Array, points: Array, rows: Array, own: Integers) -> None:
    """Write into farthest (m, n), row by row, whichever of points (t, n) of row own (t,) is farther away."""
    best = np.abs(farthest - rows).sum(1)
    distance = np.abs(points - rows[own]).sum(1)
    for t in np.argsort(distance, kind="stable"):
        if distance[t] > best[own[t]]:
            farthest[own[t]] = points[t]


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
