"""Closed-form bounds: between which two numbers must each attention weight lie, without a solver?

Any attention row x with the same head output as a has Hx = Ha, H the projector on [V, 1]. With e = Ha,
m_j = min_{i≠j} H_ij and M_j = max_{i≠j} H_ij, e_j = Σ_i H_ij x_i is at least H_jj x_j + m_j (1 − x_j), so

    x_j ≤ (e_j − m_j) / (H_jj − m_j),    and    x_j ≥ (e_j − M_j) / (H_jj − M_j)  when H_jj > M_j.

Always valid, exact where the row is unique, usually 2 to 10 times too wide; `whence.core.attention.certificate` has the exact
intervals. methods 1.2 (5).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whence.core.numerics.basis import column_basis, unit_scale
from whence.core.numerics.checks import check_pair, check_stray, shape
from whence.core.numerics.masks import flat_index, full_mask, grouped
from whence.core.numerics.tolerances import PROJECTOR_ROUNDING, rank_eps, row_sum_slack
from whence.errors import InputError
from whence.results.short_repr import short_repr


@dataclass(frozen=True)
class WeightBounds:
    """lower ≤ x ≤ upper for every attention row x with the same output; (…, n_query, n_key), float64."""

    __repr__ = short_repr

    lower: Tensor
    upper: Tensor

    @property
    def width(self) -> Tensor:
        return self.upper - self.lower


def weight_bounds(attention: Tensor, values: Tensor, *, visible: Tensor | None = None) -> WeightBounds:
    """The closed-form bounds for all rows of all heads at once.

    Args:
        attention: (…, n_query, n_key), rows ≥ 0 that sum to 1 (each is divided by its sum; fully masked rows give 0).
        values: (…, n_key, d_v), broadcastable against attention.
        visible: boolean, broadcastable to attention.

    >>> bounds = weight_bounds(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[1.0], [0.0], [0.0]]))
    >>> bounds.lower, bounds.upper  # the first weight is pinned down, the other two share a half
    (tensor([[0.5000, 0.0000, 0.0000]], dtype=torch.float64), tensor([[0.5000, 0.5000, 0.5000]], dtype=torch.float64))
    """
    batch = check_pair(attention, values, visible)
    n_query, n_key = attention.shape[-2:]
    width = values.shape[-1]
    if visible is None:
        mask = torch.ones(n_query, n_key, dtype=torch.bool)
    else:
        check_stray(attention, visible)
        mask = full_mask(visible, n_query, n_key)
    rows = attention.detach().reshape(-1, n_query, n_key)
    source = flat_index(tuple(attention.shape[:-2]), batch)
    scaled = unit_scale(values)[0].reshape(-1, n_key, width)
    lower = torch.zeros(*batch, n_query, n_key, dtype=torch.float64)
    upper = torch.zeros_like(lower)
    low, high = lower.view(-1, n_query, n_key), upper.view(-1, n_query, n_key)
    eps = rank_eps(values.dtype)
    # The projector itself, n × n, is needed: a narrower budget keeps the chunks small.
    for group in grouped(mask, batch, tuple(values.shape[:-2]), width=width + n_key):
        basis = column_basis(scaled[group.value.unsqueeze(-1), group.keys], group.valid, eps, "simplex")
        keys = group.keys.unsqueeze(1)
        at = (group.batch.unsqueeze(-1), group.row.unsqueeze(-1), keys)
        a = rows[source[group.batch].unsqueeze(-1), group.row.unsqueeze(-1), keys].to(torch.float64)
        a = _normalised(a * group.valid.unsqueeze(1), attention)
        some_low, some_high = _bounds(a, basis.q, group.valid)
        same = basis.identified[:, None, None]
        low[at] = torch.where(same, a, some_low)
        high[at] = torch.where(same, a, some_high)
    return WeightBounds(lower, upper)


def _normalised(rows: Tensor, attention: Tensor) -> Tensor:
    total = rows.sum(-1, keepdim=True)
    slack = row_sum_slack(attention.dtype)
    if bool((rows < 0).any()) or bool(((total - 1).abs() > slack).any()):
        raise InputError(
            f"attention {shape(attention)} has rows that are negative somewhere or do not sum to 1 (sums from "
            f"{float(total.min()):.4g} to {float(total.max()):.4g}); the bounds need attention rows."
        )
    return rows / total


def _bounds(a: Tensor, q: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """a (u, k, m), q (u, m, r), valid (u, m)."""
    h = q @ q.mT
    e = (a @ q) @ q.mT
    own = h.diagonal(dim1=-2, dim2=-1).unsqueeze(1)
    ignore = torch.eye(h.shape[-1], dtype=torch.bool) | ~valid.unsqueeze(-2)
    least = h.masked_fill(ignore, torch.inf).amin(-1).unsqueeze(1)
    most = h.masked_fill(ignore, -torch.inf).amax(-1).unsqueeze(1)
    gap, rise = own - least, own - most
    high = torch.where(
        gap > PROJECTOR_ROUNDING,
        (e - least + PROJECTOR_ROUNDING) / (gap - PROJECTOR_ROUNDING).clamp(min=PROJECTOR_ROUNDING),
        1.0,
    )
    low = torch.where(rise > PROJECTOR_ROUNDING, (e - most - PROJECTOR_ROUNDING) / (rise + PROJECTOR_ROUNDING), 0.0)
    # A single visible key leaves no other index: least = inf; it is unique and handled by `identified`.
    return low.nan_to_num(0.0).clamp(0, 1) * valid.unsqueeze(1), high.nan_to_num(1.0).clamp(0, 1) * valid.unsqueeze(1)
