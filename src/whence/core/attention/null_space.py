"""Null space: how many directions of an attention row does the head's output not see?

Brunner et al. (ICLR 2020), section 3: the left null space of the values, LN(V) = {x : xᵀV = 0}, has dimension
n − rank(V); an alternative that is again an attention row needs x ∈ LN([V, 1]), dimension n − rank([V, 1]). Both are
measured, never assumed: repeated tokens without positions have equal values and a rank far below min(n, d_v).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whence.core.numerics.basis import centre, column_basis, unit_scale
from whence.core.numerics.causal_blocks import causal_plan, prefix_factors
from whence.core.numerics.checks import Constraint, broadcast, check_rows, check_values
from whence.core.numerics.masks import causal_keys, grouped, shared_keys
from whence.core.numerics.tolerances import rank_eps
from whence.results.short_repr import short_repr

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class NullSpace:
    """What a head's values leave undetermined, for each head (…,) or, with a mask, each row (…, n_query).

    length: visible keys n. rank: rank(V). simplex_rank: rank([V, 1]). null_dimension: n − rank(V).
    simplex_null_dimension: n − rank([V, 1]), the dimension in which an attention row can really move. All zero for a
    row that sees nothing. The condition numbers are computed when they are asked for.
    """

    __repr__ = short_repr

    length: Tensor
    rank: Tensor
    simplex_rank: Tensor
    values: Tensor = field(repr=False)
    visible: Tensor | None = field(repr=False)

    @property
    def null_dimension(self) -> Tensor:
        return self.length - self.rank

    @property
    def simplex_null_dimension(self) -> Tensor:
        return self.length - self.simplex_rank

    @property
    def condition(self) -> Tensor:
        """σ_max(V)/σ_r(V), r the rank; NaN where the rank is 0."""
        return self._conditions[0]

    @property
    def simplex_condition(self) -> Tensor:
        """σ_max/σ_r of V − 1μᵀ, r its rank; NaN where that is 0."""
        return self._conditions[1]

    @cached_property
    def _conditions(self) -> tuple[Tensor, Tensor]:
        return _conditions(self)

    def __getitem__(self, index: int) -> NullSpace:
        """The part of the first leading dimension at this index."""
        batch = self.length.shape[: self.length.ndim - (self.visible is not None)]
        values = self.values.expand(*batch, *self.values.shape[-2:])[index]
        visible = None if self.visible is None else self.visible.expand(*batch, *self.visible.shape[-2:])[index]
        return NullSpace(self.length[index], self.rank[index], self.simplex_rank[index], values, visible)

    def to_dict(self) -> dict[str, Tensor]:
        names = ("length", "rank", "simplex_rank", "null_dimension", "simplex_null_dimension")
        return {name: getattr(self, name) for name in (*names, "condition", "simplex_condition")}

    def to_frame(self) -> pd.DataFrame:
        """One line for each head (or head and row); columns axis_0 … axis_k index the leading dimensions."""
        import pandas as pd

        axes = [torch.arange(size) for size in self.length.shape]
        index = torch.meshgrid(*axes, indexing="ij") if axes else ()
        columns = {f"axis_{k}": t.reshape(-1).numpy() for k, t in enumerate(index)}
        columns |= {name: tensor.reshape(-1).numpy() for name, tensor in self.to_dict().items()}
        return pd.DataFrame(columns)


def null_space(values: Tensor, *, visible: Tensor | None = None) -> NullSpace:
    """Rank and null dimension of the values, plain and on the simplex.

    A singular value counts when it exceeds σ_max(V)·max(n, d_v)·eps, per head (and per row with a mask), with the eps
    of the dtype the values came in, float32 at the coarsest: float32 values carry float32 rounding, so a dependent
    row is dependent only up to that eps, while exact duplicates are exact. rank([V, 1]) = 1 + rank(V − 1μᵀ) with the
    tolerance of V, because centring does not remove V's rounding. Scale does not matter (1e-20 … 1e20).

    Args:
        values: (…, n_key, d_v).
        visible: None (every key) or boolean (…, n_query or 1, n_key), True where the row may look.

    Returns:
        NullSpace with fields of shape (…,) when visible is None, else (…, n_query).

    >>> values = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [2.0, 0.0]])
    >>> space = null_space(values)
    >>> int(space.rank), int(space.null_dimension), int(space.simplex_null_dimension)
    (2, 2, 1)
    """
    check_values(values)
    n = values.shape[-2]
    if visible is None:
        length = torch.full(values.shape[:-2], n)
        return NullSpace(length, _shared(values, None, "output"), _shared(values, None, "simplex"), values, None)
    mask, batch = check_rows(values, visible)
    n_query = mask.shape[-2]
    keys = shared_keys(mask)
    causal = causal_keys(mask) if keys is None and n_query <= n else None

    def rank_of(constraint: Constraint) -> Tensor:
        if keys is not None:
            rank = _shared(values, keys, constraint).unsqueeze(-1).expand(*batch, n_query)
        else:
            rank = torch.full((*batch, n_query), -1)
            if causal is not None:
                rank = _causal(values, causal, n_query, constraint).expand(*batch, n_query).clone()
            _fill(values, mask, constraint, rank)
        return rank * mask.any(-1)

    length = mask.sum(-1).expand(*batch, n_query).clone()
    return NullSpace(length, rank_of("output"), rank_of("simplex"), values, mask)


def _shared(values: Tensor, keys: Tensor | None, constraint: Constraint) -> Tensor:
    """The rank of each head, all rows of which see the same keys."""
    scaled = unit_scale(values)[0]
    own = values.shape[:-2] if keys is None else broadcast(values.shape[:-2], keys.shape[:-1])
    flat = scaled.expand(*own, *scaled.shape[-2:]).reshape(-1, *scaled.shape[-2:])
    valid = None if keys is None else keys.expand(*own, keys.shape[-1]).reshape(-1, keys.shape[-1])
    return column_basis(flat, valid, rank_eps(values.dtype), constraint).rank.reshape(own)


def _causal(values: Tensor, keys: Tensor, n_query: int, constraint: Constraint) -> Tensor:
    """The ranks (…, n_query) that the causal blocks prove; −1 where they prove none."""
    plan = causal_plan(values, keys, n_query, constraint)
    rank = torch.where(plan.independent, plan.distinct, -1)
    for factor in prefix_factors(plan):
        rows = rank[..., factor.start : factor.stop]
        full = values.shape[-1] + int(constraint == "simplex")
        rows.masked_fill_(factor.full_rank.unsqueeze(-1) & (rows < 0), full)
    return rank


def _fill(values: Tensor, mask: Tensor, constraint: Constraint, rank: Tensor) -> None:
    """Writes the ranks that are −1: one factorisation for each distinct (head, visible set)."""
    n, width = values.shape[-2:]
    batch, n_query = tuple(rank.shape[:-1]), rank.shape[-1]
    flat, out = unit_scale(values)[0].reshape(-1, n, width), rank.view(-1, n_query)
    for group in grouped(mask, batch, tuple(values.shape[:-2]), out < 0, width=width):
        basis = column_basis(
            flat[group.value.unsqueeze(-1), group.keys], group.valid, rank_eps(values.dtype), constraint
        )
        out[group.batch, group.row] = basis.rank.unsqueeze(-1).expand(group.batch.shape)


def _conditions(space: NullSpace) -> tuple[Tensor, Tensor]:
    """σ_max/σ_r of V and of V − 1μᵀ, from all singular values of every distinct visible set."""
    values = unit_scale(space.values)[0]
    n, width = values.shape[-2:]
    mask = torch.ones(1, n, dtype=torch.bool) if space.visible is None else space.visible
    batch = tuple(space.length.shape) if space.visible is None else tuple(space.length.shape[:-1])
    found = torch.full((2, math.prod(batch), mask.shape[-2]), torch.nan, dtype=torch.float64)
    ranks = [r.reshape(found.shape[1:]) for r in (space.rank, space.simplex_rank - 1)]
    flat = values.reshape(-1, n, width)
    for group in grouped(mask, batch, tuple(values.shape[:-2]), width=width):
        body = flat[group.value.unsqueeze(-1), group.keys] * group.valid.unsqueeze(-1)
        for which, matrix in enumerate((body, centre(body, group.valid)[0])):
            if matrix.shape[-2] > 2 * width:  # QR first where the matrix is tall: its SVD costs d_v³ and not n·d_v²
                matrix = torch.linalg.qr(matrix, mode="r").R
            sigma = torch.linalg.svdvals(matrix).unsqueeze(1).expand(*group.batch.shape, -1)
            rank = ranks[which][group.batch, group.row]
            last = torch.gather(sigma, -1, (rank - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
            found[which][group.batch, group.row] = torch.where(rank > 0, sigma[..., 0] / last, torch.nan)
    plain, centred = found.reshape(2, *space.length.shape)
    return plain, centred
