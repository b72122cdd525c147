"""Leverage: how far is the weight on each key pinned down by the head's output?

H = QQᵀ with Q an orthonormal basis of [V, 1]. H_jj ∈ [0, 1]: 1 means that the weight on key j is exactly identified,
and the mean over the visible keys is rank([V, 1])/n. The leverage scores of regression, read on attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whence.core.numerics.basis import column_basis, unit_scale
from whence.core.numerics.causal_blocks import causal_blocks, causal_plan
from whence.core.numerics.checks import Constraint, broadcast, check_constraint, check_rows, check_values
from whence.core.numerics.duplicate_keys import duplicate_counts
from whence.core.numerics.masks import causal_keys, flat_index, grouped, shared_keys
from whence.core.numerics.tolerances import rank_eps


def leverage(values: Tensor, *, constraint: Constraint = "simplex", visible: Tensor | None = None) -> Tensor:
    """H_jj of every key, for each head or, with a mask, for each row.

    Args:
        values: (…, n_key, d_v).
        constraint: "simplex" (basis of [V, 1], the default: rows stay attention rows) or "output" (basis of V).
        visible: boolean (…, n_query or 1, n_key), True where the row may look.

    Returns:
        float64, (…, n_key) without a mask, (…, n_query, n_key) with one; 0 at invisible keys.

    >>> leverage(torch.tensor([[1.0], [0.0], [0.0]]))
    tensor([1.0000, 0.5000, 0.5000], dtype=torch.float64)
    """
    check_constraint(constraint)
    check_values(values)
    n, width = values.shape[-2:]
    scaled = unit_scale(values)[0]
    eps = rank_eps(values.dtype)
    if visible is None:
        return _diagonal(scaled.reshape(-1, n, width), None, eps, constraint).reshape(values.shape[:-1])
    mask, batch = check_rows(values, visible)
    n_query = mask.shape[-2]
    keys = shared_keys(mask)
    if keys is not None:
        both = broadcast(values.shape[:-2], keys.shape[:-1])
        one = _diagonal(
            scaled.expand(*both, n, width).reshape(-1, n, width),
            keys.expand(*both, n).reshape(-1, n),
            eps,
            constraint,
        )
        return one.reshape(*both, 1, n) * mask.any(-1, keepdim=True).expand(*batch, n_query, 1)
    result = torch.zeros(*batch, n_query, n, dtype=torch.float64)
    wanted = None
    keys = causal_keys(mask) if n_query <= n else None
    if keys is not None:
        wanted = _causal(values, mask, keys, batch, constraint, result)
        if not bool(wanted.any()):
            return result
    flat, out = scaled.reshape(-1, n, width), result.view(-1, n_query, n)
    for group in grouped(mask, batch, tuple(values.shape[:-2]), wanted, width=width):
        one = _diagonal(flat[group.value.unsqueeze(-1), group.keys], group.valid, eps, constraint)
        out[group.batch.unsqueeze(-1), group.row.unsqueeze(-1), group.keys.unsqueeze(1)] = one.unsqueeze(1)
    return result


def _diagonal(values: Tensor, valid: Tensor | None, eps: float, constraint: Constraint) -> Tensor:
    basis = column_basis(values, valid, eps, constraint)
    ones = torch.ones(values.shape[:-1]) if valid is None else valid
    return torch.where(basis.identified.unsqueeze(-1), ones.to(torch.float64), basis.q.square().sum(-1))


def _causal(
    values: Tensor, mask: Tensor, keys: Tensor, batch: tuple[int, ...], constraint: Constraint, result: Tensor
) -> Tensor:
    """Writes the rows that the blocks reach; returns those that are left (batch flattened, n_query)."""
    n_query = mask.shape[-2]
    plan = causal_plan(values, keys, n_query, constraint)
    done = plan.independent.clone()
    result.copy_((done.unsqueeze(-1) & mask).to(torch.float64))
    for block in causal_blocks(plan):
        rows = slice(block.start, block.stop)
        fits = block.good.unsqueeze(-1) & ~done[..., rows]
        # zᵀ M_i z = ‖z‖² − Σ_{p ≤ i} (w_p·z)²
        size = block.z.square().sum(-1).unsqueeze(-2) - (block.w.mT @ block.z.mT).square().cumsum(-2)
        if block.drift is not None:
            moved = block.apply(block.drift)
            size = size - 2 * moved @ block.z.mT + (moved * block.drift).sum(-1, keepdim=True) + block.ones
        here = result[..., rows, : block.end]
        result[..., rows, : block.end] = torch.where(fits.unsqueeze(-1) & mask[..., rows, : block.end], size, here)
        done[..., rows] |= fits
    for head_mask, first_equal in plan.duplicate_keys.items():
        rows_of = plan.independent.reshape(-1, n_query)[head_mask].nonzero().squeeze(-1)
        for head in (flat_index(tuple(plan.independent.shape[:-1]), batch) == head_mask).nonzero().squeeze(-1).tolist():
            seen = mask.reshape(-1, *mask.shape[-2:])[flat_index(tuple(mask.shape[:-2]), batch)[head], rows_of]
            share = seen / duplicate_counts(first_equal, seen).clamp(min=1)
            result.view(-1, *mask.shape[-2:])[head, rows_of] = share
    left = ~done.expand(*batch, n_query) & mask.any(-1).expand(*batch, n_query)
    return left.reshape(-1, n_query)
