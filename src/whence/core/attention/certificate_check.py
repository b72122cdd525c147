"""What a certificate claims, verified without a solver: weak duality, dot products and one singular value decomposition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from whence.core.attention.polytope import closed_form, output_slack, proved_minimum
from whence.core.numerics.arrays import Array, Booleans
from whence.core.numerics.tolerances import CONDITION, EPS32, EPS64, NO_WEIGHT, OWN_ROW

if TYPE_CHECKING:
    from whence.core.attention.certificate import Certificate


def verify(certificate: Certificate) -> bool:
    """Whether every number of the certificate is proved by what it carries; see `Certificate.check`."""
    return _well_formed(certificate) and _proved_ends(certificate) and _proved_dimension(certificate)


def outside_cost(n: int, keys: np.ndarray[Any, Any]) -> Array:
    """(n,): 1 at every key but `keys`."""
    cost = np.ones(n)
    cost[keys] = 0.0
    return cost


def spectrum(values: Array, eps: float) -> tuple[int, float, Array]:
    """Rank of [V, 1], condition of V − 1μᵀ and its pseudo-inverse, transposed (n, d_v); by SVD, from the definition."""
    n, width = values.shape
    scale = float(np.abs(values).max()) or 1.0
    body = values / scale
    tolerance = np.linalg.norm(body, ord=2) * max(n, width) * eps
    u, s, w = np.linalg.svd(body - body.mean(axis=0), full_matrices=False)
    inner = min(int((s > tolerance).sum()), n - 1)
    condition = float(s[0] / s[inner - 1]) if inner else float("nan")
    return inner + 1, condition, (u[:, :inner] / s[:inner]) @ w[:inner] / scale


def dimension_of(values: Array, rank: int, slack: float, support: Booleans, eps: float) -> int:
    """dim P = |support| − rank([V_support, 1]); with a tolerance that lets the output move, the whole simplex's n − 1."""
    if slack > 0.0:
        return len(values) - 1
    return int(support.sum()) - (rank if support.all() else spectrum(values[support], eps)[0])


def _well_formed(c: Certificate) -> bool:
    """Settings and shapes that can be, and a row that is one."""
    n, width, k, p = *c.values.shape, len(c.keys), len(c.pairs)
    shapes = {
        "row": (n,), "visible": (n,), "lower": (k,), "upper": (k,), "lower_duals": (k, width), "upper_duals": (k, width),
        "outside_dual": (width,), "pairs": (p, 2), "gaps": (p,), "pair_duals": (p, width), "bound_lower": (n,),
        "bound_upper": (n,), "bound_directions": (n, width), "support": (n,), "interior": (n,), "support_dual": (width,),
    }  # fmt: skip
    if any(tuple(getattr(c, name).shape) != shape for name, shape in shapes.items()):
        return False
    if not 0.0 <= c.tolerance < float("inf") or c.eps not in (EPS32, EPS64) or not bool(c.visible.any()):
        return False
    places = torch.cat([c.keys, c.pairs.flatten()])
    if bool(((places < 0) | (places >= n)).any()) or not bool(c.visible[places].all()):
        return False
    for name in ("row", "interior"):
        x = getattr(c, name)
        if not bool((x >= 0).all()) or abs(float(x.sum()) - 1) > OWN_ROW or bool(x[~c.visible].any()):
            return False
    return bool(torch.isfinite(c.values).all()) and bool((c.weights.diff() <= 0).all())


def _proved_ends(c: Certificate) -> bool:
    """Every end, bound and gap is what its dual proves, and the row itself keeps to it."""
    seen = c.visible.numpy()
    row, values = c.row.numpy()[seen], c.values.numpy()[seen]
    slack = output_slack(row, values, c.tolerance)
    place = np.cumsum(seen) - 1
    n, keys = len(row), place[c.keys.numpy()]
    single, outside = np.eye(n)[keys], outside_cost(n, keys)[None]
    order = np.eye(n)[place[c.pairs.numpy()[:, 0]]] - np.eye(n)[place[c.pairs.numpy()[:, 1]]]
    claims = (  # cᵀx ≥ claim for every alternative; x ≥ 0 and Σx = 1 are proofs of their own
        (single, c.lower_duals, c.lower.numpy(), 0.0),
        (-single, c.upper_duals, -c.upper.numpy(), -1.0),
        (-outside, c.outside_dual[None], np.array([-c.outside]), -1.0),
        (order, c.pair_duals, c.gaps.numpy(), -1.0),
    )
    for costs, duals, claim, floor in claims:
        tight, loose = (
            np.clip(proved_minimum(costs, duals.numpy(), row, values, slack, allowance=allowance), floor, None)
            for allowance in (1.0, 3.0)
        )
        # The mass on a key, and outside the shown keys, lies between 0 and 1 in every alternative.
        loose = np.minimum(loose, 0.0) if costs is not single and costs is not order else loose
        if not ((claim <= tight).all() and (claim >= loose).all() and (claim <= costs @ row + OWN_ROW).all()):
            return False
    lower, upper = c.bound_lower.numpy(), c.bound_upper.numpy()
    if lower[~seen].any() or upper[~seen].any():
        return False
    lower, upper, directions = lower[seen], upper[seen], c.bound_directions.numpy()[seen]
    proved, wider = (closed_form(directions, row, values, slack, allowance=allowance) for allowance in (1.0, 3.0))
    sound = (lower <= proved[0]).all() and (upper >= proved[1]).all()
    told = (lower >= wider[0]).all() and (upper <= wider[1]).all()
    return bool(sound and told and (lower <= row + OWN_ROW).all() and (upper >= row - OWN_ROW).all())


def _proved_dimension(c: Certificate) -> bool:
    """Rank and condition are those of the values; the support is attained, and nothing beyond it can be."""
    seen = c.visible.numpy()
    row, values, support = c.row.numpy()[seen], c.values.numpy()[seen], c.support.numpy()[seen]
    slack = output_slack(row, values, c.tolerance)
    rank, condition, _ = spectrum(values, c.eps)
    same = np.isclose(c.condition, condition, rtol=CONDITION, atol=0.0, equal_nan=True)
    if c.rank != rank or not same or c.dimension != dimension_of(values, rank, slack, support, c.eps):
        return False
    interior = c.interior.numpy()[seen]
    if c.support.numpy()[~seen].any() or not ((interior > 0) == support).all():
        return False
    moved = np.abs((interior - row) @ values).max()
    if moved > slack + NO_WEIGHT * np.abs(values).max():
        return False
    rest = -(~support).astype(np.float64)[None]
    return bool(
        support.all() or -proved_minimum(rest, c.support_dual.numpy()[None], row, values, slack)[0] <= NO_WEIGHT
    )
