"""Null share and Pearson r: how much of an attention row is in the part the output never sees?

Null share of a row: ‖a − a⊥‖₁ / ‖a‖₁ (a⊥ has signs, so a difference of masses would mean nothing). Pearson r of raw
against effective attention is the statistic of Brunner et al. (ICLR 2020), Figure 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whence.core.numerics.checks import check_finite, check_visible, shape
from whence.core.numerics.masks import full_mask
from whence.errors import InputError


def null_share(attention: Tensor, effective: Tensor) -> Tensor:
    """‖a − a⊥‖₁ / ‖a‖₁ of each row; 0 = fully determined. Can exceed 1. NaN for a row of zeros.

    Args:
        attention, effective: (…, n_query, n_key), raw and effective attention.

    Returns:
        (…, n_query) float64.

    >>> null_share(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.5, 0.25]]))
    tensor([0.2500], dtype=torch.float64)
    """
    _check_same(attention, effective)
    a = attention.detach().to(torch.float64)
    return (a - effective.detach().to(torch.float64)).abs().sum(-1) / a.abs().sum(-1)


def pearson(attention: Tensor, effective: Tensor, *, visible: Tensor | None = None) -> Tensor:
    """Pearson r of raw against effective attention, over all visible entries of each head.

    Args:
        attention, effective: (…, n_query, n_key).
        visible: boolean, broadcastable to them: entries to count (hidden ones are 0 on both sides and would lift r).

    Returns:
        (…,) float64; NaN where either side is constant.

    >>> pearson(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
    tensor(1., dtype=torch.float64)
    """
    _check_same(attention, effective)
    a, e = (t.detach().to(torch.float64) for t in (attention, effective))
    if visible is None:
        keep = torch.ones(a.shape[-2:], dtype=torch.float64)
    else:
        check_visible(visible, a.shape[-2], a.shape[-1])
        keep = full_mask(visible, *a.shape[-2:]).to(torch.float64)
    total = keep.sum((-2, -1), keepdim=True)
    a = (a - (a * keep).sum((-2, -1), keepdim=True) / total) * keep
    e = (e - (e * keep).sum((-2, -1), keepdim=True) / total) * keep
    return (a * e).sum((-2, -1)) / (a.square().sum((-2, -1)) * e.square().sum((-2, -1))).sqrt()


def _check_same(attention: Tensor, effective: Tensor) -> None:
    if attention.shape != effective.shape or attention.ndim < 2:
        raise InputError(
            f"attention {shape(attention)} and effective {shape(effective)} must have one shape (…, n_query, n_key); "
            "effective is what effective_attention(attention, values) returns."
        )
    check_finite("attention", attention)
    check_finite("effective", effective)
