"""May this row be read? An absolute statement about each attention row of a head, never a ranking.

To ε: a row is *unique* where no other has its output; *certain* when its heaviest weight exceeds ε, stays within an
interval of width ε in every alternative, and no other key outweighs it by more than ε in any; *flat* when no weight can
exceed ε; *open* to other readings otherwise. Closed-form bounds decide where they suffice, linear programs the rest: what
is called certain or flat has a dual as proof. methods 1.2 (8).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from whence.core.attention.bounds import WeightBounds, weight_bounds
from whence.core.attention.interior_point import InteriorPoint, Minima
from whence.core.attention.null_space import null_space
from whence.core.attention.polytope import Polytope, proved_minimum
from whence.core.numerics.arrays import Array, Booleans, Integers
from whence.core.numerics.checks import as_rows, check_pair, shape
from whence.core.numerics.masks import full_mask
from whence.core.numerics.threads import one_thread
from whence.core.numerics.tolerances import DUALITY_GAP, GAP, rank_eps
from whence.errors import InputError


class RowVerdict(IntEnum):
    """What may be said of a row; NONE: it sees nothing, or it was not looked at."""

    NONE = -1
    UNIQUE = 0
    CERTAIN = 1
    FLAT = 2
    OPEN = 3


def check_epsilon(epsilon: float) -> None:
    """Refuse an ε that is no share of a row."""
    if not 0.0 < epsilon < 1.0:
        raise InputError(f"epsilon={epsilon!r}; give a share of the attention between 0 and 1, as 0.05.")


def unique_rows(attention: Tensor, values: Tensor, *, visible: Tensor | None = None) -> Tensor:
    """(n_query,) boolean: the rows of one head that no other attention row shares its output with."""
    space = null_space(values, visible=visible)
    free = space.simplex_null_dimension.expand(attention.shape[:1]) if visible is None else space.simplex_null_dimension
    seen = torch.ones_like(free, dtype=torch.bool) if visible is None else visible.any(-1).expand(free.shape)
    return (free == 0) & seen


@one_thread()
def row_verdicts(
    attention: Tensor,
    values: Tensor,
    *,
    epsilon: float = 0.05,
    rows: Iterable[int] | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """The verdict on each of `rows` of one head.

    Args:
        attention: (n_query, n_key), rows ≥ 0 that sum to 1 (a sink is one more key of value 0).
        values: (n_key, d_v).
        epsilon: what counts as a weight, as certain, and as outweighing.
        rows: which rows; None, all.
        visible: boolean, broadcastable to attention.

    Returns:
        (n_query,) int64 of `RowVerdict`; NONE for rows not asked for and for rows that see nothing.

    >>> attention, values = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]), torch.tensor([[1.0], [0.0], [0.0]])
    >>> row_verdicts(attention, values).tolist()  # the first weight is pinned down; the other two share what is left
    [1, 1]
    >>> row_verdicts(torch.tensor([[0.1, 0.5, 0.4]]), values).tolist()
    [3]
    """
    check_epsilon(epsilon)
    check_pair(attention, values, visible)
    if attention.ndim != 2 or values.ndim != 2:
        raise InputError(f"attention {shape(attention)}, values {shape(values)}: expected one head; index it first.")
    unique = unique_rows(attention, values, visible=visible)
    return rows_not_unique(attention, values, unique, epsilon=epsilon, rows=rows, visible=visible)


@one_thread()
def rows_not_unique(
    attention: Tensor,
    values: Tensor,
    unique: Tensor,
    *,
    epsilon: float,
    rows: Iterable[int] | None,
    visible: Tensor | None,
) -> Tensor:
    """`row_verdicts` where it is known which rows are unique, (n_query,)."""
    n_query = len(attention)
    mask = torch.ones(attention.shape, dtype=torch.bool)
    if visible is not None:
        mask = full_mask(visible, *attention.shape)
    verdicts = torch.full((n_query,), int(RowVerdict.NONE))
    wanted = torch.zeros(n_query, dtype=torch.bool)
    wanted[list(range(n_query) if rows is None else rows)] = True
    wanted &= mask.any(-1)
    verdicts[wanted & unique] = RowVerdict.UNIQUE
    left = (wanted & ~unique).nonzero().squeeze(-1)
    if not len(left):
        return verdicts
    seen = mask[left]
    bounds = weight_bounds(attention[left], values, visible=None if visible is None else seen)
    verdicts[left] = by_bounds(attention[left], bounds, epsilon)
    undecided = (verdicts[left] == RowVerdict.NONE).nonzero().squeeze(-1)
    at = left[undecided]
    verdicts[at] = solved_rows(attention[at], values, seen[undecided], bounds.upper[undecided], epsilon)[0]
    return verdicts


def by_bounds(attention: Tensor, bounds: WeightBounds, epsilon: float) -> Tensor:
    """The verdicts (…, n_query) that closed-form bounds of the same shape prove; NONE where they do not suffice."""
    heaviest = attention.argmax(-1, keepdim=True)
    total = attention.to(torch.float64).sum(-1, keepdim=True)
    top = attention.to(torch.float64).gather(-1, heaviest) / total
    floor, ceiling = bounds.lower.gather(-1, heaviest), bounds.upper.gather(-1, heaviest)
    others = bounds.upper.scatter(-1, heaviest, 0.0).amax(-1, keepdim=True)
    certain = ((top > epsilon) & (ceiling - floor <= epsilon) & (others - floor <= epsilon)).squeeze(-1)
    flat = bounds.upper.amax(-1) <= epsilon
    verdicts = torch.full(attention.shape[:-1], int(RowVerdict.NONE))
    verdicts[certain] = RowVerdict.CERTAIN
    verdicts[flat] = RowVerdict.FLAT
    return verdicts


@one_thread()
def solved_rows(
    attention: Tensor, values: Tensor, visible: Tensor, upper: Tensor, epsilon: float, *, widths: bool = False
) -> tuple[Tensor, Tensor]:
    """The verdicts on some rows of one head by linear programs, and the width of each row's heaviest weight.

    attention, visible, upper (m, n_key): rows that are not unique, what they see, and their closed-form upper bounds.
    Without `widths` the second tensor is NaN: an open row needs fewer programs then.
    """
    verdicts = np.full(len(attention), int(RowVerdict.NONE))
    width = np.full(len(attention), np.nan)
    rows, mask = as_rows(attention, values, visible).numpy(), visible.numpy()
    interior = InteriorPoint(values.detach().to(torch.float64).numpy(), rank_eps(values.dtype))
    roomy = np.flatnonzero(interior.roomy(mask))
    if len(roomy):
        many = _Rows(interior, rows[roomy], mask[roomy], upper.numpy()[roomy], epsilon)
        verdicts[roomy] = many.verdicts(whole=widths)
        width[roomy] = many.width
    # What is left to the simplex method: rows that see few keys, and what interior points did not prove.
    solver: Polytope | None = None
    for place in np.flatnonzero((verdicts == RowVerdict.NONE) | (np.isnan(width) & widths)):
        if solver is None:
            solver = Polytope(rows[place], interior.values, perturbed=False, constraints=interior.constraints)
        solver.move_to(rows[place], mask[place])
        one = _Row(solver, mask[place])
        if widths:
            width[place] = one.top_width()
        verdicts[place] = _solved(one, upper[place].numpy(), epsilon)
    return torch.from_numpy(verdicts), torch.from_numpy(width)


class _Rows:
    """Rows of one head by interior points, in the steps of `_solved`, many rows at once.

    rows, visible, upper (m, n_key). A program is left as soon as its point shows that the row is open: every point on the
    way is an alternative. What cannot be shown or proved so stays NONE, and its width NaN.
    """

    def __init__(self, interior: InteriorPoint, rows: Array, visible: Booleans, upper: Array, epsilon: float) -> None:
        self.interior, self.rows, self.visible, self.upper, self.epsilon = interior, rows, visible, upper, epsilon
        self.top = rows.argmax(1)
        self.weight = rows.max(1)
        self.width = np.full(len(rows), np.nan)
        self._verdicts = np.full(len(rows), int(RowVerdict.NONE))
        self._more = epsilon + GAP
        self._close = DUALITY_GAP

    def verdicts(self, *, whole: bool) -> npt.NDArray[np.int64]:
        """(m,) of `RowVerdict`. whole: solve both ends of every heaviest weight to the last digit, for `width`."""
        self._close = DUALITY_GAP if whole else self.epsilon / 50
        heavy = np.flatnonzero(self.weight > self.epsilon)
        self._raise_one(np.flatnonzero(self.weight <= self.epsilon))
        least = self._end(heavy, 1.0, None if whole else self.weight[heavy] - self._more)
        left = np.arange(len(heavy)) if whole else np.flatnonzero(self._verdicts[heavy] == RowVerdict.NONE)
        heavy, low, lowest = heavy[left], np.maximum(least.proved[left], 0.0), least.attained[left]
        most = self._end(heavy, -1.0, None if whole else -(lowest + self._more))
        high, highest = np.minimum(-most.proved, 1.0), -most.attained
        if whole:
            exact = least.solved[left] & most.solved
            self.width[heavy[exact]] = (high - low)[exact]
        self._verdicts[heavy[least.feasible[left] & most.feasible & (highest - lowest > self._more)]] = RowVerdict.OPEN
        # cᵀx − proved bounds what any key may weigh, from either end.
        slope = np.maximum(least.excess[left], most.excess)
        room = np.maximum(high - low, 0.0)[:, None] / np.where(slope > 0, slope, 1.0)
        ceiling = np.where(slope > 0, np.minimum(self.upper[heavy], room), self.upper[heavy])
        kept = (self._verdicts[heavy] == RowVerdict.NONE) & (high - low <= self.epsilon)
        self._outweighed(heavy[kept], low[kept], ceiling[kept])
        return self._verdicts

    def _minima(self, at: Integers, signed: tuple[tuple[Integers, float], ...], target: Array | None) -> Minima:
        """min Σ s·x_j for rows at (t,) and their keys (t,), each with its sign."""
        costs = np.zeros((len(at), self.rows.shape[1]))
        for keys, sign in signed:
            costs[np.arange(len(at)), keys] += sign
        return self.interior.minima(costs, self.rows[at], self.visible[at], target=target, close=self._close)

    def _end(self, at: Integers, sign: float, target: Array | None) -> Minima:
        """The least sign·(heaviest weight) of rows at (t,); rows that a point on the way shows to be open are marked."""
        minima = self._minima(at, ((self.top[at], sign),), target)
        own = minima.points[np.arange(len(at)), self.top[at]]
        moved = np.maximum(np.abs(own - self.weight[at]), (minima.points - own[:, None]).max(1, initial=0.0))
        self._verdicts[at[minima.feasible & (moved > self._more)]] = RowVerdict.OPEN
        return minima

    def _raise_one(self, at: Integers) -> None:
        """Rows without a weight above ε: open when the key whose bound promises most can exceed it."""
        found = self._minima(at, ((self.upper[at].argmax(1), -1.0),), np.full(len(at), -self._more))
        self._verdicts[at[found.feasible & (found.points.max(1, initial=0.0) > self._more)]] = RowVerdict.OPEN

    def _outweighed(self, at: Integers, low: Array, ceiling: Array) -> None:
        """Rows whose heaviest weight keeps to ε: certain unless some other key can outweigh it by more than ε.

        low (t,), ceiling (t, n): proved of the heaviest weight, and of every key's. x_j ≤ 1 − x_top, too.
        """
        ceiling = np.minimum(ceiling, 1.0 - low[:, None])
        ceiling[np.arange(len(at)), self.top[at]] = 0.0
        own, keys = np.nonzero(ceiling - low[:, None] > self.epsilon)
        sure = np.ones(len(at), dtype=bool)
        target = np.full(len(own), -self._more)
        found = self._minima(at[own], ((keys, -1.0), (self.top[at[own]], 1.0)), target)
        np.logical_and.at(sure, own, -found.proved <= self.epsilon)
        self._verdicts[at[sure]] = RowVerdict.CERTAIN
        self._verdicts[at[own[found.feasible & (found.attained < target)]]] = RowVerdict.OPEN


class _Row:
    """One row in the solver: largest values of linear functions, attained by an alternative and proved by a dual."""

    def __init__(self, solver: Polytope, visible: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> None:
        self.solver, self.visible, self.row = solver, visible, solver.row
        self.values = solver.values[visible]
        self._ends: dict[tuple[int, float], tuple[float, float, Array]] = {}

    def end(self, key: int, sign: float) -> tuple[float, float, Array]:
        """`largest` of one signed weight, solved once."""
        if (key, sign) not in self._ends:
            self._ends[key, sign] = self.largest((key, sign))
        return self._ends[key, sign]

    def largest(self, *signed: tuple[int, float]) -> tuple[float, float, Array]:
        """max Σ s·x_j over the alternatives: what is attained, what is proved, and the vertex."""
        cost = np.zeros(len(self.row))
        for key, sign in signed:
            cost[key] -= sign
        vertex = self.solver.vertex(cost)
        proved = proved_minimum(
            cost[None, self.visible], self.solver.dual()[None], self.row[self.visible], self.values, 0.0
        )
        return -float(cost @ vertex), -float(proved[0]), vertex

    def top_width(self) -> float:
        """Between which two proved ends the heaviest weight moves: their distance."""
        top = int(np.argmax(self.row))
        low = max(-self.end(top, -1.0)[1], 0.0)
        return min(self.end(top, 1.0)[1], 1.0) - low


def _solved(row: _Row, upper: Array, epsilon: float) -> RowVerdict:
    """The verdict on a row that the closed-form bounds left open; `upper` (n_key,) are those bounds."""
    top = int(np.argmax(row.row))
    weight = float(row.row[top])
    more = epsilon + GAP
    if weight <= epsilon:
        # Flat, unless some alternative has a weight above ε; the keys whose bounds promise most come first.
        for key in np.argsort(-upper, kind="stable"):
            if upper[key] <= epsilon:
                return RowVerdict.FLAT
            attained, proved, vertex = row.largest((int(key), 1.0))
            if max(attained, float(vertex.max())) > more or proved > epsilon:
                return RowVerdict.OPEN
        return RowVerdict.FLAT
    attained, proved, vertex = row.end(top, -1.0)
    low = max(-proved, 0.0)
    if weight + attained > more or float((vertex - vertex[top]).max()) > more:
        return RowVerdict.OPEN
    attained, proved, vertex = row.end(top, 1.0)
    if min(proved, 1.0) - low > epsilon or float((vertex - vertex[top]).max()) > more:
        return RowVerdict.OPEN
    for key in np.flatnonzero(np.minimum(upper, 1.0 - low) - low > epsilon):  # x_j ≤ 1 − x_top
        if key != top and row.largest((int(key), 1.0), (top, -1.0))[1] > epsilon:
            return RowVerdict.OPEN
    return RowVerdict.CERTAIN
