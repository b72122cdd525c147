"""Witness: show me another attention row that the head cannot tell from this one.

The alternative of largest total variation found: the vertices of P that the interval programs meet, each improved by
sequential linear programming (maximise sign(x − a)ᵀx, repeat; total variation is convex, so each step can only gain).
Brute force over small polytopes is matched or missed by a few per cent (methods 1.2 (4)). A witness is a lower bound
on how different the row could be, and counts in a report only once it has been put into the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.core.attention.polytope import Polytope
from whence.core.numerics.arrays import Array
from whence.core.numerics.checks import as_row
from whence.core.numerics.tolerances import OTHER_OUTPUT, OWN_ROW, SAME_ROW, SEARCH_GAIN, rank_eps
from whence.errors import InputError
from whence.results.short_repr import short_repr


@dataclass(frozen=True)
class Witness:
    """An attention row with the same head output.

    row (n_key,): the original, divided by its sum; alternative (n_key,): ≥ 0, sum 1, zero at hidden keys.
    total_variation: ½‖alternative − row‖₁. residual: ‖(alternative − row)ᵀV‖ / ‖rowᵀV‖ (absolute where the output is
    zero). programs: linear programs solved. All float64.
    """

    __repr__ = short_repr

    row: Tensor
    alternative: Tensor
    total_variation: float
    residual: float
    programs: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "row": self.row.tolist(),
            "alternative": self.alternative.tolist(),
            "total_variation": self.total_variation,
            "residual": self.residual,
            "programs": self.programs,
        }


def witness_row(
    attention_row: Tensor,
    values: Tensor,
    *,
    top: int = 5,
    starts: int = 4,
    tolerance: float = 0.0,
    visible: Tensor | None = None,
    seed: int = 0,
) -> Witness:
    """The alternative row of largest total variation found; the row itself where none with its output was found.

    Args:
        attention_row: (n_key,), ≥ 0, sum 1. values: (n_key, d_v).
        top: the vertices that lower and raise each of the heaviest `top` weights are tried as starts.
        starts: how many random keys to raise, and how many random sign vectors, are tried besides.
        tolerance: as in `certify_row`; 0 keeps the output exactly.
        visible: (n_key,) boolean.

    >>> witness = witness_row(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([[1.0], [0.0], [0.0]]))
    >>> witness.alternative, witness.total_variation
    (tensor([0.5000, 0.0000, 0.5000], dtype=torch.float64), 0.5)
    """
    row, values64, seen = as_row(attention_row, values, visible)
    if top < 1 or starts < 0:
        raise InputError(f"top={top!r}, starts={starts!r}; give at least one top weight and no negative count.")
    a, v = row[seen].numpy(), values64[seen].numpy()
    solver = Polytope(a, v, tolerance=tolerance, eps=rank_eps(values.dtype))
    best = _search(solver, a, _directions(a, top, starts, np.random.default_rng(seed)))
    alternative = torch.zeros_like(row)
    alternative[seen] = torch.from_numpy(best)
    if tolerance == 0 and residual(row, alternative, values64) > OTHER_OUTPUT:
        alternative = row
    return Witness(
        row=row,
        alternative=alternative,
        total_variation=0.5 * float((alternative - row).abs().sum()),
        residual=residual(row, alternative, values64),
        programs=solver.solved,
    )


def residual(row: Tensor, alternative: Tensor, values: Tensor) -> float:
    """‖(x − a)ᵀV‖ / ‖aᵀV‖ for an alternative x (n_key,), or the numerator alone where the output is zero."""
    moved = float(torch.linalg.vector_norm((alternative - row) @ values))
    size = float(torch.linalg.vector_norm(row @ values))
    return moved / size if size > 0 else moved


def random_row_at(
    attention_row: Tensor, total_variation: float, *, seed: int = 0, visible: Tensor | None = None
) -> Tensor:
    """A random attention row at exactly this total variation from the given one: the control of a witness.

    Walks from the row towards a random row of the simplex (flat Dirichlet, then sparser ones if that is not far
    enough, at last the lightest key alone). (n_key,) float64.

    >>> row = torch.tensor([0.7, 0.2, 0.1])
    >>> other = random_row_at(row, 0.25)
    >>> round(0.5 * float((other - row).abs().sum()), 6), round(float(other.sum()), 6)
    (0.25, 1.0)
    """
    blank = torch.zeros(len(attention_row), 1, dtype=torch.float64)
    row, _, seen = as_row(attention_row, blank, visible)
    a = row[seen].numpy()
    farthest = 1.0 - float(a.min())
    if not 0.0 <= total_variation <= farthest + OWN_ROW:
        raise InputError(
            f"total_variation={total_variation!r}; rows at distance 0 to {farthest:.6g} (all mass on the lightest "
            "key) exist."
        )
    generator = np.random.default_rng(seed)
    target = np.zeros(len(a))
    target[np.argmin(a)] = 1.0
    for concentration in (1.0, 0.3, 0.1, 0.03, 0.01):
        drawn = generator.dirichlet(np.full(len(a), concentration))
        if np.isfinite(drawn).all() and 0.5 * np.abs(drawn - a).sum() >= total_variation:
            target = drawn
            break
    distance = 0.5 * float(np.abs(target - a).sum())
    step = total_variation / distance if distance > 0 else 0.0
    result = torch.zeros_like(row)
    result[seen] = torch.from_numpy(np.clip(a + min(step, 1.0) * (target - a), 0.0, None))
    return result


def _directions(a: Array, top: int, starts: int, generator: np.random.Generator) -> list[Array]:
    """Objectives to minimise first: the heavy weights together, single weights down and up, then random signs."""
    n = len(a)
    heavy = np.argsort(-a, kind="stable")[: min(top, n)]
    costs = [np.where(a >= 1.0 / n, 1.0, -1.0)]
    # Lowering a heavy key, raising it, and raising a key that has nearly nothing reach different corners.
    light = generator.permutation(n)[:starts]
    for j, sign in [*((j, 1.0) for j in heavy), *((j, -1.0) for j in heavy), *((j, -1.0) for j in light)]:
        cost = np.zeros(n)
        cost[j] = sign
        costs.append(cost)
    costs.extend(generator.choice([-1.0, 1.0], size=n) for _ in range(starts))
    return costs


def _climb(solver: Polytope, a: Array, cost: Array, *, steps: int = 20) -> tuple[Array, float]:
    """Sequential linear programs from one objective, until total variation stops growing."""
    x = solver.vertex(cost)
    here = float(np.abs(x - a).sum())
    for _ in range(steps):
        following = solver.vertex(-np.sign(x - a))
        gained = float(np.abs(following - a).sum())
        if gained <= here + SAME_ROW:
            break
        x, here = following, gained
    return x, here


def _search(solver: Polytope, a: Array, costs: list[Array], *, kicks: int = 6) -> Array:
    """The best of all starts; then the signs of the largest moves are turned, one by one, to leave a local summit."""
    best, distance = a, 0.0
    for cost in costs:
        x, here = _climb(solver, a, cost)
        if here > distance + SAME_ROW:
            best, distance = x, here
    risen = distance > SAME_ROW
    while risen:
        risen = False
        move = best - a
        for j in np.argsort(-np.abs(move), kind="stable")[:kicks]:
            cost = -np.sign(move)
            cost[j] = -cost[j] * len(a)
            x, here = _climb(solver, a, cost)
            if here > distance + SEARCH_GAIN:
                best, distance, risen = x, here, True
                break
    return solver.polished(best) if distance > 0 else a
