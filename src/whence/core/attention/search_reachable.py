"""Global search: is there a second softmax row, made by some other query, with the same head output?

Local uniqueness is not enough: with d_k = d_v = 32, MiniLM has a second such row in most texts of 64 tokens.
Multi-start Levenberg–Marquardt on F(z) = Vᵀ(softmax(log a + Kz) − a), then Newton. Finding none proves nothing,
and the result says so. methods 1.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whence.core.attention.reachable_rows import _centred_basis, near_tied
from whence.core.numerics.basis import unit_scale
from whence.core.numerics.checks import as_row, check_values, shape
from whence.core.numerics.threads import one_thread
from whence.core.numerics.tolerances import (
    EXACT_OUTPUT,
    NEWTON_FROM,
    PROJECTOR_ROUNDING,
    SECOND_ROW,
    SQUARED_ZERO,
    rank_eps,
)
from whence.errors import InputError


@dataclass(frozen=True)
class ReachableSearch:
    """What the search for a second softmax-reachable row found.

    exists: another row exists, here it is. alternative (n_key,): that of largest total variation (the row itself when
    none was found). query_change (d_k,): Δq (times the softmax scale) that produces it, log x − log a = KΔq + c.
    residual: ‖(x − a)ᵀV‖/‖aᵀV‖. starts, returned: how many starts, how many of them came back to the row itself.
    tied: keys are a function of the values, so the row is unique (Theorem 1) and nothing was searched.
    """

    exists: bool
    row: Tensor
    alternative: Tensor
    query_change: Tensor
    total_variation: float
    residual: float
    starts: int
    returned: int
    tied: bool

    @property
    def verdict(self) -> str:
        if self.tied:
            return "unique: the keys are an affine function of the values (Theorem 1)"
        if self.exists:
            return f"a second row exists, at total variation {self.total_variation:.3g}"
        return f"none found in {self.starts} starts"


@one_thread()
def search_reachable(
    attention_row: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    starts: int = 64,
    iterations: int = 80,
    visible: Tensor | None = None,
    seed: int = 0,
    use_theorem: bool = True,
) -> ReachableSearch:
    """Search for x = softmax(log a + KΔq) with xᵀV = aᵀV and x ≠ a.

    Args:
        attention_row: (n_key,), keys: (n_key, d_k), values: (n_key, d_v), visible: (n_key,) boolean.
        starts: random Δq, of lengths that change the log-weights by about 1 to 16.
        iterations: Levenberg–Marquardt steps for each start.
        use_theorem: tied keys are answered by Theorem 1 and not searched; False searches them like any others.

    >>> _ = torch.manual_seed(0)
    >>> row, keys, values = torch.softmax(torch.randn(12), -1), torch.randn(12, 4), torch.randn(12, 2)
    >>> search_reachable(row, keys, values).exists  # more key than value dimensions: a whole family
    True
    >>> search_reachable(row, values @ torch.randn(2, 4), values).verdict
    'unique: the keys are an affine function of the values (Theorem 1)'
    """
    check_values(keys, name="keys")
    row, v_all, seen = as_row(attention_row, values, visible)
    if keys.ndim != 2 or keys.shape[0] != len(row):
        raise InputError(f"keys {shape(keys)}: expected ({len(row)}, d_k), one line for each key of the row.")
    if starts < 1:
        raise InputError(f"starts={starts!r}; at least one start is needed.")
    live = seen & (row > 0)  # an exact zero stays zero whatever the query
    a, k, v = row[live], keys.detach().to(torch.float64)[live], v_all[live]
    eps = max(rank_eps(keys.dtype), rank_eps(values.dtype))
    tied = use_theorem and bool(near_tied(keys[live], values[live], query_diameter=0.0).tied)
    nothing = ReachableSearch(
        False,
        row,
        row,
        torch.zeros(keys.shape[1], dtype=torch.float64),
        0.0,
        0.0,
        0 if tied else starts,
        0,
        tied,
    )
    if tied:
        return nothing
    every = torch.ones(1, len(a), dtype=torch.bool)
    k_basis, k_rank = _centred_basis(unit_scale(k)[0].unsqueeze(0), every, eps)
    v_basis, v_rank = _centred_basis(unit_scale(v)[0].unsqueeze(0), every, eps)
    # Whitened coordinates of unit row size: one damping fits all directions.
    kb = k_basis[0][:, : int(k_rank)] * len(a) ** 0.5
    vb = v_basis[0][:, : int(v_rank)] * len(a) ** 0.5
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(starts, kb.shape[1], generator=generator, dtype=torch.float64)
    reach = (z @ kb.T).abs().amax(-1, keepdim=True)
    z = z / reach * torch.exp(torch.rand(starts, 1, generator=generator, dtype=torch.float64) * 2.8)
    z = _solve(z, a, kb, vb, iterations)
    x = torch.softmax(a.log() + z @ kb.T, -1)
    size = torch.linalg.vector_norm(a @ vb) + 1.0
    solved = torch.linalg.vector_norm((x - a) @ vb, dim=-1) <= EXACT_OUTPUT * size
    distance = 0.5 * (x - a).abs().sum(-1)
    returned = int((solved & (distance <= SECOND_ROW)).sum())
    good = solved & (distance > SECOND_ROW)
    if not bool(good.any()):
        return ReachableSearch(**{**nothing.__dict__, "returned": returned})
    best = int(torch.where(good, distance, -1.0).argmax())
    alternative = torch.zeros_like(row)
    alternative[live] = x[best]
    change = torch.linalg.lstsq(k - k.mean(0), (kb @ z[best]).unsqueeze(-1), driver="gelsd").solution.squeeze(-1)
    moved = float(torch.linalg.vector_norm((alternative - row) @ v_all))
    output = float(torch.linalg.vector_norm(row @ v_all))
    return ReachableSearch(
        exists=True,
        row=row,
        alternative=alternative,
        query_change=change,
        total_variation=float(distance[best]),
        residual=moved / output if output > 0 else moved,
        starts=starts,
        returned=returned,
        tied=False,
    )


def _solve(z: Tensor, a: Tensor, kb: Tensor, vb: Tensor, iterations: int) -> Tensor:
    """Levenberg–Marquardt for all starts at once; once close, the vanishing damping makes it Newton."""
    log_a = a.log()
    eye = torch.eye(kb.shape[1], dtype=torch.float64)
    damping = torch.full((len(z),), 1e-2, dtype=torch.float64)

    def evaluate(point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.softmax(log_a + point @ kb.T, -1)
        f = (x - a) @ vb
        return x, f, f.square().sum(-1)

    x, f, cost = evaluate(z)
    for _ in range(iterations):
        # J = Vᵀ(diag x − xxᵀ)K
        jacobian = vb.T @ (x.unsqueeze(-1) * kb) - (x @ vb).unsqueeze(-1) * (x @ kb).unsqueeze(-2)
        normal = jacobian.mT @ jacobian
        scale = normal.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=1e-300)
        step = torch.linalg.solve(
            normal + (damping * scale).clamp(min=1e-300)[:, None, None] * eye, (jacobian.mT @ f.unsqueeze(-1))
        ).squeeze(-1)
        trial = z - step
        x_new, f_new, cost_new = evaluate(trial)
        better = cost_new < cost
        z = torch.where(better.unsqueeze(-1), trial, z)
        x = torch.where(better.unsqueeze(-1), x_new, x)
        f = torch.where(better.unsqueeze(-1), f_new, f)
        cost = torch.where(better, cost_new, cost)
        damping = torch.where(better, damping * 0.2, damping * 4).clamp(1e-15, 1e8)
        if bool((cost < SQUARED_ZERO).all()):
            break
    for _ in range(3):  # Newton, minimum norm, accepted only where it helps
        jacobian = vb.T @ (x.unsqueeze(-1) * kb) - (x @ vb).unsqueeze(-1) * (x @ kb).unsqueeze(-2)
        close = cost < NEWTON_FROM
        if not bool(close.any()):
            break
        step = (torch.linalg.pinv(jacobian, rtol=PROJECTOR_ROUNDING) @ f.unsqueeze(-1)).squeeze(-1)
        trial = z - step
        x_new, f_new, cost_new = evaluate(trial)
        better = close & (cost_new < cost)
        z = torch.where(better.unsqueeze(-1), trial, z)
        x = torch.where(better.unsqueeze(-1), x_new, x)
        f = torch.where(better.unsqueeze(-1), f_new, f)
        cost = torch.where(better, cost_new, cost)
    return z
