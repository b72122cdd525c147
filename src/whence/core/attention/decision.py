"""Decisions: does the head output fix what was read off an attention row?

A decision made from attention is a conjunction of claims that are linear in the row: "key i outweighs key j", "these
keys hold at least half", "the expected position is below 12". Over the polytope P of all rows with the same head output
(methods 1.2) a claim cᵀx > t is

    certified  where a dual vector proves min_P cᵀx > t,
    refuted    where a row of P with cᵀx < t is at hand,
    open       where neither was shown.

Several heads: given their outputs, the rows of different heads are independent, so the least value of Σ_h w_h cᵀx_h
(w ≥ 0) is the sum of the least values. "Key i is the largest of K" is one claim for each j ∈ K, and one dual often
proves many of them: with 1_G the indicator of G ⊂ K, e_i − 1_G is the componentwise minimum of e_i − e_j over j ∈ G, so
a proof that i outweighs G *together* is, number for number, the best that one dual can prove for each of G.
methods 1.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from whence.core.attention.claim import Claim, breaks, distance
from whence.core.attention.interior_point import InteriorPoint
from whence.core.attention.polytope import Polytope, polished, proved_minimum
from whence.core.numerics.arrays import Array, Booleans
from whence.core.numerics.checks import as_row, check_pair, shape
from whence.core.numerics.masks import full_mask
from whence.core.numerics.tolerances import DUALITY_GAP, SAME_OUTPUT, SOLVER_ZERO, UNIT_SUM
from whence.errors import InputError
from whence.results.short_repr import short_repr

Verdict = Literal["certified", "refuted", "open"]

_EPS = float(np.finfo(np.float64).eps)
# The projection of the cost on [V, 1] is a dual; how far along it the best bound lies depends on the row.
_STRETCHES = np.array([1.0, 1.2, 1.5, 2.0, 3.0, 5.0])
# From so many keys on the interior-point method finds both ends of a range sooner (benchmarks/decide.py).
_MANY_KEYS = 512


@dataclass(frozen=True)
class RowDecision:
    """What is known of one decision.

    verdict; margin: every row with the same head outputs satisfies every claim by at least this much (below 0 where that
    is not so, or not shown; infinite where nothing was claimed, as for an only candidate). costs (k, n_key), thresholds,
    strict and bounds (k,), duals (k, n_head, d_v): the proofs, bounds ≤ Σ_h w_h min costsᵀx_h. alternative (n_head, n_key):
    rows that decide otherwise, or None; residual: the largest relative change of a head output by them. programs: linear
    programs solved.
    quantity (n_key,): where the decision is about one number, its costs; lower, upper: the proved range of that number
    over all rows with the same outputs; range_duals (2, n_head, d_v). NaN and None elsewhere.
    """

    __repr__ = short_repr

    verdict: Verdict
    margin: float
    costs: Tensor
    thresholds: Tensor
    strict: Tensor
    bounds: Tensor
    duals: Tensor
    alternative: Tensor | None
    residual: float
    programs: int
    quantity: Tensor | None = None
    lower: float = float("nan")
    upper: float = float("nan")
    range_duals: Tensor | None = None

    @property
    def proved(self) -> Tensor:
        """(k,) boolean: which of the claims the bounds prove."""
        return torch.where(self.strict, self.bounds > self.thresholds, self.bounds >= self.thresholds)


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
        self._spaces: dict[tuple[int, bytes], _Space] = {}
        self.programs = 0

    def at(self, query: int) -> list[_Row]:
        """The rows of one query, a head each."""
        rows = []
        for head in range(len(self.values)):
            row, values64, seen = as_row(self.attention[head, query], self.values[head], self.visible[head, query])
            key = (head, seen.numpy().tobytes())
            if key not in self._spaces:
                # A causal mask has another set of keys in every row: only the last one of each head is kept.
                self._spaces = {k: s for k, s in self._spaces.items() if k[0] != head}
                self._spaces[key] = _Space(row[seen].numpy(), values64[seen].numpy())
            rows.append(_Row(row[seen].numpy(), seen.numpy(), self._spaces[key], float(self.weights[head])))
        return rows


class _Space:
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
class _Row:
    """One head's row on its visible keys."""

    row: Array
    visible: Booleans
    space: _Space
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


