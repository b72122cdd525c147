"""Null space: how many directions of an attention row does the head's output not see?

Brunner et al. (ICLR 2020), section 3: the left null space of the values, LN(V) = {x : xᵀV = 0}, has dimension
n − rank(V); an alternative that is again an attention row needs x ∈ LN([V, 1]), dimension n − rank([V, 1]). Both are
measured, never assumed: repeated tokens without positions have equal values and a rank far below min(n, d_v).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whence.core.numerics._prefix_spectra import prefix_spectra
from whence.core.numerics.basis import centre, rank_eps, unit_scale
from whence.core.numerics.checks import broadcast, check_values, check_visible, shape
from whence.core.numerics.masks import causal_keys, grouped, shared_keys
from whence.errors import InputError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class NullSpace:
    """What a head's values leave undetermined, for each head (…,) or, with a mask, each row (…, n_query).

    length: visible keys n. rank: rank(V). simplex_rank: rank([V, 1]). null_dimension: n − rank(V).
    simplex_null_dimension: n − rank([V, 1]), the dimension in which an attention row can really move.
    condition: σ_max(V)/σ_r(V), r the rank; simplex_condition: the same of V − 1μᵀ. NaN where the rank is 0 (for
    the simplex: where V − 1μᵀ has rank 0). largest: σ_max(V). All zero for a row that sees nothing.
    """

    length: Tensor
    rank: Tensor
    simplex_rank: Tensor
    condition: Tensor
    simplex_condition: Tensor
    largest: Tensor

    @property
    def null_dimension(self) -> Tensor:
        return self.length - self.rank

    @property
    def simplex_null_dimension(self) -> Tensor:
        return self.length - self.simplex_rank

    def __getitem__(self, index: int) -> NullSpace:
        """The part of the first leading dimension at this index."""
        return _map(self, lambda t: t[index])

    def to_dict(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in _FIELDS} | {
            "null_dimension": self.null_dimension,
            "simplex_null_dimension": self.simplex_null_dimension,
        }

    def to_frame(self) -> pd.DataFrame:
        """One line for each head (or head and row); columns axis_0 … axis_k index the leading dimensions."""
        import pandas as pd

        index = torch.cartesian_prod(*(torch.arange(s) for s in self.length.shape)) if self.length.ndim else None
        columns: dict[str, object] = {}
        if index is not None:
            index = index.reshape(-1, self.length.ndim)
            columns = {f"axis_{k}": index[:, k].numpy() for k in range(self.length.ndim)}
        columns |= {name: tensor.reshape(-1).numpy() for name, tensor in self.to_dict().items()}
        return pd.DataFrame(columns)


def null_space(values: Tensor, *, visible: Tensor | None = None) -> NullSpace:
    """Rank, null dimension and condition number of the values, plain and on the simplex.

    A singular value counts when it exceeds σ_max(V)·max(n, d_v)·eps, per head (and per row with a mask), with the eps
    of the dtype the values came in, float32 at the coarsest: float32 values carry float32 rounding, so a dependent
    row is dependent only up to that eps, while exact duplicates are exact. rank([V, 1]) = 1 + rank(V − 1μᵀ) with the
    tolerance of V, because centring does not remove V's rounding. Scale does not matter (1e-20 … 1e20). Under a causal
    mask ranks are exact, and condition numbers and σ_max of float32 values are estimates, within 5 % in everything
    measured and 0.2 % in the middle (`whence.core.numerics._prefix_spectra`).

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
    scaled, scale = unit_scale(values)
    eps = rank_eps(values.dtype)
    if visible is None:
        space = _spectra(scaled, torch.ones(scaled.shape[:-1], dtype=torch.bool), eps)
        return _rescaled(space, scale[..., 0, 0])
    check_visible(visible, None, n)
    if visible.ndim < 2:
        raise InputError(f"visible has shape {shape(visible)}; expected (…, n_query, {n}): add a query dimension.")
    mask = visible.expand(*visible.shape[:-1], n)
    try:
        batch = broadcast(values.shape[:-2], mask.shape[:-2])
    except RuntimeError:
        raise InputError(f"visible {shape(visible)} does not broadcast against values {shape(values)}.") from None
    n_query = mask.shape[-2]
    keys = shared_keys(mask)
    if keys is not None:
        both = broadcast(values.shape[:-2], keys.shape[:-1])
        space = _spectra(scaled.expand(*both, *scaled.shape[-2:]), keys.expand(*both, n), eps)
        space = _map(space, lambda t: t.unsqueeze(-1).expand(*batch, n_query).clone())
    else:
        keys = causal_keys(mask) if n_query <= n else None
        if keys is not None and values.dtype != torch.float64:
            space = _causal(scaled, keys, n_query, batch)
        else:
            space = _by_group(scaled, mask, batch, eps)
    seen = mask.any(-1).expand(*batch, n_query)
    space = _map(space, lambda t: t.masked_fill(~seen, 0))
    return _rescaled(space, scale[..., 0, 0].unsqueeze(-1))


