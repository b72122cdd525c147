"""Checking a decision again: dot products only, no solver, and nothing taken on trust but the tensors themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from whence.core.attention.claim import Claim, breaks
from whence.core.attention.decision import RowDecision
from whence.core.attention.head_rows import proved
from whence.core.numerics.arrays import Array
from whence.core.numerics.tolerances import SAME_OUTPUT, UNIT_SUM


def check_decision(
    decision: RowDecision, rows: Tensor, values: Tensor, visible: Tensor, weights: Tensor, claims: Sequence[Claim]
) -> bool:
    """Whether the tensors prove the verdict.

    rows (n_head, n_key) float64, values (n_head, n_key, d_v), visible (n_head, n_key), weights (n_head,).
    Certified: every bound follows from its dual (weak duality), the bounds exceed the thresholds, and together they
    cover every claim. Refuted: the other rows are attention rows on the visible keys, give the same head outputs to
    1e-10, and break a claim. Either way the range of the quantity follows from its duals and holds the row's own value.
    """
    heads = [(rows[h].numpy(), values[h].numpy(), visible[h].numpy(), float(weights[h])) for h in range(len(rows))]
    if any(not _is_row(row, seen) for row, _, seen, _ in heads):
        return False

    def bound(cost: Array, duals: Array) -> float:
        parts = [
            w * proved(cost[seen], dual, row[seen], v[seen], 1.0)
            for (row, v, seen, w), dual in zip(heads, duals, strict=True)
        ]
        return sum(parts) - 2 * len(parts) * float(np.finfo(np.float64).eps) * sum(abs(p) for p in parts)

    for cost, said, duals in zip(decision.costs.numpy(), decision.bounds.tolist(), decision.duals.numpy(), strict=True):
        if not said <= bound(cost, duals):
            return False
    if decision.quantity is not None and not _range_holds(decision, heads, bound):
        return False
    if decision.verdict == "certified":
        return all(_covered(decision, claim) for claim in claims)
    if decision.verdict == "refuted":
        return decision.alternative is not None and _refutes(decision.alternative.numpy(), heads, claims)
    return True


def _is_row(row: Array, visible: Array) -> bool:
    return bool(row.min() >= 0.0 and abs(row.sum() - 1.0) <= UNIT_SUM and not row[visible == 0].any())


def _range_holds(decision: RowDecision, heads: Sequence[tuple[Array, Array, Array, float]], bound: object) -> bool:
    assert decision.quantity is not None
    assert callable(bound)
    if decision.range_duals is None:
        return False
    cost, duals = decision.quantity.to(torch.float64).numpy(), decision.range_duals.numpy()
    own = sum(w * float(cost @ row) for row, _, _, w in heads)
    near = UNIT_SUM * max(1.0, float(np.abs(cost).max()))
    least, most = (sum(w * float(pick(cost[seen])) for _, _, seen, w in heads) for pick in (np.min, np.max))
    return bool(
        decision.lower <= max(bound(cost, duals[0]), least)
        and decision.upper >= min(-bound(-cost, duals[1]), most)
        and decision.lower - near <= own <= decision.upper + near
    )


def _covered(decision: RowDecision, claim: Claim) -> bool:
    """Whether the proved inequalities are this claim's, and leave out none of its rivals."""
    base = claim.costs.to(torch.float64).numpy()
    missing = set(claim.rivals)
    some = False
    for cost, said in zip(decision.costs.numpy(), decision.bounds.tolist(), strict=True):
        gone = base - cost
        group = set(np.flatnonzero(gone == 1.0).tolist())
        if np.count_nonzero(gone) != len(group) or not group <= set(claim.rivals):
            continue
        if said > claim.threshold or (not claim.strict and said >= claim.threshold):
            missing -= group
            # Without rivals the claim itself must have been proved; with them every rival must be in some group.
            some = some or not claim.rivals
    return not missing if claim.rivals else some


def _refutes(other: Array, heads: Sequence[tuple[Array, Array, Array, float]], claims: Sequence[Claim]) -> bool:
    for x, (row, values, seen, _) in zip(other, heads, strict=True):
        size = float(np.linalg.norm(row @ values)) or 1.0
        if not _is_row(x, seen) or float(np.linalg.norm((x - row) @ values)) > SAME_OUTPUT * size:
            return False
    total = np.asarray(sum(w * x for x, (_, _, _, w) in zip(other, heads, strict=True)))
    return any(breaks(claim, total) for claim in claims)
