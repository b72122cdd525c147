"""Certificates: how far could this attention row have been different with the same head output?

The null dimension alone misleads (rows of equal dimension can move by 0.00 or by 0.91 in total variation). A
certificate gives the exact interval of each shown weight, the largest mass the keys not shown could carry, and which
shown key certainly outweighs which, each with a dual vector as proof. `Certificate.check()` verifies all of them with
dot products and no solver. METHODS 1.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from whence.core.attention.bounds import weight_bounds
from whence.core.attention.null_space import null_space
from whence.core.attention.polytope import Array, Polytope, load_highs, output_slack, proved_minimum
from whence.core.numerics.checks import as_row
from whence.core.numerics.tolerances import rank_eps
from whence.errors import InputError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Certificate:
    """What the head output proves about one attention row.

    row (n_key,), values (n_key, d_v), visible (n_key,): what was certified, in float64, the row divided by its sum.
    tolerance: how far the output may move, as a share of its rms (0: not at all).
    dimension: of the set of alternatives (0: the row is unique). rank: of [V, 1]. condition: of V − 1μᵀ.
    keys (k,): the keys with exact intervals, heaviest first; lower, upper (k,): every alternative's weight on them lies
    between; lower_duals, upper_duals (k, d_v): the proofs.
    outside: the largest mass that all other visible keys together can have; outside_dual (d_v,).
    pairs (p, 2): keys (i, j); gaps (p,): every alternative has x_i − x_j ≥ gap, so a positive gap orders them for
    certain; pair_duals (p, d_v).
    bound_lower, bound_upper (n_key,): closed-form bounds for every key (tolerance 0; otherwise 0 and 1).
    """

    row: Tensor
    values: Tensor
    visible: Tensor
    tolerance: float
    dimension: int
    rank: int
    condition: float
    keys: Tensor
    lower: Tensor
    upper: Tensor
    lower_duals: Tensor
    upper_duals: Tensor
    outside: float
    outside_dual: Tensor
    pairs: Tensor
    gaps: Tensor
    pair_duals: Tensor
    bound_lower: Tensor
    bound_upper: Tensor

    @property
    def weights(self) -> Tensor:
        """The row's own weights on `keys`."""
        return self.row[self.keys]

    @property
    def certain(self) -> Tensor:
        """(p,) boolean: pair (i, j) is certainly in this order."""
        return self.gaps > 0

    def check(self) -> bool:
        """Verify every bound from its dual vector alone: weak duality, dot products, no solver.

        For a cost c and any u, each alternative x has cᵀx ≥ uᵀo − δ‖u‖₁ + min_j (c_j − v_jᵀu). True when every number
        in this certificate is one that its dual proves, and the row itself satisfies all of them.
        """
        seen = self.visible.numpy()
        row, values = self.row.numpy()[seen], self.values.numpy()[seen]
        slack = output_slack(row, values, self.tolerance)
        place = np.full(len(seen), -1)
        place[seen] = np.arange(seen.sum())
        n, keys = len(row), place[self.keys.numpy()]
        if (keys < 0).any():
            return False

        def proved(costs: Array, duals: Tensor) -> Array:
            if not len(costs):
                return np.zeros(0)
            return proved_minimum(costs, duals.numpy(), row, values, slack)

        single = np.eye(n)[keys]
        out = _outside_cost(n, keys)
        order = np.zeros((len(self.pairs), n))
        first, second = place[self.pairs.numpy()].T if len(self.pairs) else (keys[:0], keys[:0])
        order[np.arange(len(order)), first] += 1
        order[np.arange(len(order)), second] -= 1
        # x ≥ 0 and Σx = 1 are proofs of their own.
        low = np.maximum(proved(single, self.lower_duals), 0.0)
        high = np.minimum(-proved(-single, self.upper_duals), 1.0)
        mass = min(max(-float(proved(-out[None], self.outside_dual[None])[0]), 0.0), 1.0)
        gap = np.maximum(proved(order, self.pair_duals), -1.0)
        sound = (
            (self.lower.numpy() <= low).all()
            and (self.upper.numpy() >= high).all()
            and self.outside >= mass
            and (self.gaps.numpy() <= gap).all()
        )
        # Proved bounds hold for the row itself, up to the rounding of its own sum.
        w = row[keys]
        near = 1e-12
        true = (
            (self.lower.numpy() <= w + near).all()
            and (self.upper.numpy() >= w - near).all()
            and self.outside >= float(out @ row) - near
            and (self.gaps.numpy() <= order @ row + near).all()
        )
        return bool(sound and true)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for JSON; the proofs included."""
        fields: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            fields[name] = value.tolist() if isinstance(value, Tensor) else value
        return fields

    def plot(self, *, ax: Any = None) -> Any:
        """Bars with their intervals. See `whence.results.plotting_attention`; returns the Axes."""
        from whence.results.plotting_attention import plot_certificate

        return plot_certificate(self, ax)

    def to_frame(self) -> pd.DataFrame:
        """One line for each visible key: its weight, exact interval where solved, closed-form bounds."""
        import pandas as pd

        seen = self.visible.nonzero().squeeze(-1)
        frame = pd.DataFrame(
            {
                "key": seen.numpy(),
                "weight": self.row[seen].numpy(),
                "bound_lower": self.bound_lower[seen].numpy(),
                "bound_upper": self.bound_upper[seen].numpy(),
            }
        )
        exact = pd.DataFrame({"key": self.keys.numpy(), "lower": self.lower.numpy(), "upper": self.upper.numpy()})
        frame = frame.merge(exact, on="key", how="left")
        frame = frame[["key", "weight", "lower", "upper", "bound_lower", "bound_upper"]]
        return frame.sort_values("weight", ascending=False, ignore_index=True)


def certify_row(
    attention_row: Tensor,
    values: Tensor,
    *,
    top: int | None = 5,
    tolerance: float = 0.0,
    visible: Tensor | None = None,
    orders: bool = True,
) -> Certificate:
    """Exact intervals for the heaviest weights of one row, with proofs.

    Args:
        attention_row: (n_key,), ≥ 0, sum 1.
        values: (n_key, d_v) of its head. With tolerance > 0 the tolerance applies to each coordinate of these, so
            pass V·W to allow a change of the projected output.
        top: how many of the heaviest weights; None for all visible keys.
        tolerance: allow each output coordinate to move by this share of the output's rms; the intervals widen.
        visible: (n_key,) boolean, True where the row may look.
        orders: also certify the order of the shown keys (neighbours, and the heaviest against each other one).

    >>> row, values = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([[1.0], [0.0], [0.0]])
    >>> certificate = certify_row(row, values)
    >>> certificate.keys.tolist(), certificate.dimension
    ([0, 1, 2], 1)
    >>> [round(x, 6) for x in certificate.upper.tolist()]
    [0.5, 0.5, 0.5]
    >>> certificate.check()
    True
    """
    row, values64, seen = as_row(attention_row, values, visible)
    if not 0.0 <= tolerance < float("inf"):
        raise InputError(f"tolerance={tolerance!r}; give a share of the output's rms, 0 for no change at all.")
    if top is not None and top < 1:
        raise InputError(f"top={top!r}; give at least 1, or None for every visible key.")
    load_highs()
    place = seen.nonzero().squeeze(-1)
    a, v = row[seen].numpy(), values64[seen].numpy()
    n, width = v.shape
    eps = rank_eps(values.dtype)
    space = null_space(values[seen])
    solver = Polytope(a, v, tolerance=tolerance, eps=eps)
    keys = np.argsort(-a, kind="stable")[: n if top is None else min(top, n)]
    unique = tolerance == 0.0 and int(space.simplex_rank) == n

    lower, upper = np.zeros(len(keys)), np.ones(len(keys))
    lower_duals, upper_duals = np.zeros((len(keys), width)), np.zeros((len(keys), width))
    touched = np.zeros(n, dtype=bool)  # some vertex has exactly no weight here: the lower end is 0, proved by x ≥ 0
    for k, j in enumerate(keys):
        cost = np.zeros(n)
        cost[j] = -1.0
        best = solver.minimum(cost)
        upper[k], upper_duals[k] = min(-best.bound, 1.0), best.dual
        touched |= best.vertex <= 0.0
    for k, j in enumerate(keys):
        if touched[j] and not unique:
            continue
        cost = np.zeros(n)
        cost[j] = 1.0
        best = solver.minimum(cost)
        lower[k], lower_duals[k] = max(best.bound, 0.0), best.dual
        touched |= best.vertex <= 0.0

    # Maximal mass outside = minus the minimum of minus it.
    best = solver.minimum(-_outside_cost(n, keys))
    outside, outside_dual = min(max(-best.bound, 0.0), 1.0), best.dual

    pairs = _pairs(keys if orders else keys[:0])
    gaps, pair_duals = np.zeros(len(pairs)), np.zeros((len(pairs), width))
    for p, (i, j) in enumerate(pairs):
        cost = np.zeros(n)
        cost[i], cost[j] = 1.0, -1.0
        best = solver.minimum(cost)
        gaps[p], pair_duals[p] = max(best.bound, -1.0), best.dual

    if tolerance == 0.0:
        bounds = weight_bounds(row[None], values, visible=None if visible is None else seen[None])
        bound_lower, bound_upper = bounds.lower[0], bounds.upper[0]
    else:
        bound_lower, bound_upper = torch.zeros(len(row), dtype=torch.float64), seen.to(torch.float64)
    return Certificate(
        row=row,
        values=values64,
        visible=seen,
        tolerance=float(tolerance),
        dimension=_dimension(a, v, int(space.simplex_rank), tolerance, eps),
        rank=int(space.simplex_rank),
        condition=float(space.simplex_condition),
        keys=place[torch.from_numpy(keys)],
        lower=torch.from_numpy(lower),
        upper=torch.from_numpy(upper),
        lower_duals=torch.from_numpy(lower_duals),
        upper_duals=torch.from_numpy(upper_duals),
        outside=outside,
        outside_dual=torch.from_numpy(outside_dual),
        pairs=place[torch.from_numpy(pairs)] if len(pairs) else torch.zeros(0, 2, dtype=torch.int64),
        gaps=torch.from_numpy(gaps),
        pair_duals=torch.from_numpy(pair_duals),
        bound_lower=bound_lower,
        bound_upper=bound_upper,
    )


def _outside_cost(n: int, keys: np.ndarray[Any, Any]) -> Array:
    cost = np.ones(n)
    cost[keys] = 0.0
    return cost


def _pairs(keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Neighbours in the order of weight, and the heaviest key against each other one."""
    if not len(keys):
        return np.zeros((0, 2), dtype=np.int64)
    if len(keys) > 16:
        keys = keys[:16]  # top=None on a long row: orders far down the list are nobody's question
    pairs = [*pairwise(keys.tolist()), *((int(keys[0]), int(j)) for j in keys[2:])]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _dimension(row: Array, values: Array, rank: int, tolerance: float, eps: float) -> int:
    """dim P. A strictly positive row reaches n − rank([V, 1]); with a tolerance, the whole simplex's n − 1.

    Exact zeros (sparsemax, underflow) may not be free to rise: the support of P is found by one program, and
    dim P = |support| − rank([V_support, 1]).
    """
    n = len(row)
    if tolerance > 0.0 and output_slack(row, values, tolerance) > 0.0:
        return n - 1
    if (row > 0).all() or rank == n:
        return n - rank
    support = maximal_support(row, values)
    return int(support.sum()) - int(null_space(torch.from_numpy(values[support]).to(_dtype_of(eps))).simplex_rank)


