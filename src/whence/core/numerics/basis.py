"""Orthonormal bases of column spaces, in float64, batched, with the rank decided per head.

Everything in part 1 rests on one object: the column space of the values a row can see, V (constraint "output") or
[V, 1] (constraint "simplex"). This file finds an orthonormal basis of it and its rank.

Rank. A singular value counts when it exceeds σ_max(V) · max(n, d_v) · eps, n the number of visible keys, eps from
`tolerances.rank_eps`. The simplex rank is 1 + rank(V − 1μᵀ) *with the tolerance of V*: the mean is taken out, the
rounding of size eps·σ_max(V) is not (identical rows plus rounding must stay rank 1).

Speed. Cholesky of the d_v × d_v Gram matrix (float64, values scaled to 1), accepted only where a rigorous bound on
the condition number, κ_F = ‖L‖_F ‖L⁻¹‖_F ≥ cond(V), proves full rank; a second Cholesky pass where κ_F² would
show; a float64 SVD for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whence.core.numerics.checks import Constraint
from whence.core.numerics.tolerances import CHOLESKY_LIMIT, EPS64, PROVED


def unit_scale(values: Tensor) -> tuple[Tensor, Tensor]:
    """values (…, n, d) in float64, and the power of two (…, 1, 1) they were divided by.

    The square of any float32 fits in float64, so only float64 values are scaled (to max|v| in [½, 1), per head; a
    power of two loses no bit): 1e-200 would vanish from a Gram matrix.
    """
    values = values.detach()
    one = torch.ones(*values.shape[:-2], 1, 1, dtype=torch.float64)
    if values.dtype != torch.float64:
        return values.to(torch.float64), one
    least, most = torch.aminmax(values.flatten(-2), dim=-1)
    largest = torch.maximum(-least, most)[..., None, None]
    # The clamp keeps 2^-exponent finite for subnormals, which then stay small: harmless.
    exponent = torch.frexp(largest).exponent.clamp(-1000, 1000)
    return values * torch.ldexp(one, -exponent), torch.ldexp(one, exponent)


@dataclass(frozen=True)
class Basis:
    """An orthonormal basis of col(V) or col([V, 1]) for each of u problems.

    q: (u, n, r) float64, orthonormal columns, zero columns beyond the rank and zero rows at invisible keys (all
    zero where `identified`: there the projector is the identity on the visible keys).
    rank: (u,). identified: (u,), rank equals the number of visible keys.
    inverse_factor: (u, d_v, d_v), L⁻¹ with V = Q·Lᵀ, meaningful where `regular`; q's first d_v columns are V·L⁻ᵀ.
    spread: (u,), κ_F ≥ cond(V) where `regular`, infinite elsewhere.
    """

    q: Tensor
    rank: Tensor
    identified: Tensor
    inverse_factor: Tensor
    regular: Tensor
    spread: Tensor


def inverse_cholesky(gram: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """gram (…, k, k) = LLᵀ: L⁻¹, ‖L⁻¹‖_F and whether the factorisation went through; the identity where it did not."""
    lower, info = torch.linalg.cholesky_ex(gram)
    good = info == 0
    if not bool(good.all()):
        # `solve_triangular` on a broken factor would spread NaN: put the identity in before solving.
        lower = torch.where(good[..., None, None], lower, torch.eye(gram.shape[-1], dtype=gram.dtype))
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype).expand(gram.shape)
    inverse = torch.linalg.solve_triangular(lower, eye, upper=False)
    return inverse, torch.linalg.vector_norm(inverse, dim=(-2, -1)), good


def helmert_rows(values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Rows u_j whose running Gram matrices are those of the centred prefixes; and which of them count.

    u_j = √(c/(c+1)) (v_j − mean of the c valid rows before j), the Helmert transform: Σ_{k≤j} u_k u_kᵀ equals the
    scatter matrix of the valid rows up to j. values (…, n, d), valid (…, n); the first valid row gives no u.
    """
    weight = valid.to(values.dtype).unsqueeze(-1)
    count = weight.cumsum(-2) - weight
    mean = ((values * weight).cumsum(-2) - values * weight) / count.clamp(min=1)
    counts = valid & (count.squeeze(-1) > 0)
    rows = (values - mean) * (count / (count + 1)).sqrt()
    return rows * counts.unsqueeze(-1), counts


