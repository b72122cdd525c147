"""Whole heads: intervals for every weight of every row, from duals solved for a few of them.

Whether a dual vector proves a bound depends on the values and the visible keys, not on the row. So the duals solved for
about two dozen rows, one for each key, bound every row of the head by one matrix product (methods 1.2 (6)). Under a
mask the correction term min_j (c_j − v_jᵀu) runs over the keys that the row sees: each bound is valid for its row,
and a dual of a longer prefix is as good for a shorter one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.core.attention.polytope import Polytope
from whence.core.numerics.arrays import Array, Booleans, Integers
from whence.core.numerics.checks import as_row, check_pair, shape
from whence.core.numerics.masks import full_mask
from whence.core.numerics.tolerances import EPS64, OWN_ROW, rank_eps
from whence.errors import InputError
from whence.results.short_repr import short_repr


@dataclass(frozen=True)
class HeadCertificate:
    """Proved intervals for all rows of one head.

    attention (n_query, n_key), values (n_key, d_v), visible (n_query, n_key): what was certified, float64, rows divided
    by their sums. lower, upper (n_query, n_key). duals (p, d_v), keys (p,) the key and sides (p,) the side (+1 upper,
    −1 lower) each dual was solved for. rows (r,): the rows that were solved exactly.
    """

    __repr__ = short_repr

    attention: Tensor
    values: Tensor
    visible: Tensor
    lower: Tensor
    upper: Tensor
    duals: Tensor
    keys: Tensor
    sides: Tensor
    rows: Tensor

    def check(self) -> bool:
        """Recompute every bound from the duals alone: each is one that they prove, and the rows satisfy them."""
        a, v, mask = self.attention.numpy(), self.values.numpy(), self.visible.numpy()
        if not (np.isfinite(v).all() and (a >= 0).all() and not a[~mask].any()):
            return False
        if not (np.abs(a.sum(1) - 1)[mask.any(1)] <= OWN_ROW).all():
            return False
        pool = self.duals.numpy(), self.keys.numpy(), self.sides.numpy()
        tight, loose = (_pooled(a, v, mask, *pool, allowance=allowance) for allowance in (1.0, 3.0))
        lower, upper = self.lower.numpy(), self.upper.numpy()
        sound = (lower <= tight[0]).all() and (upper >= tight[1]).all()
        told = (lower >= loose[0]).all() and (upper <= loose[1]).all()
        return bool(sound and told and (lower <= a + OWN_ROW).all() and (upper >= a - OWN_ROW).all())

    def plot(self, *, ax: Any = None) -> Any:
        """How wide each interval is. See `whence.core.attention.plots`; returns the Axes."""
        from whence.core.attention.plots import plot_head_certificate

        return plot_head_certificate(self, ax)


def certify_head(
    attention: Tensor, values: Tensor, *, rows: int = 24, visible: Tensor | None = None
) -> HeadCertificate:
    """Bounds for all weights of one head from the duals of a few rows.

    Args:
        attention: (n_query, n_key), one head; rows that see nothing are left out (bounds 0).
        values: (n_key, d_v).
        rows: how many rows to solve exactly; they are chosen as far apart in head output as possible.
        visible: boolean, broadcastable to attention.

    >>> attention = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.4, 0.4]])
    >>> head = certify_head(attention, torch.tensor([[1.0], [0.0], [0.0]]))
    >>> [[round(x, 6) for x in line] for line in head.upper.tolist()]
    [[0.5, 0.5, 0.5], [0.2, 0.8, 0.8]]
    >>> head.check()
    True
    """
    check_pair(attention, values, visible)
    if attention.ndim != 2 or values.ndim != 2:
        raise InputError(f"attention {shape(attention)}, values {shape(values)}: expected one head; index it first.")
    if rows < 1:
        raise InputError(f"rows={rows!r}; at least one row must be solved.")
    n_query, n_key = attention.shape
    mask = torch.ones(n_query, n_key, dtype=torch.bool)
    if visible is not None:
        if visible.ndim > 2:
            raise InputError(f"visible has shape {shape(visible)}; one head wants ({n_query}, {n_key}).")
        mask = full_mask(visible, n_query, n_key).clone()
    some = mask.any(-1).nonzero().squeeze(-1).tolist()
    a = torch.zeros(n_query, n_key, dtype=torch.float64)
    values64 = values.detach().to(torch.float64)
    for i in some:
        a[i] = as_row(attention[i], values, mask[i])[0]
    eps = rank_eps(values.dtype)
    chosen = _spread_rows((a @ values64).numpy(), mask.sum(-1).numpy(), some, rows)
    duals, keys, sides = [], [], []
    for i in chosen:
        seen = mask[i].nonzero().squeeze(-1).numpy()
        solver = Polytope(a[i].numpy()[seen], values64.numpy()[seen], eps=eps)
        touched = np.zeros(len(seen), dtype=bool)
        for side in (1, -1):
            for j in range(len(seen)):
                if side < 0 and touched[j]:
                    continue  # a vertex with weight 0 here: the lower end is 0, nothing to prove
                cost = np.zeros(len(seen))
                cost[j] = -side
                best = solver.minimum(cost)
                touched |= best.vertex <= 0.0
                duals.append(best.dual)
                keys.append(int(seen[j]))
                sides.append(side)
    pool = np.array(duals).reshape(-1, values64.shape[1])
    which, side_of = np.array(keys, dtype=np.int64), np.array(sides, dtype=np.int64)
    lower, upper = _pooled(a.numpy(), values64.numpy(), mask.numpy(), pool, which, side_of, allowance=2.0)
    return HeadCertificate(
        attention=a,
        values=values64,
        visible=mask,
        lower=torch.from_numpy(lower),
        upper=torch.from_numpy(upper),
        duals=torch.from_numpy(pool),
        keys=torch.from_numpy(which),
        sides=torch.from_numpy(side_of),
        rows=torch.tensor(chosen, dtype=torch.int64),
    )


def _spread_rows(outputs: Array, length: Integers, rows: list[int], count: int) -> list[int]:
    """Farthest-point sampling of the head outputs, from the row that sees most; longer prefixes serve shorter ones."""
    left = np.array(rows, dtype=np.int64)
    if not len(left):
        return []
    chosen = [int(left[np.argmax(length[left])])]
    distance = np.linalg.norm(outputs[left] - outputs[chosen[0]], axis=1)
    while len(chosen) < min(count, len(left)):
        chosen.append(int(left[np.argmax(distance)]))
        distance = np.minimum(distance, np.linalg.norm(outputs[left] - outputs[chosen[-1]], axis=1))
    return sorted(set(chosen))


def _pooled(
    a: Array,
    values: Array,
    mask: Booleans,
    duals: Array,
    keys: Integers,
    sides: Integers,
    *,
    allowance: float,
) -> tuple[Array, Array]:
    """Every bound that every dual proves for every row; the tightest of each."""
    n_query, n_key = a.shape
    lower, upper = np.zeros((n_query, n_key)), mask.astype(np.float64)
    outputs = a @ values
    sets, set_of = np.unique(mask, axis=0, return_inverse=True)
    set_of = set_of.reshape(-1)
    largest = np.abs(values).max(axis=0, initial=0.0)
    for start in range(0, len(duals), 4096):
        u, j, s = (x[start : start + 4096] for x in (duals, keys, sides))
        if not len(u):
            break
        rounding = allowance * 4 * (values.shape[1] + n_key) * EPS64 * (np.abs(u) @ largest + 1.0)
        # min over visible keys of c − v·u, with c = −s at the key itself and 0 elsewhere.
        reduced = -(u @ values.T)
        reduced[np.arange(len(u)), j] -= s
        floor = _masked_minimum(reduced, sets)
        bound = outputs @ u.T + floor[set_of] - rounding  # (n_query, p): lower bound on −s·x_j
        for side in (1, -1):
            mine = np.flatnonzero(s == side)
            for key in np.unique(j[mine]):
                best = bound[:, mine[j[mine] == key]].max(axis=1)
                if side > 0:
                    upper[:, key] = np.minimum(upper[:, key], -best)
                else:
                    lower[:, key] = np.maximum(lower[:, key], best)
    return np.where(mask, lower, 0.0), np.where(mask, upper, 0.0)


def _masked_minimum(reduced: Array, sets: Booleans) -> Array:
    """(s, p): for each visible set, the smallest reduced cost of each dual; prefixes by a running minimum."""
    size = sets.sum(axis=1)
    prefix = (sets == (np.arange(sets.shape[1]) < size[:, None])).all(axis=1)
    result = np.zeros((len(sets), len(reduced)))
    if prefix.any():
        running = np.minimum.accumulate(reduced, axis=1)
        result[prefix] = running[:, np.maximum(size[prefix] - 1, 0)].T
    for k in np.flatnonzero(~prefix):
        result[k] = reduced[:, sets[k]].min(axis=1)
    return result