_FIELDS = ("length", "rank", "simplex_rank", "condition", "simplex_condition", "largest")


def _map(space: NullSpace, function: Callable[[Tensor], Tensor]) -> NullSpace:
    return NullSpace(*(function(getattr(space, name)) for name in _FIELDS))


def _rescaled(space: NullSpace, scale: Tensor) -> NullSpace:
    return replace(space, largest=space.largest * scale)


def _count(s: Tensor, t: Tensor, length: Tensor, width: int, eps: float) -> NullSpace:
    """From the singular values of V (s) and of V − 1μᵀ (t), both descending."""
    largest = s[..., 0]
    tolerance = (largest * length.clamp(min=width) * eps).unsqueeze(-1)
    rank, inner = (s > tolerance).sum(-1), (t > tolerance).sum(-1)

    def condition(sigma: Tensor, r: Tensor) -> Tensor:
        last = torch.gather(sigma, -1, (r - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return torch.where(r > 0, sigma[..., 0] / last, torch.nan)

    # A matrix with n rows cannot have rank above n; the sums that build Gram matrices may round past it.
    rank, inner = torch.minimum(rank, length), torch.minimum(inner, (length - 1).clamp(min=0))
    return NullSpace(
        length, rank, inner + (length > 0).to(rank.dtype), condition(s, rank), condition(t, inner), largest
    )


def _spectra(values: Tensor, valid: Tensor, eps: float) -> NullSpace:
    """One factorisation a head: QR first where the matrix is tall, its SVD costs d_v³ and not n·d_v²."""
    values = values * valid.unsqueeze(-1)
    body = centre(values, valid)[0]
    length = valid.sum(-1)
    n, width = values.shape[-2:]

    def sigma(matrix: Tensor) -> Tensor:
        if n > 2 * width:
            matrix = torch.linalg.qr(matrix, mode="r").R
        found: Tensor = torch.linalg.svdvals(matrix)
        return found

    return _count(sigma(values), sigma(body), length, width, eps)


def _causal(scaled: Tensor, keys: Tensor, n_query: int, batch: tuple[int, ...]) -> NullSpace:
    """Prefixes of float32 values (`whence.core.numerics._prefix_spectra`), found by the number of keys that a row sees."""
    n, width = scaled.shape[-2:]
    unit_batch = broadcast(scaled.shape[:-2], keys.shape[:-1])
    real = keys.expand(*unit_batch, n).reshape(-1, n)
    values = scaled.expand(*unit_batch, n, width).reshape(-1, n, width) * real.unsqueeze(-1)
    # Keys that exist come first, in their order: the prefix of a row is then told by how many of them it sees.
    order = torch.argsort(real.to(torch.int8), dim=-1, descending=True, stable=True)
    spectra = prefix_spectra(torch.gather(values, 1, order.unsqueeze(-1).expand_as(values)), _EPS32)
    length = real.cumsum(-1)[:, n - n_query :]
    at = (length - 1).clamp(min=0)

    def of_rows(t: Tensor) -> Tensor:
        return torch.gather(t, -1, at)

    rank, inner = of_rows(spectra.rank), of_rows(spectra.inner_rank)
    condition = torch.where(rank > 0, of_rows(spectra.largest / spectra.last), torch.nan)
    centred = torch.where(inner > 0, of_rows(spectra.inner_largest / spectra.inner_last), torch.nan)
    fields = (length, rank, inner + 1, condition, centred, of_rows(spectra.largest))
    return NullSpace(*(t.reshape(*unit_batch, n_query).expand(*batch, n_query).clone() for t in fields))


_EPS32 = rank_eps(torch.float32)


def _by_group(scaled: Tensor, mask: Tensor, batch: tuple[int, ...], eps: float) -> NullSpace:
    """Any mask: one factorisation for each distinct (head, visible set)."""
    n, width = scaled.shape[-2:]
    n_query = mask.shape[-2]
    flat = scaled.reshape(-1, n, width)
    size = math.prod(batch)
    counts = [torch.zeros(size, n_query, dtype=torch.int64) for _ in range(3)]
    floats = [torch.zeros(size, n_query, dtype=torch.float64) for _ in range(3)]
    for group in grouped(mask, batch, tuple(scaled.shape[:-2]), width=width):
        space = _spectra(flat[group.value.unsqueeze(-1), group.keys], group.valid, eps)
        for whole, name in zip(counts + floats, _FIELDS, strict=True):
            whole[group.batch, group.row] = getattr(space, name).unsqueeze(-1).expand(group.batch.shape)
    return NullSpace(*(t.reshape(*batch, n_query) for t in counts + floats))
