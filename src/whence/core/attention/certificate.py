"""Certificates: how far could this attention row have been different with the same head output?

The null dimension alone misleads (rows of equal dimension can move by 0.00 or by 0.91 in total variation). A
certificate gives the exact interval of each shown weight, the largest mass the keys not shown could carry, and which
shown key certainly outweighs which, each with a dual vector as proof. `Certificate.check()` verifies all of them with
dot products and no solver. methods 1.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from whence.core.attention.certificate_check import dimension_of, outside_cost, spectrum, verify
from whence.core.attention.polytope import Polytope, closed_form, load_highs
from whence.core.numerics.arrays import Array, Booleans
from whence.core.numerics.checks import as_row
from whence.core.numerics.tolerances import NO_WEIGHT, rank_eps
from whence.errors import InputError
from whence.results.short_repr import short_repr

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
    bound_lower, bound_upper (n_key,): closed-form bounds for every key; bound_directions (n_key, d_v): their proofs.
    eps: that of the rank tolerance, from the dtype the values came in.
    support (n_key,) boolean: the keys that some alternative gives weight to; interior (n_key,): an alternative that has
    weight on all of them; support_dual (d_v,): the proof that no other key can have any.
    """

    __repr__ = short_repr

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
    bound_directions: Tensor
    eps: float
    support: Tensor
    interior: Tensor
    support_dual: Tensor

    @property
    def weights(self) -> Tensor:
        """The row's own weights on `keys`."""
        return self.row[self.keys]

    @property
    def certain(self) -> Tensor:
        """(p,) boolean: pair (i, j) is certainly in this order."""
        return self.gaps > 0

    def check(self) -> bool:
        """Verify every number of this certificate, without a solver.

        For a cost c and any u, each alternative x has cᵀx ≥ uᵀo − δ‖u‖₁ + min_j (c_j − v_jᵀu). True when every end,
        bound and gap is what its dual proves and holds for the row itself, when rank and condition are those of the
        values, and when the dimension is proved: `interior` has weight on all of `support`, and `support_dual` that
        nothing else can have any. False for settings that cannot be, as a negative tolerance.
        """
        return verify(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for JSON; the proofs included."""
        fields: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            fields[name] = value.tolist() if isinstance(value, Tensor) else value
        return fields

    def plot(self, *, ax: Any = None) -> Any:
        """Bars with their intervals. See `whence.core.attention.plots`; returns the Axes."""
        from whence.core.attention.plots import plot_certificate

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
    rank, condition, directions = spectrum(v, eps)
    solver = Polytope(a, v, tolerance=tolerance, eps=eps)
    keys = np.argsort(-a, kind="stable")[: n if top is None else min(top, n)]
    unique = tolerance == 0.0 and rank == n

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

    # The solver minimises, so the largest mass outside is found as −min(−mass).
    best = solver.minimum(-outside_cost(n, keys))
    outside, outside_dual = min(max(-best.bound, 0.0), 1.0), best.dual

    pairs = _pairs(keys if orders else keys[:0])
    gaps, pair_duals = np.zeros(len(pairs)), np.zeros((len(pairs), width))
    for p, (i, j) in enumerate(pairs):
        cost = np.zeros(n)
        cost[i], cost[j] = 1.0, -1.0
        best = solver.minimum(cost)
        gaps[p], pair_duals[p] = max(best.bound, -1.0), best.dual

    bounds = closed_form(directions, a, v, solver.slack, allowance=2.0)
    support, interior, support_dual = _support(solver)

    def everywhere(visible_part: Array | Booleans) -> Tensor:
        whole = torch.zeros(len(row), *visible_part.shape[1:], dtype=torch.from_numpy(visible_part).dtype)
        whole[seen] = torch.from_numpy(visible_part)
        return whole

    return Certificate(
        row=row,
        values=values64,
        visible=seen,
        tolerance=float(tolerance),
        dimension=dimension_of(v, rank, solver.slack, support, eps),
        rank=rank,
        condition=condition,
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
        bound_lower=everywhere(bounds[0]),
        bound_upper=everywhere(bounds[1]),
        bound_directions=everywhere(directions),
        eps=eps,
        support=everywhere(support),
        interior=everywhere(interior),
        support_dual=torch.from_numpy(support_dual),
    )


def _pairs(keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Neighbours in the order of weight, and the heaviest key against each other one."""
    if not len(keys):
        return np.zeros((0, 2), dtype=np.int64)
    if len(keys) > 16:
        keys = keys[:16]  # top=None on a long row: orders far down the list are nobody's question
    pairs = [*pairwise(keys.tolist()), *((int(keys[0]), int(j)) for j in keys[2:])]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _support(solver: Polytope) -> tuple[Booleans, Array, Array]:
    """Which keys some alternative gives weight to, an alternative with weight on all of them, and a dual as proof.

    A strictly positive row is one itself. Exact zeros (sparsemax, underflow) may not be free to rise: as long as the
    keys without weight can have more than `NO_WEIGHT` together, what raises them most joins in.
    """
    support, found, dual = solver.row > 0, [solver.row], np.zeros(solver.values.shape[1])
    while not support.all():
        best = solver.minimum(-(~support).astype(np.float64))
        dual = best.dual
        if -best.bound <= NO_WEIGHT:
            break
        x = solver.polished(best.vertex)
        risen = ~support & (x > NO_WEIGHT / (2 * len(x)))
        if not risen.any():
            break
        found.append(np.where(support | risen, x, 0.0))
        support = support | risen
    interior = np.mean(found, axis=0)
    return support, interior / interior.sum(), dual
