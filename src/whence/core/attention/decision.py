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
from whence.core.attention.head_rows import HeadRow, Heads
from whence.core.numerics.arrays import Array
from whence.core.numerics.tolerances import SAME_OUTPUT, UNIT_SUM
from whence.errors import InputError
from whence.results.short_repr import short_repr

Verdict = Literal["certified", "refuted", "open"]

_EPS = float(np.finfo(np.float64).eps)


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

    rows: list[HeadRow]
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


def _residual(head: HeadRow, x: Array) -> float:
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
