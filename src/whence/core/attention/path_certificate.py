"""Between which keys must a monotone path first reach each query, in every attention with the same head outputs?

The path maximises the sum of the weights on it (a mean of heads; not standardised, no median). A path gives query i the
keys s_i … e_i with s_{i+1} = e_i or e_i + 1, so its value is a sum of masses, one for each query, and masses are linear in
the rows. If query i hands over to the next at key b instead of e⁰_i, where the observed path does, the path gains at most

    G_i(b) = max_P Σ_j x_ij (1[j ≤ b] − 1[j ≤ e⁰_i]) + max_P Σ_j x_{i+1,j} (1[j ≥ b] − 1[j ≥ s⁰_{i+1}]),

because rows of different queries and heads are independent given the head outputs. A best path cannot be improved by
putting some of its hand-overs back to where the observed path has them. Say it hands over at b < e⁰_i. If the next one
is at s⁰_{i+1} or later, hand-over i can be put back alone, so G_i(b) ≥ 0; else the next must be put back with it, and so
on: with E_i(b) = G_i(b) + max(0, max_{b ≤ b' < s⁰_{i+1}} E_{i+1}(b')), **b is possible only if E_i(b) ≥ 0**; nor may it pay to
put back, besides, those before it that an early b makes early; likewise to the other
side. The maxima are bounded by dual vectors (weak duality). A dual solved for one row and key bounds all rows of its head at
all keys, and both maxima are monotone in b, so few programmes settle many keys.

`whence.core.attention.alignment.possible_first_keys` takes any box of cells instead. It is far wider: a weight moves
freely between neighbours that sound alike, the mass of a stretch of sound does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whence.core.attention.alignment import warping_path
from whence.core.attention.head_rows import Heads
from whence.core.numerics.arrays import Array, Booleans, Integers
from whence.core.numerics.tolerances import SUM_ROUNDING

_EPS = float(np.finfo(np.float64).eps)
# The search for the ends of a range: its first step in keys, and at how many keys programmes are solved for each end.
_STEP = 6
_TRIES = 7


@dataclass(frozen=True)
class PathCertificate:
    """first, last (n_query,): the path reaches query i at key first[i] or later, at last[i] or earlier; proved.

    duals (n_head, k, d_v): the proofs. Together with the rows and values they give the range again (`proved_range`).
    programs: linear programmes solved.
    """

    first: Integers
    last: Integers
    duals: Tensor
    programs: int


def segments(matrix: Array) -> tuple[Integers, Integers]:
    """(n_query,) each: the first and the last key of every query on the path over −matrix (n_query, n)."""
    queries, keys = warping_path(-matrix)
    new = np.diff(queries) > 0
    return keys[np.r_[True, new]].astype(np.int64), keys[np.r_[new, True]].astype(np.int64)


class _Bounds:
    """Upper bounds of A and B for all rows, (n_query, n + 1) and (n_query, n), summed over the heads."""

    def __init__(self, rows: Array, values: Array, visible: Array, weights: Array, n: int) -> None:
        self.rows, self.values, self.visible, self.weights, self.n = rows, values, visible, weights, n
        matrix = np.einsum("h,hij->ij", weights, rows)[:, :n]
        self.s0, self.e0 = segments(matrix)
        heads = len(rows)
        at = np.arange(n + 1)
        # Without any proof: a row holds at most 1, and weights are not negative.
        self.a = np.where(at[None] < self.s0[:, None], 1.0, 0.0)[None].repeat(heads, 0)
        self.b = np.where(at[None, :n] > self.e0[:, None], 1.0, 0.0)[None].repeat(heads, 0)
        self.outputs = np.einsum("hij,hjd->hid", rows, values)
        self.largest = np.abs(values).max(axis=1)

    def learn(self, head: int, dual: Array) -> None:
        """What one dual of a head proves for A and B of all its rows."""
        n, width = self.n, self.values.shape[2]
        price = self.values[head] @ dual
        total = self.outputs[head] @ dual
        size = float(np.abs(dual) @ self.largest[head]) + 1.0
        slack = 2 * 4 * (width + self.rows.shape[2]) * _EPS * size + 8 * _EPS
        for i, seen in enumerate(self.visible[head]):
            # max cᵀx ≤ −uᵀo + max_j (c_j + v_jᵀu) for any u: for this one, and for the one turned round.
            for sign in (1.0, -1.0):
                q = np.where(seen, sign * price, -np.inf)
                self._update(head, i, q[:n], float(q[n:].max(initial=-np.inf)), -sign * float(total[i]), slack)

    def _update(self, head: int, i: int, q: Array, rest: float, base: float, slack: float) -> None:
        """max cᵀx ≤ base + max_j (c_j + q_j) for c ∈ {−1, 0, 1}: A's costs and B's, from running maxima of q."""
        n, s0, e0 = self.n, int(self.s0[i]), int(self.e0[i])
        ahead = np.r_[-np.inf, np.maximum.accumulate(q)]  # ahead[k] = max q[:k]
        behind = np.r_[np.maximum.accumulate(q[::-1])[::-1], -np.inf]  # behind[k] = max q[k:]
        a = np.empty(n + 1)
        # s ≤ s0: +1 on [s, s0).
        left = np.r_[np.maximum.accumulate(q[:s0][::-1])[::-1], -np.inf] if s0 else np.array([-np.inf])
        a[: s0 + 1] = np.maximum(np.maximum(ahead[: s0 + 1], left + 1.0), max(behind[s0], rest))
        # s ≥ s0: −1 on [s0, s).
        right = np.r_[-np.inf, np.maximum.accumulate(q[s0:])]
        a[s0:] = np.maximum(np.maximum(behind[s0:], right - 1.0), max(ahead[s0], rest))
        b = np.empty(n)
        # e ≥ e0: +1 on (e0, e].
        right = np.r_[-np.inf, np.maximum.accumulate(q[e0 + 1 :])]
        b[e0:] = np.maximum(np.maximum(behind[e0 + 1 :], right + 1.0), max(ahead[e0 + 1], rest))
        # e ≤ e0: −1 on (e, e0].
        left = np.r_[np.maximum.accumulate(q[: e0 + 1][::-1])[::-1], -np.inf]
        b[: e0 + 1] = np.maximum(np.maximum(ahead[1 : e0 + 2], left[1:] - 1.0), max(behind[e0 + 1], rest))
        # A falls along the keys and B rises: what is proved at one key holds for all beyond it.
        self.a[head, i] = np.minimum.accumulate(np.minimum(self.a[head, i], base + a + slack))
        self.b[head, i] = np.minimum.accumulate(np.minimum(self.b[head, i], base + b + slack)[::-1])[::-1]

    def gains(self) -> tuple[Array, Array]:
        """(n_query − 1, n) each: G, and the same where the next query begins one key on."""
        a, b = (np.einsum("h,hij->ij", self.weights, x) for x in (self.a, self.b))
        return b[:-1] + a[1:, :-1], b[:-1] + a[1:, 1:]


def _possible(bounds: _Bounds) -> tuple[Booleans, Booleans, Booleans]:
    """(n_query − 1, n) each: whether query i may hand over at a key before, and after, the observed one; and whether the
    next query may then begin one key on."""
    gains, step = bounds.gains()
    keys = np.arange(bounds.n)
    early, late = np.zeros(gains.shape, dtype=bool), np.zeros(gains.shape, dtype=bool)
    side = np.zeros(gains.shape, dtype=bool)
    nothing = np.full(bounds.n, -np.inf)
    need = _needed(gains, bounds.e0, -1)
    best = nothing
    for i in range(len(gains) - 1, -1, -1):
        # The hand-overs after it that must be put back with it, since the next query would else end before it begins.
        following = np.where(keys < bounds.s0[i + 1], best, -np.inf) if i + 1 < len(gains) else nothing
        value = gains[i] + np.maximum(np.maximum.accumulate(following[::-1])[::-1], 0.0)
        early[i] = (keys < bounds.e0[i]) & (value - need[i] >= -SUM_ROUNDING)
        best = np.where(early[i], value, -np.inf)
    need = _needed(gains, bounds.e0, 1)
    best = nothing
    for i in range(len(gains)):
        before = np.where(keys >= bounds.e0[i], best, -np.inf)
        value = gains[i] + np.maximum(np.maximum.accumulate(before), 0.0)
        late[i] = (keys > bounds.e0[i]) & (value - need[i] >= -SUM_ROUNDING)
        on = np.where(keys == bounds.e0[i], step[i], value - gains[i] + step[i] - need[i])
        side[i] = (keys >= bounds.e0[i]) & (on >= -SUM_ROUNDING)
        best = np.where(late[i], value, -np.inf)
    return early, late, side


def _needed(gains: Array, observed: Integers, direction: int) -> Array:
    """(n_query − 1, n): what a hand-over at a key must have gained already, for those that it takes along to be worth it.

    After a late hand-over (direction 1) every following one with e⁰ < b is late, too, before an early one (−1) every one
    with e⁰ > b is early; a best path gains with each run of them, however far it is put back.
    """
    n = gains.shape[1]
    keys = np.arange(n)
    need = np.zeros_like(gains)
    order = range(len(gains) - 2, -1, -1) if direction > 0 else range(1, len(gains))
    for i in order:
        k = i + direction
        worth = np.maximum(need[k], 0.0) - gains[k]
        least = np.minimum.accumulate(worth[::-1])[::-1] if direction > 0 else np.minimum.accumulate(worth)
        forced = keys > observed[k] if direction > 0 else keys < observed[k]
        need[i] = np.where(forced, np.maximum(least, 0.0), 0.0)
    return need


def _range(bounds: _Bounds) -> tuple[Integers, Integers]:
    queries = bounds.rows.shape[1]
    first, last = np.zeros(queries, dtype=np.int64), np.zeros(queries, dtype=np.int64)
    if queries < 2:
        return first, last
    early, late, step = _possible(bounds)
    for i in range(queries - 1):
        observed = int(bounds.e0[i])
        first[i + 1] = min(observed, *np.flatnonzero(early[i])[:1].tolist(), int(bounds.s0[i + 1]))
        on = [k + 1 for k in np.flatnonzero(step[i])[-1:].tolist()]
        last[i + 1] = min(
            bounds.n - 1, max([observed, int(bounds.s0[i + 1]), *np.flatnonzero(late[i])[-1:].tolist(), *on])
        )
    return first, last


def _numpy(rows: Tensor, values: Tensor, visible: Tensor, weights: Tensor) -> tuple[Array, Array, Array, Array]:
    return tuple(t.detach().numpy() for t in (rows, values, visible, weights))  # type: ignore[return-value]


def proved_range(
    rows: Tensor, values: Tensor, visible: Tensor, weights: Tensor, keys: int, duals: Tensor
) -> tuple[Integers, Integers]:
    """The range that these duals prove: (n_query,) twice. Dot products and running maxima, no solver.

    rows (n_head, n_query, n_key) float64 that sum to 1, values (n_head, n_key, d_v), weights (n_head,) ≥ 0; `keys`: how many of
    the first keys take part in the path; duals (n_head, k, d_v), any numbers: false ones prove less, never something false.
    """
    bounds = _Bounds(*_numpy(rows, values, visible, weights), keys)
    for head, some in enumerate(duals.numpy()):
        for dual in some:
            bounds.learn(head, dual)
    return _range(bounds)


def certify_path(
    rows: Tensor, values: Tensor, visible: Tensor, weights: Tensor, keys: int, *, programs: int = 4000
) -> PathCertificate:
    """The proved range of the path, with at most about so many programmes. rows (head, n_query, n), weights (head,)."""
    bounds = _Bounds(*_numpy(rows, values, visible, weights), keys)
    solver = Heads(rows, values, weights, visible)
    pools: list[list[Array]] = [[] for _ in range(len(rows))]
    asked: set[tuple[int, int]] = set()
    count = 0

    def solve(side: str, query: int, key: int) -> None:
        nonlocal count
        cost = _cost(side, rows.shape[2], keys, key, int((bounds.s0 if side == "A" else bounds.e0)[query]))
        if not cost.any():
            return
        for head, row in enumerate(solver.at(query)):
            if float(weights[head]) > 0:
                dual = row.exact(-cost)[1]
                count += 1
                pools[head].append(dual)
                bounds.learn(head, dual)

    # A hand-over is early only if the next ones are early with it, or late if the ones before are: in that order.
    last_one = rows.shape[1] - 2
    for i, side in [*((i, 0) for i in range(last_one, -1, -1)), *((i, 1) for i in range(last_one + 1))]:
        inner, step = int(bounds.e0[i]), _STEP  # possible: where the observed path hands over
        for _ in range(_TRIES):
            possible = np.flatnonzero(_possible(bounds)[side][i])
            if not len(possible) or count >= programs:
                break
            outer = int(possible[-1 if side else 0])
            near = inner + int(np.sign(outer - inner)) * min(step, abs(outer - inner))
            key = next((k for k in (near, (inner + outer) // 2, outer) if (i, k) not in asked and k != inner), None)
            if key is None:
                break
            asked.add((i, key))
            solve("B", i, key)
            solve("A", i + 1, key)
            if _possible(bounds)[side][i, key]:
                inner, step = key, 2 * step
            else:
                step = max(step // 2, 1)
    first, last = _range(bounds)
    most = max((len(pool) for pool in pools), default=0)
    duals = torch.zeros(len(rows), most, values.shape[2], dtype=torch.float64)
    for head, pool in enumerate(pools):
        if pool:
            duals[head, : len(pool)] = torch.from_numpy(np.stack(pool))
    return PathCertificate(first, last, duals, count)


def _cost(side: str, n_key: int, keys: int, key: int, observed: int) -> Array:
    """1[j ≥ s] − 1[j ≥ s⁰] (A) or 1[j ≤ e] − 1[j ≤ e⁰] (B), among the keys that take part."""
    at = np.arange(n_key)
    new, old = (at >= key, at >= observed) if side == "A" else (at <= key, at <= observed)
    cost: Array = (new.astype(np.float64) - old) * (at < keys)
    return cost
