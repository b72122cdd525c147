"""The first rows of a causal head: which of them need no factorisation of their own?

A row that sees few keys is independent when the distinct values it sees are independent. Without equal values the output
then determines the row, A⊥ = A. Keys with equal values (without positions in the values every repeated token, in
layer 0 of most decoders) are seen only through their sum: V = E·U with E the indicator of which key has which distinct
value, U of independent rows, so col(V) = col(E) = col([V, 1]), and A⊥ is the mean of A over the visible keys of equal
value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whence.core.numerics.basis import helmert_rows
from whence.core.numerics.tolerances import CHOLESKY_LIMIT, PROVED


@dataclass(frozen=True)
class Early:
    """independent (u, n): the prefix that ends with key j is independent. first_equal (u, n): the first key of equal value.

    has_duplicates (u,): some keys of the head have equal values (first_equal differs from the position); looked for only in heads
    that are not independent without.
    """

    independent: Tensor
    first_equal: Tensor
    has_duplicates: Tensor


def early_prefixes(values: Tensor, real: Tensor, eps: float, *, simplex: bool) -> Early:
    """Settle the prefixes with at most d_v distinct values (d_v + 1 on the simplex), where that can be proved.

    values (u, n, d) float64, zero at absent keys; real (u, n): the key exists; eps: that of the rank tolerance.
    """
    problems, n, width = values.shape
    columns = width + int(simplex)
    first_equal = torch.arange(n).expand(problems, n).clone()
    independent, few = _proved(values, real, real, eps, columns)
    has_duplicates = torch.zeros(problems, dtype=torch.bool)
    left = (few & ~independent).any(-1).nonzero().squeeze(-1)
    if left.numel():
        # An absent key equals no key that is there, whatever its value.
        found = first_equal_rows(values[left].masked_fill(~real[left].unsqueeze(-1), torch.inf))
        duplicate_keys = ((found != torch.arange(n)) & real[left]).any(-1)
        distinct = real[left] & ((found == torch.arange(n)) | ~duplicate_keys.unsqueeze(-1))
        independent[left], _ = _proved(values[left], real[left], distinct, eps, columns, exact=True)
        has_duplicates[left] = duplicate_keys
        first_equal[left[duplicate_keys]] = found[duplicate_keys]
    return Early(independent, first_equal, has_duplicates)


def first_equal_rows(values: Tensor) -> Tensor:
    """For each row of values (u, n, d) float64 the first row equal to it, exactly. (u, n)"""
    problems, n, width = values.shape
    # A sum of integer products is the same in any order, so equal rows have equal sums; unequal ones are told below.
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (width,), generator=generator) | 1
    bits = (values + 0.0).contiguous().view(torch.int64)  # −0.0 + 0.0 is 0.0
    key = ((bits ^ (bits >> 29)) * factors).sum(-1)
    ordered, order = torch.sort(key, dim=-1, stable=True)
    starts = torch.ones(problems, n, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    begin = torch.where(starts, torch.arange(n), 0).cummax(-1).values
    found = torch.empty_like(order).scatter_(-1, order, torch.gather(order, -1, begin))
    same = (torch.gather(values, 1, found.unsqueeze(-1).expand_as(values)) == values).all(-1)
    return torch.where(same, found, torch.arange(n))


def duplicate_counts(first_equal: Tensor, mask: Tensor) -> Tensor:
    """How many keys of equal value each row sees, at each of them. first_equal (n,), mask (rows, n) → (rows, n) float64."""
    index = first_equal.expand(mask.shape)
    seen = mask.to(torch.float64)
    total = torch.zeros_like(seen).scatter_add_(-1, index, seen)
    return torch.gather(total, -1, index)


def duplicate_means(attention: Tensor, first_equal: Tensor, mask: Tensor) -> Tensor:
    """The mean of attention (…, rows, n) over the keys of equal value, by first_equal (…, n), that mask (…, rows, n) shows."""
    index = first_equal.expand(attention.shape)
    a = torch.where(mask, attention.to(torch.float64), 0.0)
    total = torch.gather(torch.zeros_like(a).scatter_add_(-1, index, a), -1, index)
    return torch.where(mask, total / duplicate_counts(first_equal, mask).clamp(min=1), 0.0)


def _proved(
    values: Tensor, real: Tensor, distinct: Tensor, eps: float, columns: int, *, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """Prefixes whose distinct values are independent beyond doubt, and those with few enough of them to be. (u, n)

    σ_min of the distinct rows bounds the smallest singular value that counts from below: equal rows only add to it.
    The inverse Cholesky factor of their Gram matrix K = LLᵀ has the inverses of all leading minors in it, so one
    factorisation gives ‖L_k⁻¹‖_F ≥ 1/σ_min of every prefix. exact: singular values of the longest where that fails.
    """
    width = values.shape[-1]
    number = distinct.cumsum(-1)
    few = number <= columns
    size, rows = _inverse_sizes(values, distinct, columns)
    position = (number - 1).clamp(min=0, max=size.shape[-1] - 1)
    norm = values.square().sum(-1).cumsum(-1).sqrt()  # ‖V‖_F ≥ σ_max of every prefix
    spread = torch.gather(size, -1, position) * norm
    tolerance = real.cumsum(-1).clamp(min=width) * eps
    # Half the tolerance, so that rounding in the bound cannot turn the decision.
    independent = few & ((number == 0) | ((spread * tolerance < PROVED) & (spread < CHOLESKY_LIMIT)))
    if exact:
        left = (few & ~independent).any(-1).nonzero().squeeze(-1)
        if left.numel():
            # Taking rows away from an independent set raises its smallest singular value: the longest prefix decides.
            last = few[left].sum(-1) - 1
            kept = (number[left, last] - int(columns > width)).clamp(min=1)
            s = torch.linalg.svdvals(rows[left])
            least = torch.gather(s, -1, (kept - 1).unsqueeze(-1)).squeeze(-1)
            sure = least > norm[left, last] * tolerance[left, last]
            independent[left] |= sure.unsqueeze(-1) & few[left]
    return independent, few


def _inverse_sizes(values: Tensor, distinct: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """‖L_k⁻¹‖_F for the first k distinct rows (Helmert rows on the simplex), k = 1 …; and those rows."""
    n, width = values.shape[1:]
    m = min(n, columns)
    order = torch.argsort(distinct.to(torch.int8), dim=-1, descending=True, stable=True)[:, :m]
    present = torch.gather(distinct, 1, order)
    rows = torch.gather(values, 1, order.unsqueeze(-1).expand(-1, -1, width)) * present.unsqueeze(-1)
    if columns > width:
        rows, present = helmert_rows(rows, present)
    return inverse_factors(rows, present)[1], rows


def inverse_factors(rows: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """L⁻¹ (u, m, m) of the Gram matrix K = LLᵀ of the present rows, and ‖L_k⁻¹‖_F of its leading parts (u, m).

    L⁻¹ restricted to its first k rows is that of the first k rows. Infinite size, meaningless factor where the leading
    minor of K is not positive.
    """
    problems, m, _ = rows.shape
    scale = torch.linalg.vector_norm(rows, dim=(-2, -1)).clamp(min=torch.finfo(torch.float64).tiny)
    normed = rows / scale[:, None, None]
    gram = normed @ normed.mT + torch.diag_embed((~present).to(torch.float64))
    lower, info = torch.linalg.cholesky_ex(gram)
    failed = (info > 0).nonzero().squeeze(-1)
    reach = torch.full((problems, 1), m)
    eye = torch.eye(m, dtype=torch.float64)
    while failed.numel():
        # The factor is right up to the first minor that is not positive; the identity replaces the rest.
        reach[failed, 0] = torch.minimum(reach[failed, 0], info[failed].to(torch.int64) - 1)
        inside = torch.arange(m) < reach[failed]
        again = torch.where(inside.unsqueeze(-1) & inside.unsqueeze(-2), gram[failed], eye)
        lower[failed], info[failed] = torch.linalg.cholesky_ex(again)
        failed = failed[info[failed] > 0]
    inverse = torch.linalg.solve_triangular(lower, eye.expand(lower.shape), upper=False) / scale[:, None, None]
    size = (inverse.square().sum(-1) * present).cumsum(-1).sqrt()
    return inverse, size.masked_fill(torch.arange(m) >= reach, torch.inf)