def centre(values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """V − 1μᵀ on the valid rows (zero elsewhere) and μ (…, 1, d), the mean of the valid rows."""
    weight = valid.to(values.dtype).unsqueeze(-1)
    mean = (values * weight).sum(-2, keepdim=True) / weight.sum(-2, keepdim=True).clamp(min=1)
    return (values - mean) * weight, mean


def _independent_rows(values: Tensor, valid: Tensor, eps: float, simplex: bool, norm: Tensor) -> Tensor:
    """Whether the valid rows (at most d_v, or d_v + 1 with the ones column) are provably independent. (u,)"""
    width = min(values.shape[-2], values.shape[-1] + int(simplex))
    order = torch.argsort(valid.to(torch.int8), dim=-1, descending=True, stable=True)[:, :width]
    rows = torch.gather(values, 1, order.unsqueeze(-1).expand(-1, -1, values.shape[-1]))
    real = torch.gather(valid, 1, order)
    rows = rows * real.unsqueeze(-1)
    if simplex:
        rows, real = helmert_rows(rows, real)
    rows = rows / norm.clamp(min=torch.finfo(torch.float64).tiny)[:, None, None]
    gram = rows @ rows.mT + torch.diag_embed((~real).to(rows.dtype))
    _, size, good = inverse_cholesky(gram)
    # The padded diagonal adds one to ‖L⁻¹‖² for each row that is not there.
    size = (size.square() - (~real).sum(-1)).clamp(min=0).sqrt()
    # Half the tolerance, so that rounding in the bound cannot turn the decision.
    return good & (size * max(values.shape[-1], width) * eps < PROVED) & (size < CHOLESKY_LIMIT)


def column_basis(
    values: Tensor, valid: Tensor | None, eps: float, constraint: Constraint, *, refine: float = 0.0
) -> Basis:
    """The basis of the visible rows' column space for u problems at once.

    values: (u, n, d_v), float64 and scaled by `unit_scale`; valid: (u, n) boolean or None for all; eps: `rank_eps`;
    refine: largest κ_F² · EPS64 tolerated before the second Cholesky pass.
    """
    problems, n, width = values.shape
    simplex = constraint == "simplex"
    if valid is None:
        valid = torch.ones(problems, n, dtype=torch.bool)
        count = torch.full((problems,), n)
    else:
        values = values * valid.unsqueeze(-1)
        count = valid.sum(-1)
    norm = torch.linalg.vector_norm(values, dim=(-2, -1))  # ≥ σ_max(V), the scale of the rank tolerance
    columns = width + int(simplex)

    identified = count == 0
    few = (count <= columns) & (count > 0)
    if bool(few.any()):
        where = few.nonzero().squeeze(-1)
        identified[where] = _independent_rows(values[where], valid[where], eps, simplex, norm[where])

    body = centre(values, valid)[0] if simplex else values
    q = None
    rank = count.clone()
    spread = torch.full((problems,), torch.inf, dtype=torch.float64)
    regular = torch.zeros(problems, dtype=torch.bool)
    inverse_factor = torch.zeros(problems, width, width, dtype=torch.float64)
    many = ~identified & (count > columns - 1)
    if bool(many.any()):
        everything = bool(many.all())
        index = torch.arange(problems) if everything else many.nonzero().squeeze(-1)
        v = body if everything else body[index]
        gram = v.mT @ v
        inverse, size, good = inverse_cholesky(gram)
        # ‖L‖_F² = trace of the Gram matrix.
        kappa = gram.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt() * size
        longest = torch.clamp(count[index], min=width).to(torch.float64)
        good = good & (kappa < CHOLESKY_LIMIT) & (size * norm[index] * longest * eps < PROVED)
        basis = v @ inverse.mT
        again = good & (kappa.square() * EPS64 > refine)
        if bool(again.any()):
            some = again.nonzero().squeeze(-1)
            second, _, fine = inverse_cholesky(basis[some].mT @ basis[some])
            basis[some] = basis[some] @ second.mT
            inverse[some] = second @ inverse[some]
            good[some] &= fine
        if everything and bool(good.all()):
            q = basis
            spread, inverse_factor, regular = kappa, inverse, good
            rank = torch.full((problems,), columns)
        else:
            q = torch.zeros(problems, n, width, dtype=torch.float64)
            kept = index[good]
            q[kept] = basis[good]
            spread[kept] = kappa[good]
            inverse_factor[kept] = inverse[good]
            regular[kept] = True
            rank[kept] = columns

    if q is None:
        q = torch.zeros(problems, n, width, dtype=torch.float64)
    rest = (~identified & ~regular).nonzero().squeeze(-1)
    if rest.numel():
        # σ_max(V) needs the uncentred values: that is where the rounding is.
        u, s, _ = torch.linalg.svd(body[rest], full_matrices=False)
        top = torch.linalg.svdvals(values[rest])[:, 0] if simplex else s[:, 0]
        longest = torch.clamp(count[rest], min=width).to(torch.float64)
        keep = s > (top * longest * eps).unsqueeze(-1)
        q[rest, :, : s.shape[-1]] = u * keep.unsqueeze(1)
        rank[rest] = keep.sum(-1) + int(simplex)
        identified[rest] = rank[rest] == count[rest]
    if simplex:
        # V − 1μᵀ is orthogonal to 1, so 1/√n completes the basis.
        ones = valid.to(torch.float64) / count.clamp(min=1).to(torch.float64).sqrt().unsqueeze(-1)
        q = torch.cat([q, ones.unsqueeze(-1)], -1)
    if bool(identified.any()):
        q[identified] = 0.0
    return Basis(q, rank, identified, inverse_factor, regular, spread)
