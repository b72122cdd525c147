"""Slow, obvious, float64: every definition of methods 1 written straight down, one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def eps_of(dtype: torch.dtype) -> float:
    return min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def spectrum(values: Tensor, *, simplex: bool, eps: float) -> tuple[int, Tensor, Tensor]:
    """Rank, singular values and left singular vectors kept, of the rows of one visible set."""
    v = values.double()
    v = v / v.abs().max() if float(v.abs().max()) > 0 else v
    tolerance = torch.linalg.matrix_norm(v, ord=2) * max(v.shape) * eps
    body = v - v.mean(0) if simplex else v
    u, s, _ = torch.linalg.svd(body, full_matrices=False)
    keep = s > tolerance
    q = u[:, keep]
    if simplex:
        q = torch.cat([q, torch.full((len(v), 1), len(v) ** -0.5, dtype=torch.float64)], 1)
    return q.shape[1], s, q


def effective_row(row: Tensor, values: Tensor, seen: Tensor, *, simplex: bool, eps: float) -> Tensor:
    result = torch.zeros(len(row), dtype=torch.float64)
    if not bool(seen.any()):
        return result
    _, _, q = spectrum(values[seen], simplex=simplex, eps=eps)
    result[seen] = (row.double()[seen] @ q) @ q.T
    return result


def effective(attention: Tensor, values: Tensor, visible: Tensor | None, *, simplex: bool) -> Tensor:
    n_query, n_key = attention.shape[-2:]
    batch = torch.broadcast_shapes(
        attention.shape[:-2],
        values.shape[:-2],
        () if visible is None or visible.ndim < 2 else visible.shape[:-2],
    )
    a = attention.expand(*batch, n_query, n_key).reshape(-1, n_query, n_key)
    v = values.expand(*batch, *values.shape[-2:]).reshape(-1, *values.shape[-2:])
    m = torch.ones(n_query, n_key, dtype=torch.bool) if visible is None else visible
    m = m.expand(*batch, n_query, n_key).reshape(-1, n_query, n_key)
    rows = [
        effective_row(a[b, i], v[b], m[b, i], simplex=simplex, eps=eps_of(values.dtype))
        for b in range(len(a))
        for i in range(n_query)
    ]
    return torch.stack(rows).reshape(*batch, n_query, n_key)
