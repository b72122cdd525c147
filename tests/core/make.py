"""Tensors for the tests: attention rows under a mask, values with duplicates, zero rows and scales."""

from __future__ import annotations

import torch
from torch import Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def attention(
    *shape: int,
    seed: int = 0,
    sharpness: float = 2.0,
    visible: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    logits = sharpness * torch.randn(*shape, generator=generator(seed), dtype=torch.float64)
    if visible is None:
        return torch.softmax(logits, -1).to(dtype)
    rows = torch.softmax(logits.masked_fill(~visible, -torch.inf), -1)
    return rows.nan_to_num(0.0).to(dtype)


def values(
    *shape: int,
    seed: int = 1,
    scale: float = 1.0,
    duplicates: int = 0,
    zeros: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Random values; the last `duplicates` rows repeat the first ones, then `zeros` rows are zero."""
    v = torch.randn(*shape, generator=generator(seed), dtype=torch.float64)
    n = shape[-2]
    if duplicates:
        v[..., n - duplicates :, :] = v[..., :duplicates, :]
    if zeros:
        v[..., :zeros, :] = 0.0
    return (scale * v).to(dtype)


def causal(n_query: int, n_key: int | None = None) -> Tensor:
    n_key = n_query if n_key is None else n_key
    return torch.ones(n_query, n_key, dtype=torch.bool).tril(n_key - n_query)


def window(n: int, width: int) -> Tensor:
    return causal(n) & ~torch.ones(n, n, dtype=torch.bool).tril(-width)
