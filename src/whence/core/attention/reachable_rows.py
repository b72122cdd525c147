"""The key's role: could another query have produced another attention row with the same head output?

A softmax row must also be producible: log a ∈ col(K) + span(1). Bhardwaj et al., "More Identifiable yet Equally
Performant Transformers" (ACL 2021), made exact (methods 1.5): the local dimension of the family of such rows, a bound
on how far they can lie when keys are nearly a function of values (Theorem 2), uniqueness when they are (Theorem 1). The
global search is in `whence.core.attention.search_reachable`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whence.core.numerics.basis import Basis, centre, column_basis, unit_scale
from whence.core.numerics.checks import broadcast, check_finite, check_pair, check_stray, check_values, shape
from whence.core.numerics.masks import flat_index, full_mask, grouped
from whence.core.numerics.tolerances import EPS64, rank_eps
from whence.errors import InputError


@dataclass(frozen=True)
class ReachableDimension:
    """Local dimension of the softmax-reachable rows with the same output, for every row. (…, n_query) float64.

    dimension (…, n_query): at most this; NaN where float64 cannot tell (determined (…, n_query) False). exact: it is this.
    ratio (…, n_query): σ_min/σ_max of VᵀΣK (bases taken first), the margin of the decision. key_rank and value_rank
    (…, n_query): of K − 1μᵀ and of V − 1μᵀ.
    """

    dimension: Tensor
    determined: Tensor
    exact: Tensor
    ratio: Tensor
    key_rank: Tensor
    value_rank: Tensor


def reachable_dimension(
    attention: Tensor, keys: Tensor, values: Tensor, *, visible: Tensor | None = None
) -> ReachableDimension:
    """rank([K, 1]) − 1 − rank(VᵀΣK) with Σ = diag(a) − aaᵀ, for every row.

    With orthonormal bases of the centred keys and values in place of K and V the rank is the same and the margin
    readable. A singular value between rounding in float64 and rounding in the input dtype cannot be called zero or not:
    the row is then undetermined. The dimension is exact where VᵀΣK has full row rank, an upper bound elsewhere.

    Args:
        attention: (…, n_query, n_key), keys: (…, n_key, d_k), values: (…, n_key, d_v), visible: as everywhere.

    >>> _ = torch.manual_seed(0)
    >>> keys, values = torch.randn(20, 5), torch.randn(20, 3)
    >>> reachable_dimension(torch.softmax(torch.randn(1, 20), -1), keys, values).dimension  # d_k − d_v
    tensor([2.], dtype=torch.float64)
    """
    batch = _check_keys(attention, keys, values, visible)
    n_query, n_key = attention.shape[-2:]
    mask = torch.ones(n_query, n_key, dtype=torch.bool)
    if visible is not None:
        check_stray(attention, visible)
        mask = full_mask(visible, n_query, n_key)
    shared = broadcast(keys.shape[:-2], values.shape[:-2])
    k_all, v_all = (unit_scale(t)[0].expand(*shared, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in (keys, values))
    eps = max(rank_eps(keys.dtype), rank_eps(values.dtype))
    rows = attention.detach().reshape(-1, n_query, n_key)
    source = flat_index(tuple(attention.shape[:-2]), batch)
    fields = {name: torch.zeros(*batch, n_query, dtype=torch.float64) for name in _NAMES}
    flat = {name: tensor.view(-1, n_query) for name, tensor in fields.items()}
    width = k_all.shape[-1] + v_all.shape[-1]
    for group in grouped(mask, batch, shared, width=4 * width):
        at = (group.value.unsqueeze(-1), group.keys)
        k, k_rank = _centred_basis(k_all[at], group.valid, eps)
        v, v_rank = _centred_basis(v_all[at], group.valid, eps)
        a = rows[source[group.batch].unsqueeze(-1), group.row.unsqueeze(-1), group.keys.unsqueeze(1)]
        a = a.to(torch.float64) * group.valid.unsqueeze(1)
        a = a / a.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        for start in range(0, a.shape[1], 64):  # (u, rows, n, d_v) exists only a few rows at a time
            part = a[:, start : start + 64]
            cross = torch.einsum("unv,urn,unk->urvk", v, part, k) - (part @ v).unsqueeze(-1) * (part @ k).unsqueeze(-2)
            found = _decide(torch.linalg.svdvals(cross), k_rank, v_rank, group.valid.sum(-1), eps)
            where = (group.batch[:, start : start + 64], group.row[:, start : start + 64])
            for name, value in zip(_NAMES, found, strict=True):
                flat[name][where] = value
    boolean = {"determined", "exact"}
    return ReachableDimension(**{name: t.bool() if name in boolean else t for name, t in fields.items()})


_NAMES = ("dimension", "determined", "exact", "ratio", "key_rank", "value_rank")


def _check_keys(attention: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> tuple[int, ...]:
    batch = check_pair(attention, values, visible)
    check_values(keys, name="keys")
    if keys.shape[-2] != values.shape[-2]:
        raise InputError(f"keys {shape(keys)} and values {shape(values)} have different numbers of keys.")
    try:
        return broadcast(keys.shape[:-2], batch)
    except RuntimeError:
        raise InputError(f"keys {shape(keys)} do not broadcast against values {shape(values)}.") from None


def _centred_basis(values: Tensor, valid: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """An orthonormal basis of the centred rows (zero columns beyond the rank) and its rank."""
    body, _ = centre(values * valid.unsqueeze(-1), valid)
    u, s, _ = torch.linalg.svd(body, full_matrices=False)
    top = torch.linalg.svdvals(values * valid.unsqueeze(-1))[..., :1]
    longest = valid.sum(-1, keepdim=True).clamp(min=values.shape[-1])
    keep = s > top * longest * eps
    return u * keep.unsqueeze(-2), keep.sum(-1)


def _decide(s: Tensor, k_rank: Tensor, v_rank: Tensor, length: Tensor, eps: float) -> tuple[Tensor, ...]:
    """s (u, r, m) singular values; the ranks and lengths (u,)."""
    top = s[..., :1]
    size = length.clamp(min=s.shape[-1]).to(torch.float64)[:, None, None]
    sure = (s > top * size * eps).sum(-1)
    perhaps = (s > top * size * EPS64 * 8).sum(-1)
    most = torch.minimum(k_rank, v_rank).unsqueeze(-1).expand(sure.shape)
    perhaps = torch.minimum(perhaps, most)
    sure = torch.minimum(sure, most)
    determined = sure == perhaps
    dimension = torch.where(determined, (k_rank.unsqueeze(-1) - sure).to(torch.float64), torch.nan)
    last = torch.gather(s, -1, (most - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
    ratio = torch.where((most > 0) & (top.squeeze(-1) > 0), last / top.squeeze(-1), 0.0)
    exact = determined & ((sure == v_rank.unsqueeze(-1)) | (sure == k_rank.unsqueeze(-1)))
    shape_of = sure.shape
    return (
        dimension,
        determined.to(torch.float64),
        exact.to(torch.float64),
        ratio,
        k_rank.unsqueeze(-1).expand(shape_of).to(torch.float64),
        v_rank.unsqueeze(-1).expand(shape_of).to(torch.float64),
    )


@dataclass(frozen=True)
class NearTied:
    """How far softmax-reachable rows with the same output can lie, from how nearly keys are a function of values.

    share (…,): ‖(I − P)K‖_F / ‖K − 1μᵀ‖_F, P the projector on [V, 1]; 0 for tied keys. diameter (…,): largest distance
    of two rows of (I − P)K. tied (…,) boolean: share is rounding, the row is unique (Theorem 1). bound (…,): TV between
    any two such rows ≤ tanh(‖Δq‖·diameter/4) with ‖Δq‖ ≤ query_diameter (Theorem 2), conditional on that.
    """

    share: Tensor
    diameter: Tensor
    tied: Tensor
    query_diameter: Tensor
    bound: Tensor


def near_tied(
    keys: Tensor, values: Tensor, *, queries: Tensor | None = None, query_diameter: float | None = None
) -> NearTied:
    """Theorems 1 and 2 for a head: TV(x, a) ≤ tanh(‖Δq‖·diam((I − P_[V,1])K)/4).

    Valid for every visible set at once only if it is the whole text; under a mask pass the visible rows.

    Args:
        keys: (…, n_key, d_k); values: (…, n_key, d_v).
        queries: (…, n_query, d_k), *times the softmax scale*: their diameter bounds ‖Δq‖, and the bound is conditional
            on the other query being one like those in this text. Or give query_diameter itself.

    >>> values = torch.tensor([[1.0], [2.0], [4.0]])
    >>> near_tied(2 * values + 1, values, query_diameter=3.0).bound  # keys are a function of the values
    tensor(0., dtype=torch.float64)
    """
    check_values(keys, name="keys")
    check_values(values)
    if keys.shape[-2] != values.shape[-2]:
        raise InputError(f"keys {shape(keys)} and values {shape(values)} have different numbers of keys.")
    if (queries is None) == (query_diameter is None):
        raise InputError("give either queries (already times the softmax scale) or query_diameter.")
    batch = broadcast(keys.shape[:-2], values.shape[:-2])
    n = keys.shape[-2]
    k, size_of = unit_scale(keys)
    k = k.expand(*batch, n, keys.shape[-1]).reshape(-1, n, keys.shape[-1])
    v = unit_scale(values)[0].expand(*batch, n, values.shape[-1]).reshape(-1, n, values.shape[-1])
    eps = max(rank_eps(keys.dtype), rank_eps(values.dtype))
    basis: Basis = column_basis(v, None, rank_eps(values.dtype), "simplex")
    body = centre(k, torch.ones(k.shape[:-1], dtype=torch.bool))[0]
    rest = body - basis.q @ (basis.q.mT @ body)
    rest = torch.where(basis.identified[:, None, None], 0.0, rest)
    size = torch.linalg.vector_norm(body, dim=(-2, -1))
    share = torch.where(size > 0, torch.linalg.vector_norm(rest, dim=(-2, -1)) / size, 0.0)
    # K = VM in working precision is off by a sum of d_v roundings.
    tied = share <= (keys.shape[-1] + values.shape[-1]) * eps
    # A distance below that rounding counts as 0.
    diameter = torch.where(tied, 0.0, torch.cdist(rest, rest).amax((-2, -1)))
    diameter = diameter * size_of[..., 0, 0].expand(batch).reshape(-1)
    if queries is not None:
        check_finite("queries", queries)
        q = queries.detach().to(torch.float64)
        reach = torch.cdist(q, q).amax((-2, -1)).expand(batch)
    else:
        reach = torch.full(batch, float(query_diameter or 0.0), dtype=torch.float64)
    share, diameter, tied = (t.reshape(batch) for t in (share, diameter, tied))
    return NearTied(share, diameter, tied, reach, torch.tanh((reach * diameter / 4).nan_to_num(nan=0.0)))
