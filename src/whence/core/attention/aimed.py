"""Aimed witnesses: of all rows with the same head output, the one with few keys, the most spread one, or the cheapest.

- *sparse*: a vertex of P has at most rank([V, 1]) ≤ d_v + 1 keys (Carathéodory). The one taken minimises Σ x_j/(a_j + ε),
  so it stays on keys that the row itself weighs.
- *spread*: the row of largest entropy, x_j ∝ exp(v_jᵀu) on the visible keys: the minimum over u of
  log Σ_j exp(v_jᵀu) − uᵀo, smooth and convex in d_v variables, by Newton's method.
- any costs c: the vertex that minimises cᵀx.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from whence.core.attention.head_rows import same_output
from whence.core.attention.polytope import Polytope
from whence.core.attention.witness import Witness, residual
from whence.core.numerics.arrays import Array
from whence.core.numerics.checks import as_row
from whence.core.numerics.tolerances import (
    FEASIBLE,
    LIGHT_KEY,
    PROJECTOR_ROUNDING,
    SAME_OUTPUT,
    SHORTEST_STEP,
    SOLVER_ZERO,
)
from whence.errors import InputError

_EPS = float(np.finfo(np.float64).eps)


def aimed_row(attention_row: Tensor, values: Tensor, aim: str | Tensor, *, visible: Tensor | None = None) -> Witness:
    """The row with the same output that `aim` asks for: "sparse", "spread", or costs (n_key,) to be minimised.

    >>> row, values = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([[1.0], [0.0], [0.0]])
    >>> int((aimed_row(row, values, "sparse").alternative > 0).sum())          # d_v + 1 keys suffice
    2
    >>> [round(w, 6) for w in aimed_row(torch.tensor([0.5, 0.4, 0.1]), values, "spread").alternative.tolist()]
    [0.5, 0.25, 0.25]
    """
    row, values64, seen = as_row(attention_row, values, visible)
    a, v = row[seen].numpy(), values64[seen].numpy()
    programs = 1
    if isinstance(aim, Tensor):
        if aim.shape != row.shape or not bool(torch.isfinite(aim).all()):
            raise InputError(f"aim of shape {tuple(aim.shape)}: give {len(row)} finite costs, one for each key.")
        best = _vertex(a, v, aim.detach().to(torch.float64)[seen].numpy())
    elif aim == "sparse":
        best = _vertex(a, v, 1.0 / (a + LIGHT_KEY))
        if np.linalg.norm((best - a) @ v) > SAME_OUTPUT * np.linalg.norm(a @ v):
            # A vertex that could not be polished: least squares under x ≥ 0 also ends on at most rank([V, 1]) keys.
            q = _basis(v)
            best = nnls(q.T, q.T @ a, maxiter=50 * len(a))[0]
    elif aim == "spread":
        best, programs = most_spread(a, v), 0
    else:
        raise InputError(f"aim={aim!r} is unknown; use 'far', 'sparse', 'spread', or costs for the keys.")
    other = torch.zeros_like(row)
    other[seen] = torch.from_numpy(best)
    distance = 0.5 * float((other - row).abs().sum())
    return Witness(row, other, distance, residual(row, other, values64), programs)


def _basis(values: Array) -> Array:
    """An orthonormal basis of the columns of [V, 1]."""
    scale = float(np.abs(values).max(initial=0.0)) or 1.0
    u, s, _ = np.linalg.svd((values - values.mean(axis=0)) / scale, full_matrices=False)
    kept = u[:, s > max(values.shape) * _EPS * max(float(s[0]), _EPS)] if len(s) else u
    return np.column_stack([kept, np.full(len(values), len(values) ** -0.5)])


def _vertex(row: Array, values: Array, cost: Array) -> Array:
    vertex = Polytope(row, values, eps=_EPS, perturbed=False).vertex(cost)
    return same_output(vertex, row, _basis(values))


def most_spread(row: Array, values: Array, *, steps: int = 100) -> Array:
    """The row of largest entropy with the same output; the row itself where Newton's method does not reach 1e-9."""
    q = _basis(values)[:, :-1] * np.sqrt(len(row))
    target = row @ q
    u = np.zeros(q.shape[1])

    def state(u: Array) -> tuple[float, Array]:
        score = q @ u
        top = float(score.max())
        weights = np.exp(score - top)
        total = float(weights.sum())
        return top + float(np.log(total)) - float(u @ target), weights / total

    height, x = state(u)
    for _ in range(steps):
        slope = x @ q - target
        if float(np.abs(slope).max(initial=0.0)) < PROJECTOR_ROUNDING:
            break
        curve = (q * x[:, None]).T @ q - np.outer(x @ q, x @ q)
        step = np.linalg.lstsq(curve + 1e-14 * np.eye(len(u)), -slope, rcond=None)[0]
        size = 1.0
        while size > SHORTEST_STEP:
            taller, y = state(u + size * step)
            if taller <= height + 0.25 * size * float(slope @ step) or taller < height:
                break
            size /= 2
        if size <= SHORTEST_STEP:
            break
        u, height, x = u + size * step, taller, y
    if float(np.abs(x @ q - target).max(initial=0.0)) > FEASIBLE:
        return row
    # The last digits: back onto the equalities, which keeps every weight positive.
    return same_output(x, row, _basis(values)) if float(x.min()) > SOLVER_ZERO else x
