"""The rows of some heads with what their outputs leave free: a cheap bound, an exact program and an alternative of each.

methods 1.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whence.core.attention.interior_point import InteriorPoint
from whence.core.attention.polytope import Polytope, polished, proved_minimum
from whence.core.numerics.arrays import Array, Booleans
from whence.core.numerics.checks import as_row, check_pair, shape
from whence.core.numerics.masks import full_mask
from whence.core.numerics.tolerances import DUALITY_GAP, SOLVER_ZERO
from whence.errors import InputError

_EPS = float(np.finfo(np.float64).eps)
# The projection of the cost on [V, 1] is a dual; how far along it the best bound lies depends on the row.
_STRETCHES = np.array([1.0, 1.2, 1.5, 2.0, 3.0, 5.0])
# From so many keys on the interior-point method finds both ends of a range sooner (benchmarks/decide.py).
_MANY_KEYS = 512


class Heads:
    """The polytopes of some heads, one query at a time, each with a cheap bound and an exact program.

    attention (n_head, n_query, n_key), values (n_head, n_key, d_v), weights (n_head,) ≥ 0, visible broadcastable to
    attention. Rows are divided by their sums.
    """

    def __init__(self, attention: Tensor, values: Tensor, weights: Tensor, visible: Tensor | None = None) -> None:
        check_pair(attention, values, visible)
        if attention.ndim != 3 or values.ndim != 3 or len(values) != len(attention) or len(weights) != len(values):
            raise InputError(
                f"attention {shape(attention)}, values {shape(values)}, weights {shape(weights)}: expected "
                "(n_head, n_query, n_key), (n_head, n_key, d_v) and (n_head,)."
            )
        if bool((weights < 0).any()) or not bool((weights > 0).any()):
            raise InputError(
                f"weights {weights.tolist()}: a sum of heads needs weights that are 0 or more, one of them more."
            )
        whole = torch.ones(attention.shape, dtype=torch.bool)
        if visible is not None:
            whole = full_mask(visible, *attention.shape[1:]).expand(attention.shape)
        self.attention, self.values, self.visible, self.weights = attention, values, whole, weights.to(torch.float64)
        self._spaces: dict[tuple[int, bytes], HeadSpace] = {}
        self.programs = 0

    def at(self, query: int) -> list[HeadRow]:
        """The rows of one query, a head each."""
        rows = []
        for head in range(len(self.values)):
            row, values64, seen = as_row(self.attention[head, query], self.values[head], self.visible[head, query])
            key = (head, seen.numpy().tobytes())
            if key not in self._spaces:
                # A causal mask has another set of keys in every row: only the last one of each head is kept.
                self._spaces = {k: s for k, s in self._spaces.items() if k[0] != head}
                self._spaces[key] = HeadSpace(row[seen].numpy(), values64[seen].numpy())
            rows.append(HeadRow(row[seen].numpy(), seen.numpy(), self._spaces[key], float(self.weights[head])))
        return rows


class HeadSpace:
    """One head and one set of visible keys: the column space of [V, 1], and its linear program when it is needed."""

    def __init__(self, row: Array, values: Array) -> None:
        self.values = values
        scale = float(np.abs(values).max(initial=0.0)) or 1.0
        centred = (values - values.mean(axis=0)) / scale
        u, s, vt = np.linalg.svd(centred, full_matrices=False)
        rank = int((s > max(values.shape) * _EPS * max(float(s[0]), _EPS)).sum()) if len(s) else 0
        self.q = np.column_stack([u[:, :rank], np.full(len(values), len(values) ** -0.5)])
        self.to_dual = (vt[:rank].T / s[:rank]) @ u[:, :rank].T / scale
        self._first = row
        self._solver: Polytope | None = None
        self._interior: InteriorPoint | None = None

    def ends(self, row: Array, cost: Array) -> list[tuple[Array, Array]] | None:
        """Dual and point of min cᵀx and of min −cᵀx, by the interior-point method where a row sees very many keys.

        None where the simplex method is as fast, or where point and dual did not meet to `DUALITY_GAP` of the costs' range.
        """
        if len(row) < _MANY_KEYS or len(row) < 2 * self.q.shape[1]:
            return None
        if self._interior is None:
            self._interior = InteriorPoint(self.values, _EPS)
        costs, rows = np.stack([cost, -cost]), np.stack([row, row])
        met = self._interior.minima(costs, rows, np.ones(costs.shape, dtype=bool), close=DUALITY_GAP / 10, steps=30)
        if not (met.feasible & (met.attained - met.proved <= DUALITY_GAP * float(np.ptp(cost)))).all():
            return None
        return [(met.duals[i], polished(met.points[i], row, self._interior.constraints.q)) for i in (0, 1)]

    def solver(self, row: Array) -> Polytope:
        if self._solver is None:
            self._solver = Polytope(self._first, self.values, eps=_EPS, perturbed=False)
        self._solver.move_to(row, np.ones(len(row), dtype=bool))
        return self._solver


@dataclass(frozen=True)
class HeadRow:
    """One head's row (m,) on its visible keys, of which `visible` (n_key,) says which they are."""

    row: Array
    visible: Booleans
    space: HeadSpace
    weight: float

    def cheap(self, cost: Array) -> tuple[float, Array]:
        """A proved bound on min cᵀx and its dual, from the projection of c on [V, 1]; exact where the row is unique."""
        c = cost[self.visible]
        projected = self.space.q @ (self.space.q.T @ c)
        values = _STRETCHES * float(projected @ self.row) + (c[None] - _STRETCHES[:, None] * projected).min(axis=1)
        dual = self.space.to_dual @ (_STRETCHES[int(values.argmax())] * projected)
        return self.proved(c, dual), dual

    def exact(self, cost: Array) -> tuple[float, Array, Array]:
        """The proved minimum, its dual, and a vertex that attains it, polished; one linear program."""
        c = cost[self.visible]
        solver = self.space.solver(self.row)
        vertex = solver.vertex(c)
        dual = solver.dual()
        return self.proved(c, dual), dual, vertex

    def proved(self, cost: Array, dual: Array, allowance: float = 2.0) -> float:
        return proved(cost, dual, self.row, self.space.values, allowance)

    def polished(self, vertex: Array) -> Array:
        """The vertex as an attention row on all keys, its equalities solved again on its support."""
        full = np.zeros(len(self.visible))
        full[self.visible] = same_output(vertex, self.row, self.space.q)
        return full


def proved(cost: Array, dual: Array, row: Array, values: Array, allowance: float) -> float:
    """The bound on min cᵀx, cost (n,), that dual (d_v,) proves, less the rounding of its products and of the cost's size."""
    bound = float(proved_minimum(cost[None], dual[None], row, values, 0.0, allowance=allowance)[0])
    return bound - allowance * 4 * _EPS * float(np.abs(cost).max(initial=0.0))


def same_output(vertex: Array, row: Array, q: Array) -> Array:
    """The row nearest a solver's vertex (n,) that is ≥ 0 and has qᵀx = qᵀa, q (n, r), to rounding; tiny weights are zero."""
    x = np.clip(vertex, 0.0, None)
    support = x > SOLVER_ZERO
    for _ in range(8):
        inner = np.zeros_like(x)
        inner[support] = x[support]
        step, *_ = np.linalg.lstsq(q[support].T, q.T @ (row - inner), rcond=None)
        inner[support] += step
        if inner.min() >= 0.0:
            return inner
        support &= inner > 0.0
    return inner.clip(0.0)
