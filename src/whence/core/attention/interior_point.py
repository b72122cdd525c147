"""Many linear programs over the attention polytopes of one head at once, by an interior-point method.

min cᵀx over P = {x ≥ 0, qᵀx = qᵀa}, one program for each (row a, cost c): Mehrotra's predictor–corrector ("On the
implementation of a primal-dual interior point method", SIAM J. Optim. 1992). All programs share q, so that the normal
matrices qᵀDq of a whole batch are one matrix product. A softmax row is positive, hence itself a strictly feasible start,
and 1 ∈ span q gives a dual one: every point on the way is an attention row with the same output, every dual on the way
proves a bound. Nothing is believed: a program counts as solved when what its point attains and what its dual proves
(`proved_minimum`) are within `SOLVED` of each other; the caller hands the others to the simplex method.

Tried against HiGHS, warm-started, row by row, on MiniLM and SmolLM2: it wins where a row sees clearly more keys than
there are equalities. Polytopes with next to no interior are left to HiGHS: see `roomy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from whence.core.attention.polytope import Constraints, proved_minimum
from whence.core.numerics.arrays import Array, Booleans
from whence.core.numerics.threads import one_thread
from whence.core.numerics.tolerances import DUALITY_GAP, FEASIBLE, FIRST_WEIGHT, SOLVED

BATCH = 256
"""Programs at once: their points and normal matrices stay in the cache."""

STEPS = 18
"""After so many a program that is not solved is sooner done by the simplex method."""

_FEW = 8
_ALMOST = 0.995  # of the way to the boundary


@dataclass(frozen=True)
class Minima:
    """Programs and how far they came: points (k, n), their cost attained (k,), what is proved of the minimum (k,).

    feasible (k,): the point is an alternative, to 1e-9. solved (k,): it is, and what it attains is proved to `SOLVED`.
    excess (k, n) ≥ 0: what each key costs more than the dual allows for: cᵀx ≥ proved + excessᵀx for every x in P.
    duals (k, d_v): the proofs, u of `proved_minimum`.
    """

    points: Array
    attained: Array
    proved: Array
    feasible: Booleans
    solved: Booleans
    excess: Array
    duals: Array


class InteriorPoint:
    """The programs of one head: values (n_key, d_v), float64."""

    def __init__(self, values: Array, eps: float) -> None:
        self.values = values
        self.constraints = Constraints.of(values, eps)
        self._q = torch.from_numpy(self.constraints.q)

    @cached_property
    def _outer(self) -> tuple[Tensor, Tensor]:
        """Row by row the upper triangle of the outer product of a row of q with itself, and where its entries belong.

        (n_key, r(r + 1)/2) and (r(r + 1)/2,). Made when many programs are solved at once; a few do without.
        """
        rank = self._q.shape[1]
        products = torch.cat([self._q[:, j:] * self._q[:, j : j + 1] for j in range(rank)], 1)
        return products, torch.cat([torch.arange(j * rank + j, (j + 1) * rank) for j in range(rank)])

    def roomy(self, visible: Booleans) -> Booleans:
        """Which rows see enough keys, visible (m, n), for this to be the faster way."""
        return np.asarray(visible.sum(-1) >= 1.25 * self._q.shape[1])

    def minima(
        self,
        costs: Array,
        rows: Array,
        visible: Booleans,
        *,
        target: Array | None = None,
        close: float = DUALITY_GAP,
        steps: int = STEPS,
    ) -> Minima:
        """min cᵀx for costs (k, n) over the polytopes of rows (k, n) that see the keys visible (k, n).

        target (k,): a program is left as soon as its point costs less. close: or as soon as point and dual are so close.
        steps: or after so many of them.
        """
        points, duals = np.array(rows), np.zeros((len(rows), self._q.shape[1]))
        with one_thread():
            for first in range(0, len(rows), BATCH):
                some = slice(first, first + BATCH)
                below = np.full(len(costs[some]), -np.inf) if target is None else target[some]
                mask = None if visible[some].all() else torch.from_numpy(visible[some]).to(torch.float64)
                c, a = torch.from_numpy(costs[some]), torch.from_numpy(rows[some])
                found = self._solve(c, a, mask, torch.from_numpy(below), close, steps)
                points[some], duals[some] = (t.numpy() for t in found)
        attained = (costs * points).sum(1)
        value_duals = duals @ self.constraints.dual_map.T
        proved = proved_minimum(costs, value_duals, rows, self.values, 0.0, allowance=2.0, visible=visible)
        feasible = np.abs((points - rows) @ self.constraints.q).max(1) <= FEASIBLE
        excess = np.where(visible, costs - value_duals @ self.values.T, np.inf)
        excess = np.where(visible, excess - excess.min(1, keepdims=True), 0.0)
        return Minima(points, attained, proved, feasible, feasible & (attained - proved <= SOLVED), excess, value_duals)

    def _solve(
        self, c: Tensor, a: Tensor, mask: Tensor | None, below: Tensor, close: float, steps: int
    ) -> tuple[Tensor, Tensor]:
        """The last point (k, n) and multipliers (k, r) of each program. mask (k, n): 1 at visible keys; None, all."""
        q = self._q
        points, multipliers = a.clone(), a.new_zeros(len(a), q.shape[1])
        at = torch.arange(len(a))  # the programs still under way
        right = a @ q
        x = a.clamp(min=FIRST_WEIGHT)
        w = torch.ones_like(a) if mask is None else mask
        x = x if mask is None else x * w + (1 - w)  # hidden keys stay at 1 and count nowhere
        count = w.sum(-1, keepdim=True)
        y = a.new_zeros(len(a), q.shape[1])
        y[:, -1] = c.amin(-1) - 1.0  # q's last column is 1: a dual with every reduced cost at least 1
        s = c - y @ q.T
        for _ in range(steps):
            active = x if mask is None else x * w
            missing = right - active @ q
            gap = active * s
            cost = (c * active).sum(-1)
            done = (cost - (right * y).sum(-1)).abs() <= close
            done = (done | (cost < below)) & (missing.abs().amax(-1) <= FEASIBLE)
            if bool(done.any()):
                points[at[done]], multipliers[at[done]] = active[done], y[done]
                left = ~done
                if not bool(left.any()):
                    return points, multipliers
                x, y, s, c, w, count, right, below, at, missing, gap, active = (
                    t[left] for t in (x, y, s, c, w, count, right, below, at, missing, gap, active)
                )
            d = active / s
            factor = _cholesky(self._normal(d))
            mean = gap.sum(-1, keepdim=True) / count
            # Predictor: straight for complementarity 0. Its success sets how far to centre, its product the correction.
            dy = _backsolve(missing + active @ q, factor)
            ds = -(dy @ q.T)
            dx = -active - d * ds
            ahead = (x + _reach(x, dx) * dx) * (s + _reach(s, ds * w) * ds) * w
            centring = (ahead.sum(-1, keepdim=True) / count / mean) ** 3
            move = (centring * mean - gap - dx * ds) * w / s
            dy = _backsolve(missing - move @ q, factor)
            ds = -(dy @ q.T)
            dx = move - d * ds
            x = x + _ALMOST * _reach(x, dx) * dx
            along = _ALMOST * _reach(s, ds * w)
            y, s = y + along * dy, torch.where(w > 0, s + along * ds, 1.0)
        points[at], multipliers[at] = x if mask is None else x * w, y
        return points, multipliers

    def _normal(self, d: Tensor) -> Tensor:
        """qᵀ diag(d) q, (k, r, r); of many programs the lower triangle alone, the rest is 0."""
        if len(d) < _FEW:  # then the outer products are more to read than to multiply
            return (self._q.T * d[:, None]) @ self._q
        rank = self._q.shape[1]
        products, places = self._outer
        normal = d.new_zeros(len(d), rank * rank)
        normal[:, places] = d @ products
        return normal.view(-1, rank, rank).mT


def _cholesky(normal: Tensor) -> Tensor:
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(normal)
    if bool(failed.any()):
        diagonal = normal.diagonal(dim1=-2, dim2=-1)
        bad = failed > 0
        diagonal[bad] += 1e-11 * diagonal[bad].amax(-1, keepdim=True)
        factor = torch.linalg.cholesky_ex(normal)[0]
    return factor


def _backsolve(right: Tensor, factor: Tensor) -> Tensor:
    return torch.cholesky_solve(right.unsqueeze(-1), factor).squeeze(-1)


def _reach(at: Tensor, step: Tensor) -> Tensor:
    """The part of `step`, at most 1, that keeps `at` ≥ 0; (k, 1)."""
    fastest: Tensor = (-step / at).amax(-1, keepdim=True)
    return 1.0 / fastest.clamp(min=1.0)