def decide_rows(
    attention: Tensor,
    values: Tensor,
    claims: Sequence[Sequence[Claim]],
    *,
    visible: Tensor | None = None,
    weights: Tensor | None = None,
) -> list[RowDecision]:
    """Whether the head outputs fix each decision: query by query, bounds first, programs where they leave it open.

    Args:
        attention: (n_head, n_query, n_key), rows ≥ 0 that sum to 1.
        values: (n_head, n_key, d_v).
        claims: for each query, what must hold of the weighted sum of its rows.
        visible: boolean, broadcastable to attention.
        weights: (n_head,) ≥ 0; None, the sum of the heads. 1/n_head each: their mean.

    >>> rows, values = torch.tensor([[[0.5, 0.25, 0.25]]]), torch.tensor([[[1.0], [0.0], [0.0]]])
    >>> first = Claim(torch.tensor([1.0, 0.0, 0.0]), rivals=(1, 2))       # key 0 is the largest ...
    >>> second = Claim(torch.tensor([0.0, 1.0, 0.0]), rivals=(2,))        # ... and key 1 outweighs key 2
    >>> [d.verdict for claim in (first, second) for d in decide_rows(rows, values, [[claim]])]
    ['open', 'refuted']
    """
    weights = torch.ones(len(attention), dtype=torch.float64) if weights is None else weights
    heads = Heads(attention, values, weights, visible)
    if len(claims) != attention.shape[1]:
        raise InputError(f"{len(claims)} lists of claims were given for {attention.shape[1]} queries.")
    return [decide_row(heads, query, asked) for query, asked in enumerate(claims)]


def decide_row(heads: Heads, query: int, claims: Sequence[Claim], quantity: Tensor | None = None) -> RowDecision:
    """One query's decision; with `quantity` (n_key,), the exact range of that linear function of the row too."""
    work = _Work(heads.at(query), claims, quantity)
    if quantity is not None:
        work.solve_range(quantity.detach().to(torch.float64).numpy())
    for claim in claims:
        if work.settle(claim):
            break
    return work.result(heads.values.shape[2])