def _dtype_of(eps: float) -> torch.dtype:
    return torch.float64 if eps == torch.finfo(torch.float64).eps else torch.float32


def maximal_support(row: Array, values: Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which keys some alternative gives weight to: one program, max Σt, t ≤ z, t ≤ 1, z in the cone over P.

    Weights that can rise only to less than about 1e-9 are not counted: no solver in float64 tells them from 0.
    """
    highspy = load_highs()
    n = len(row)
    free = row <= 0
    scaled = (values - values.mean(axis=0)) / max(float(np.abs(values).max()), np.finfo(np.float64).tiny)
    u, s, _ = np.linalg.svd(np.column_stack([scaled, np.ones(n)]), full_matrices=False)
    q = u[:, s > s[0] * n * _FLOOR] * np.sqrt(n)
    # Variables: t and r with z = t + r on the zero keys, z elsewhere, λ; constraint Qᵀz = λ Qᵀa.
    parts = [q[free], q, -(row @ q)[None]]
    matrix = np.concatenate(parts)
    count, rows = int(free.sum()), q.shape[1]
    total = len(matrix)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = total, rows
    lp.col_cost_ = np.concatenate([-np.ones(count), np.zeros(total - count)])
    lp.col_lower_ = np.zeros(total)
    lp.col_upper_ = np.concatenate([np.ones(count), np.full(total - count, highspy.kHighsInf)])
    lp.row_lower_ = lp.row_upper_ = np.zeros(rows)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.arange(0, total * rows + 1, rows)
    lp.a_matrix_.index_ = np.tile(np.arange(rows), total)
    lp.a_matrix_.value_ = matrix.ravel()
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.passModel(lp)
    highs.run()
    risen = np.array(highs.getSolution().col_value)[:count]
    support = ~free
    support[free] = risen > 0.5
    return np.asarray(support)


_FLOOR = 1e-12
