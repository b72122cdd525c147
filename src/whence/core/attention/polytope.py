"""The attention polytope: every attention row with the same head output, as one warm-started linear program.

P = {x ≥ 0, 1ᵀx = 1, xᵀV = aᵀV} (tolerance 0), or {…, |xᵀV − aᵀV| ≤ δ in every coordinate} with δ = tolerance · rms of
the output. One HiGHS model a row; only the objective changes between solves, so the last vertex stays feasible and
primal simplex continues from it (methods 1.2 (2)).

What a solver returns is never trusted. For any u ∈ R^{d_v}, with o = aᵀV,

    min_{x∈P} cᵀx  ≥  uᵀo − δ‖u‖₁ + min_j (c_j − v_jᵀu),

because x ≥ 0 and 1ᵀx = 1. `proved_minimum` evaluates the right side in float64, less what its own rounding could
amount to: that number, and not the solver's, is the bound reported, and anyone can recompute it from u.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from whence.core.numerics.arrays import Array, Booleans
from whence.core.numerics.basis import column_basis, unit_scale
from whence.core.numerics.tolerances import EPS64, FEASIBLE, INTERIOR_ZERO, SAME_ROW, SOLVER_ZERO
from whence.errors import MissingExtraError, WhenceError


def load_highs() -> ModuleType:
    """highspy, or an error that names what to install."""
    try:
        import highspy
    except ImportError as error:
        raise MissingExtraError(
            "exact intervals and witnesses need the HiGHS solver; install it with: pip install highspy "
            "(the closed-form bounds of whence.core.attention.bounds need nothing)."
        ) from error
    return highspy


def output_slack(row: Array, values: Array, tolerance: float) -> float:
    """δ = tolerance · rms of the head output: how far each output coordinate may move."""
    return tolerance * float(np.sqrt(np.mean((row @ values) ** 2)))


def proved_minimum(
    costs: Array,
    duals: Array,
    row: Array,
    values: Array,
    slack: float,
    *,
    allowance: float = 1.0,
    visible: Booleans | None = None,
) -> Array:
    """Rigorous lower bounds on min cᵀx over P, one for each (cost, dual) pair; no solver involved.

    costs (k, n), duals (k, d_v), row (n,) or a row for each pair (k, n), values (n, d_v), slack δ ≥ 0. Each is
    uᵀo − δ‖u‖₁ + min_j(c_j − v_jᵀu) less `allowance` times a bound on the rounding of these sums, the costs' own
    included. Reported bounds leave twice the rounding, so that a later check, whose sums may run in another order, still
    proves them with once. visible (k, n): the keys that each pair's row sees; None, all.
    """
    output = row @ values
    reduced = costs - duals @ values.T
    if visible is not None:
        reduced = np.where(visible, reduced, np.inf)
    size = np.abs(duals) @ np.abs(values).max(axis=0, initial=0.0) + np.abs(costs).max(axis=1, initial=0.0)
    rounding = allowance * 4 * sum(values.shape) * EPS64 * (size + slack * np.abs(duals).sum(1))
    bound = (duals * output).sum(1) - slack * np.abs(duals).sum(1) + reduced.min(axis=1)
    return np.asarray(bound - rounding, dtype=np.float64)


def closed_form(
    directions: Array, row: Array, values: Array, slack: float, *, allowance: float = 1.0
) -> tuple[Array, Array]:
    """Bounds on every weight from one direction w_j in value space each: lower and upper (n,), proved like any other.

    directions (n, d_v). With p_i = v_iᵀw_j the multiples −w_j/(p_j − min_{i≠j} p_i) and w_j/(p_j − max_{i≠j} p_i) are
    duals of "at most" and "at least". With w_j = (V − 1μᵀ)⁺e_j these are the closed-form bounds of
    `whence.core.attention.bounds`.
    """
    n = len(row)
    price = directions @ values.T
    own = price.diagonal().copy()
    np.fill_diagonal(price, np.inf)
    gap = own - price.min(axis=1, initial=np.inf)
    np.fill_diagonal(price, -np.inf)
    rise = own - price.max(axis=1, initial=-np.inf)
    ends = []
    for sign, room in ((1.0, rise), (-1.0, gap)):
        usable = np.isfinite(room) & (room > SAME_ROW)
        factor = np.where(usable, sign / np.where(usable, room, 1.0), 0.0)
        ends.append(
            proved_minimum(sign * np.eye(n), factor[:, None] * directions, row, values, slack, allowance=allowance)
        )
    return np.clip(ends[0], 0.0, 1.0), np.clip(-ends[1], 0.0, 1.0)


@dataclass(frozen=True)
class Constraints:
    """The equalities of P as qᵀx = qᵀa, q (n, r) with orthogonal columns of length √n, the last of them 1.

    The simplex method then works on a perfectly conditioned matrix, and a rank-deficient V costs nothing. Directions
    below the rank tolerance are dropped: P only grows. dual_map (d_v, r): multipliers y of these equalities as u in the
    units of the values; g = qy lies in span[V − 1μᵀ, 1], the part along 1 cancels in the bound, u = (V − 1μᵀ)⁺g.
    rank: of [V, 1].
    """

    q: Array
    dual_map: Array
    rank: int

    @classmethod
    def of(cls, values: Array, eps: float) -> Constraints:
        """From values (n, d_v); eps: `rank_eps` of the dtype that they came in."""
        n = len(values)
        scaled, scale = unit_scale(torch.from_numpy(values).unsqueeze(0))
        body = scaled[0].numpy()
        centred = body - body.mean(axis=0)
        basis = column_basis(scaled, None, eps, "simplex")
        if bool(basis.identified[0]):
            u, s, _ = np.linalg.svd(np.column_stack([centred, np.ones(n)]), full_matrices=False)
            q = u[:, s > s[0] * n * EPS64]
        else:
            q = basis.q[0].numpy()
            q = q[:, np.abs(q).max(axis=0) > 0]
        q = q * np.sqrt(n)
        back = np.linalg.pinv(centred, rcond=max(body.shape) * EPS64) @ q
        return cls(q, back / float(scale), int(basis.rank[0]))


@dataclass(frozen=True)
class Optimum:
    """One solved program: the vertex reached (n,), the dual u (d_v,) and the lower bound that u proves."""

    vertex: Array
    dual: Array
    bound: float


class Polytope:
    """P for one row; `minimum(c)` returns a vertex and a proof. Not for use from two threads at once.

    row (n,) sums to 1, values (n, d_v): both float64 and restricted to the visible keys. perturbed: let the solver
    perturb bounds against cycling; without it thousands of programs of one head take half the steps, and one that
    does not end is solved again with it. constraints: those of the values, where they are known (tolerance 0).
    """

    def __init__(
        self,
        row: Array,
        values: Array,
        *,
        tolerance: float = 0.0,
        eps: float = EPS64,
        perturbed: bool = True,
        constraints: Constraints | None = None,
    ) -> None:
        self.row, self.values = row, values
        self.slack = output_slack(row, values, tolerance)
        n = len(row)
        if tolerance == 0.0:
            self._constraints = constraints or Constraints.of(values, eps)
            matrix, self.rank = self._constraints.q, self._constraints.rank
            low = high = row @ matrix
        else:
            centred = values - values.mean(axis=0)
            spread = np.abs(centred).max(axis=0)
            self._unit = np.where(spread > 0, spread, 1.0)
            matrix = np.column_stack([centred / self._unit, np.ones(n)])
            middle = row @ matrix
            room = np.append(self.slack / self._unit, 0.0)
            low, high = middle - room, middle + room
            self.rank = 1
        self._tolerant = tolerance != 0.0
        self._highs = self._model(matrix, low, high)
        if not perturbed:
            self._perturb(0.0, limit=50 * n + 1000)
        self.solved = 0

    def _perturb(self, much: float, *, limit: int) -> None:
        self._highs.setOptionValue("simplex_scale_strategy", 0 if much == 0.0 else 2)
        self._highs.setOptionValue("primal_simplex_bound_perturbation_multiplier", much)
        self._highs.setOptionValue("simplex_iteration_limit", limit)

    def _model(self, matrix: Array, low: Array, high: Array) -> Any:
        highspy = load_highs()
        n, rows = matrix.shape
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = n, rows
        lp.col_cost_ = np.zeros(n)
        lp.col_lower_, lp.col_upper_ = np.zeros(n), np.full(n, highspy.kHighsInf)
        lp.row_lower_, lp.row_upper_ = low, high
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.arange(0, n * rows + 1, rows)
        lp.a_matrix_.index_ = np.tile(np.arange(rows), n)
        lp.a_matrix_.value_ = np.ascontiguousarray(matrix).ravel()
        highs = highspy.Highs()
        for name, value in (
            ("output_flag", False),
            ("threads", 1),
            ("parallel", "off"),
            ("presolve", "off"),
            ("solver", "simplex"),
            ("simplex_strategy", 4),  # primal: the last vertex stays feasible when only the objective changes
            ("primal_feasibility_tolerance", FEASIBLE),
            ("dual_feasibility_tolerance", FEASIBLE),
        ):
            highs.setOptionValue(name, value)
        highs.passModel(lp)
        self._columns = np.arange(n, dtype=np.int32)
        self._optimal = highspy.HighsModelStatus.kOptimal
        return highs

    def minimum(self, cost: Array, visible: Booleans | None = None) -> Optimum:
        """min cᵀx over P: the vertex, the dual and what the dual proves. cost (n,); visible (n,): as told to `move_to`."""
        vertex = self.vertex(cost)
        dual = self.dual()
        keys = None if visible is None else visible[None]
        bound = proved_minimum(cost[None], dual[None], self.row, self.values, self.slack, allowance=2.0, visible=keys)
        return Optimum(vertex, dual, float(bound[0]))

    def dual(self) -> Array:
        """The dual u (d_v,) of the program solved last."""
        return self._value_dual(np.array(self._highs.getSolution().row_dual))

    def vertex(self, cost: Array) -> Array:
        """A vertex of P that minimises cᵀx, as the solver returns it: entries may be off by 1e-9."""
        highs = self._highs
        highs.changeColsCost(len(cost), self._columns, cost)
        highs.run()
        self.solved += 1
        if highs.getModelStatus() != self._optimal:
            self._perturb(1.0, limit=2**31 - 1)
            highs.clearSolver()
            highs.run()
        if highs.getModelStatus() != self._optimal:
            status = highs.modelStatusToString(highs.getModelStatus())
            raise WhenceError(
                f"HiGHS ended with status {status!r} on a program that has a solution (the row itself); "
                "please report the row and its values."
            )
        return np.array(highs.getSolution().col_value)

    def move_to(self, row: Array, visible: Booleans) -> None:
        """Turn to another row of the same head (tolerance 0 only); hidden keys are fixed at 0.

        The constraint matrix stays, so the last basis is still a good place to start from.
        """
        self.row = row
        right = row @ self._constraints.q
        index = np.arange(len(right), dtype=np.int32)
        self._highs.changeRowsBounds(len(right), index, right, right)
        self._highs.changeColsBounds(len(row), self._columns, np.zeros(len(row)), np.where(visible, np.inf, 0.0))

    def distance(self, other: Array) -> float:
        """½‖x − a‖₁: how far another row is from this one."""
        return 0.5 * float(np.abs(other - self.row).sum())

    def _value_dual(self, row_dual: Array) -> Array:
        """The solver's multipliers turned into u ∈ R^{d_v}, in the units of the values as given."""
        if self._tolerant:
            return np.asarray(row_dual[:-1] / self._unit, dtype=np.float64)
        return np.asarray(self._constraints.dual_map @ row_dual, dtype=np.float64)

    def polished(self, vertex: Array) -> Array:
        """A vertex as an exact attention row: ≥ 0, sum 1, the equalities solved again on its support."""
        if self._tolerant:
            x = np.clip(vertex, 0.0, None)
            return np.asarray(x / x.sum(), dtype=np.float64)
        return polished(vertex, self.row, self._constraints.q)


def polished(vertex: Array, row: Array, q: Array) -> Array:
    """A vertex (n,) of a solver as an exact attention row: ≥ 0, sum 1, qᵀx = qᵀa, q (n, r), solved again on its support."""
    x = np.clip(vertex, 0.0, None)
    for least in (SOLVER_ZERO, INTERIOR_ZERO):  # an interior point's zeros are small numbers
        support = x > least
        exact = np.zeros_like(x)
        exact[support] = x[support] + np.linalg.lstsq(q[support].T, (row - x * support) @ q, rcond=None)[0]
        if exact.min() >= 0.0 and np.abs((exact - row) @ q).max() <= np.abs((x - row) @ q).max():
            x = exact
            break
    return np.asarray(x / x.sum(), dtype=np.float64)
