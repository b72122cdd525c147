"""Causal prefixes, fast: every row its own column space, a few factorisations a head.

Rows come in blocks. With G = LLᵀ the Gram matrix of the keys before the block, Z = V L⁻ᵀ, U the block's own rows of
Z, transposed, and I + UᵀU = RRᵀ (Woodbury), the leading parts of R belong to the leading rows, so W = U R⁻ᵀ serves
every prefix of the block: the projector of row i is Z M_i Zᵀ with M_i = I − W_≤i W_≤iᵀ. The simplex constraint uses
centred values: their prefix Gram matrices are running sums of Helmert-transformed rows, and the mean moves from the
block's start (the origin of Z) to that of row i by `drift`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.core.numerics.basis import helmert_rows, inverse_cholesky, unit_scale
from whence.core.numerics.checks import Constraint, broadcast
from whence.core.numerics.duplicate_keys import early_prefixes
from whence.core.numerics.tolerances import CHOLESKY_LIMIT, PROVED, rank_eps

_BLOCK = 64
_FIRST_BLOCK = 16


@dataclass(frozen=True)
class CausalPlan:
    """What the blocks share. u… are the leading dimensions of values and key mask, broadcast.

    scaled (u…, n_key, d_v) float64, zero at absent keys; scale (…, 1, 1); real (u…, n_key): the key exists; count: its
    running sum; independent (u…, n_query): the row's distinct values are independent (`whence.core.numerics.duplicate_keys`),
    so A⊥ = A, or its means over keys of equal value in the heads of duplicate_keys, {flat head mask: first_equal
    (n_key,)}; distinct (u…, n_query): how many distinct values an independent row sees; first: the first row of a block,
    all rows before it see too few keys for one.
    """

    scaled: Tensor
    scale: Tensor
    real: Tensor
    count: Tensor
    independent: Tensor
    distinct: Tensor
    duplicate_keys: dict[int, Tensor]
    first: int
    n_query: int
    eps: float
    limit: float
    constraint: Constraint


@dataclass(frozen=True)
class Block:
    """Rows start … stop − 1, which see the keys before `end`; `base` of them were seen before the block.

    good (u…): the prefix is provably of full rank and well enough conditioned; spread (u…): by which κ_F. inverse_factor
    (u…, d_v, d_v) = L⁻¹, origin (u…, 1, d_v), z (u…, end, d_v) = (V − origin) L⁻ᵀ.
    w (u…, d_v, rows). drift (u…, rows, d_v) or None, ones (u…, rows, 1) = 1/n_i: simplex only.
    """

    start: int
    stop: int
    base: int
    end: int
    good: Tensor
    spread: Tensor
    inverse_factor: Tensor
    z: Tensor
    w: Tensor
    origin: Tensor
    drift: Tensor | None
    ones: Tensor
    fresh_leverage: float

    def apply(self, rows: Tensor) -> Tensor:
        """M_i x_i for the rows x (…, rows, d_v) of the block: column p of W enters for rows i ≥ p."""
        return rows - ((rows @ self.w) * self.triangle) @ self.w.mT

    @property
    def triangle(self) -> Tensor:
        """(rows, rows), 1 on and below the diagonal. A product with it is several times faster than batched tril."""
        rows = self.stop - self.start
        return torch.ones(rows, rows, dtype=torch.float64).tril()


def causal_plan(values: Tensor, keys: Tensor, n_query: int, constraint: Constraint) -> CausalPlan:
    """Scale, count, and settle the first rows. values (…, n_key, d_v), keys (…, n_key) boolean: the key exists."""
    n_key, width = values.shape[-2:]
    columns = width + int(constraint == "simplex")
    eps = rank_eps(values.dtype)
    own_batch = broadcast(values.shape[:-2], keys.shape[:-1])
    scaled, scale = unit_scale(values if bool(keys.all()) else values.masked_fill(~keys.unsqueeze(-1), 0.0))
    scaled = scaled.expand(*own_batch, n_key, width)
    real = keys.expand(*own_batch, n_key)
    count = real.cumsum(-1)
    # A block begins where the keys before it are enough; rows of a longer text may have enough from their first on.
    enough = (count >= columns).reshape(-1, n_key).any(0)
    before = int(enough.nonzero()[0]) + 1 if bool(enough.any()) else n_key
    first = min(max(0, before - (n_key - n_query)), n_query)

    early = early_prefixes(
        scaled.reshape(-1, n_key, width), real.reshape(-1, n_key), eps, simplex=constraint == "simplex"
    )
    independent = _at_rows(early.independent.reshape(*own_batch, n_key), n_query, True)
    distinct = ((early.first_equal == torch.arange(n_key)).reshape(*own_batch, n_key) & real).cumsum(-1)
    distinct = _at_rows(distinct, n_query, 0)
    duplicate_keys = {u: early.first_equal[u] for u in early.has_duplicates.nonzero().squeeze(-1).tolist()}
    # κ_F² eps is what a Cholesky factor loses: κ_F ≤ 3e4 keeps 2e-7, κ_F ≤ 1e3 keeps 2e-10.
    limit = 1e3 if values.dtype == torch.float64 else 3e4
    return CausalPlan(
        scaled, scale, real, count, independent, distinct, duplicate_keys, first, n_query, eps, limit, constraint
    )


@dataclass(frozen=True)
class PrefixFactor:
    """The Cholesky factor of the keys before `base`, for rows start … stop − 1, which see the keys before `end`.

    fresh (u…, rows, d_v): the block's own rows, as they enter the Gram matrix. inverse (u…, d_v, d_v) = L⁻¹. spread
    (u…): κ_F. full_rank (u…): every prefix of the block is provably of full column rank.
    """

    start: int
    stop: int
    base: int
    end: int
    fresh: Tensor
    inverse: Tensor
    spread: Tensor
    full_rank: Tensor


def prefix_factors(plan: CausalPlan) -> Iterator[PrefixFactor]:
    """One factorisation for each block of rows after the first rows, in order: a running sum of Gram matrices."""
    scaled, count = plan.scaled, plan.count
    n_key, width = scaled.shape[-2:]
    simplex = plan.constraint == "simplex"
    shift = n_key - plan.n_query
    norm = scaled.square().sum(-1).cumsum(-1).sqrt()  # ‖V‖_F of every prefix, ≥ σ_max
    updates = helmert_rows(scaled, plan.real)[0] if simplex else scaled
    past = updates[..., : max(0, plan.first + shift), :]
    gram = past.mT @ past
    stop = plan.first
    while stop < plan.n_query:
        # The first block starts from a square, ill-conditioned prefix and works in float64: it is kept short.
        start, stop = stop, min(stop + (_BLOCK if stop > plan.first else _FIRST_BLOCK), plan.n_query)
        base, end = start + shift, stop + shift
        fresh = updates[..., base:end, :]
        inverse, size, good = inverse_cholesky(gram)
        spread = size * gram.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
        gram = gram + fresh.mT @ fresh
        full = good & (spread < CHOLESKY_LIMIT) & (size * norm[..., end - 1] * max(end, width) * plan.eps < PROVED)
        full &= count[..., base - 1] >= width + int(simplex)
        yield PrefixFactor(start, stop, base, end, fresh, inverse, spread, full)


def causal_blocks(plan: CausalPlan) -> Iterator[Block]:
    """The blocks after the first rows, in order."""
    scaled, real, count = plan.scaled, plan.real, plan.count
    width = scaled.shape[-1]
    mean = scaled.cumsum(-2) / count.clamp(min=1).unsqueeze(-1) if plan.constraint == "simplex" else None
    for factor in prefix_factors(plan):
        start, stop, base, end = factor.start, factor.stop, factor.base, factor.end
        good = factor.full_rank & (factor.spread < plan.limit)
        inverse = factor.inverse
        if not bool(good.all()):
            # A nearly singular head would make U huge; zero keeps its (unused) numbers finite.
            inverse = torch.where(good[..., None, None], inverse, 0.0)
        u = inverse @ factor.fresh.mT
        small = torch.linalg.cholesky(u.mT @ u + torch.eye(stop - start, dtype=torch.float64))
        w = torch.linalg.solve_triangular(small, u.mT, upper=False).mT
        body = scaled[..., :end, :]
        drift, origin = None, torch.zeros(1, width, dtype=torch.float64)
        if mean is not None:
            # Centred at the block's start: an uncentred Z would carry the bias's size into every product.
            origin = mean[..., base - 1 : base, :]
            body = (body - origin) * real[..., :end].unsqueeze(-1)
            drift = (mean[..., base:end, :] - origin) @ inverse.mT
        ones = count[..., base:end].clamp(min=1).unsqueeze(-1).to(torch.float64).reciprocal()
        fresh_leverage = float(u.square().sum(-2).max()) if u.numel() else 0.0
        z = body @ inverse.mT
        yield Block(start, stop, base, end, good, factor.spread, inverse, z, w, origin, drift, ones, fresh_leverage)


def _at_rows(at_keys: Tensor, n_query: int, before: int) -> Tensor:
    """From every prefix of the keys (…, n_key) to the rows (…, n_query); rows before the first key get `before`."""
    shift = at_keys.shape[-1] - n_query
    if shift >= 0:
        return at_keys[..., shift:]
    empty = torch.full((*at_keys.shape[:-1], -shift), before, dtype=at_keys.dtype)
    return torch.cat([empty, at_keys], -1)