@dataclass
class _Work:
    """The proofs collected for one query, and the row that refutes it once one is met."""

    rows: list[_Row]
    claims: Sequence[Claim]
    quantity: Tensor | None = None
    costs: list[Array] = field(default_factory=list)
    thresholds: list[float] = field(default_factory=list)
    strict: list[bool] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    duals: list[Array] = field(default_factory=list)
    alternative: Array | None = None
    residual: float = 0.0
    programs: int = 0
    ends: list[tuple[float, Array]] = field(default_factory=list)
    solved: dict[bytes, list[tuple[float, Array, Array]]] = field(default_factory=dict)
    met: set[bytes] = field(default_factory=set)  # of these, what the interior-point method solved

    def program(self, cost: Array) -> list[tuple[float, Array, Array]]:
        """The exact program of every head; asked twice, solved once."""
        mark = (cost + 0.0).tobytes()  # + 0.0 turns −0 into 0
        if mark not in self.solved:
            self.solved[mark] = [row.exact(cost) for row in self.rows]
            self.programs += len(self.rows)
        return self.solved[mark]

    def solve_range(self, cost: Array) -> None:
        """Both ends of cᵀx; the claims that are about the same number then find their programs solved."""
        self._both_ends(cost)
        for sign in (1.0, -1.0):
            solved = self.program(sign * cost)
            # x ≥ 0 and Σx = 1 are proofs of their own: no end lies beyond the cheapest key.
            plain = sum(row.weight * float((sign * cost)[row.visible].min()) for row in self.rows)
            end = max(self.total([s[0] for s in solved]), plain)
            self.ends.append((sign * end, np.stack([s[1] for s in solved])))

    def _both_ends(self, cost: Array) -> None:
        """Solve both programs of a range at once, where every head has a way to; elsewhere nothing happens."""
        ends = []
        for row in self.rows:
            both = row.space.ends(row.row, cost[row.visible])
            if both is None:
                return
            ends.append(both)
        for i, sign in enumerate((1.0, -1.0)):
            mark = (sign * cost + 0.0).tobytes()
            self.met.add(mark)
            self.solved[mark] = [
                (row.proved(sign * cost[row.visible], both[i][0]), *both[i])
                for row, both in zip(self.rows, ends, strict=True)
            ]
            self.programs += len(self.rows)

    def total(self, bounds: Sequence[float]) -> float:
        """A proved bound on the weighted sum from one for each head, less the rounding of the sum."""
        parts = [row.weight * b for row, b in zip(self.rows, bounds, strict=True)]
        return sum(parts) - 4 * len(parts) * _EPS * sum(abs(p) for p in parts)

    def combined(self, rows: Sequence[Array]) -> Array:
        return np.asarray(sum(r.weight * x for r, x in zip(self.rows, rows, strict=True)), dtype=np.float64)

    def settle(self, claim: Claim) -> bool:
        """Prove the claim, or find a row against it (True); what stays is recorded with the best bound there is."""
        base = claim.costs.detach().to(torch.float64).numpy()
        groups = [np.array(claim.rivals, dtype=np.int64)]
        while groups:
            group = groups.pop()
            cost = base.copy()
            cost[group] -= 1.0
            if (cost + 0.0).tobytes() not in self.solved:
                parts = [row.cheap(cost) for row in self.rows]
                if self._record(claim, cost, [p[0] for p in parts], [p[1] for p in parts], final=False):
                    continue
            solved = self.program(cost)
            bounds, duals = [s[0] for s in solved], [s[1] for s in solved]
            if self._record(claim, cost, bounds, duals, final=False):
                continue
            x = [row.polished(s[2]) for row, s in zip(self.rows, solved, strict=True)]
            refuted, mark = self._refuted(x), (cost + 0.0).tobytes()
            if mark in self.met and not refuted:  # the ends met, but not closely enough for this claim
                self.met.discard(mark)
                del self.solved[mark]
                groups.append(group)
                continue
            if len(group) <= 1:
                self._record(claim, cost, bounds, duals, final=True)
            if refuted:
                return True
            if len(group) > 1:
                groups.extend(_halves(group, self.combined(x)))
        return False

    def _record(
        self, claim: Claim, cost: Array, bounds: Sequence[float], duals: Sequence[Array], *, final: bool
    ) -> bool:
        """Keep a bound that proves the claim, or the last one there will be; True when it proves it."""
        bound = self.total(bounds)
        success = bound > claim.threshold if claim.strict else bound >= claim.threshold
        if success or final:
            self.costs.append(cost)
            self.thresholds.append(claim.threshold)
            self.strict.append(claim.strict)
            self.bounds.append(bound)
            self.duals.append(np.stack(duals))
        return success

    def _refuted(self, rows: Sequence[Array]) -> bool:
        """Whether these rows are real alternatives that break one of the claims; if so they are kept."""
        total = self.combined(rows)
        if not any(breaks(claim, total) for claim in self.claims):
            return False
        residual = max(_residual(row, x) for row, x in zip(self.rows, rows, strict=True))
        if residual > SAME_OUTPUT:
            return False
        self.alternative, self.residual = np.stack(rows), residual
        return True

    def result(self, width: int) -> RowDecision:
        n = len(self.rows[0].visible)
        costs = np.array(self.costs, dtype=np.float64).reshape(-1, n)
        thresholds, bounds = np.array(self.thresholds), np.array(self.bounds)
        duals = np.array(self.duals, dtype=np.float64).reshape(-1, len(self.rows), width)
        strict = np.array(self.strict, dtype=bool)
        held = np.where(strict, bounds > thresholds, bounds >= thresholds)
        verdict: Verdict = "refuted" if self.alternative is not None else "certified" if held.all() else "open"
        margin = float((bounds - thresholds).min()) if len(bounds) else float("inf")
        if self.alternative is not None:
            total = self.combined(list(self.alternative))
            margin = min(distance(claim, total) for claim in self.claims)
        return RowDecision(
            verdict,
            margin,
            torch.from_numpy(costs),
            torch.from_numpy(thresholds.astype(np.float64)),
            torch.from_numpy(strict),
            torch.from_numpy(bounds.astype(np.float64)),
            torch.from_numpy(duals),
            None if self.alternative is None else torch.from_numpy(self.alternative),
            self.residual,
            self.programs,
            self.quantity,
            lower=self.ends[0][0] if self.ends else float("nan"),
            upper=self.ends[1][0] if self.ends else float("nan"),
            range_duals=torch.from_numpy(np.stack([dual for _, dual in self.ends])) if self.ends else None,
        )


def _residual(head: _Row, x: Array) -> float:
    """‖(x − a)ᵀV‖ / ‖aᵀV‖ (absolute where that is 0); infinite where x is no attention row on the visible keys."""
    if x.min() < 0.0 or abs(float(x.sum()) - 1.0) > UNIT_SUM or bool((x[~head.visible] != 0).any()):
        return float("inf")
    values = head.space.values
    moved = float(np.linalg.norm((x[head.visible] - head.row) @ values))
    size = float(np.linalg.norm(head.row @ values))
    return moved / size if size > 0 else moved


def _halves(group: npt.NDArray[np.int64], row: Array) -> list[npt.NDArray[np.int64]]:
    """Two parts of about equal mass in the row that was met; the heavier key first."""
    order = group[np.argsort(-row[group], kind="stable")]
    reached = np.cumsum(row[order])
    middle = min(max(int(np.searchsorted(reached, reached[-1] / 2)), 1), len(order) - 1)
    return [order[middle:], order[:middle]]
