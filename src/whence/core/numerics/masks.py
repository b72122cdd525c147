"""Who sees what: how a boolean mask decides which algorithm runs.

A *head mask* is one value head together with one set of visible keys: the thing that is factorised. Full and padded
attention have one a head, causal attention a nested chain of them, anything else is grouped by distinct set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def full_mask(visible: Tensor, n_query: int, n_key: int) -> Tensor:
    """visible (any broadcastable shape) as (…, n_query, n_key), without copying."""
    if visible.ndim == 1:
        visible = visible.unsqueeze(0)
    return visible.expand(*visible.shape[:-2], n_query, n_key)


def shared_keys(visible: Tensor) -> Tensor | None:
    """The one key set (…, n_key) that every row sees, fully masked rows aside; None when rows differ."""
    keys = visible.any(-2)
    same = (visible == keys.unsqueeze(-2)).all(-1) | ~visible.any(-1)
    return keys if bool(same.all()) else None


def causal_keys(visible: Tensor) -> Tensor | None:
    """The keys (…, n_key) that exist, when row i sees exactly those of them up to its own position; else None.

    The last row is the last key's (a cached prefix shifts the diagonal); padded keys may be missing anywhere, and
    rows that see nothing are left out of the comparison.
    """
    n_query, n_key = visible.shape[-2:]
    keys = visible.any(-2)
    triangle = torch.ones(n_query, n_key, dtype=torch.bool).tril(n_key - n_query)
    same = (visible == (triangle & keys.unsqueeze(-2))).all(-1) | ~visible.any(-1)
    return keys if bool(same.all()) else None


def flat_index(own: tuple[int, ...], batch: tuple[int, ...]) -> Tensor:
    """For each element of the flattened batch, the flat position of the tensor of leading shape `own` it reads."""
    return torch.arange(math.prod(own)).reshape(own).expand(batch).reshape(-1)


@dataclass(frozen=True)
class Group:
    """Head masks with equally many member rows, ready for one batched call.

    value: (u,) flat value head; keys: (u, m) key indices, valid: (u, m) which of them are real (real ones first);
    batch, row: (u, k) flat batch index and query row of the k members of each head mask.
    """

    value: Tensor
    keys: Tensor
    valid: Tensor
    batch: Tensor
    row: Tensor


def grouped(
    visible: Tensor,
    batch: tuple[int, ...],
    value_batch: tuple[int, ...],
    wanted: Tensor | None = None,
    *,
    width: int = 64,
    budget: int = 4_000_000,
) -> Iterator[Group]:
    """Group the rows of a mask by (value head, visible set), in chunks of about `budget` gathered numbers.

    visible: (…, n_query, n_key); wanted: (batch flattened, n_query) boolean, the rows to do (all by default). Rows
    that see nothing belong to no group.
    """
    n_query, n_key = visible.shape[-2:]
    flat = visible.reshape(-1, n_key)
    if not len(flat):  # no rows, no groups
        return
    packed = np.packbits(flat.numpy(), axis=1)
    # One void scalar a row: np.unique on axis=0 sorts columns one by one and is far slower.
    _, first, inverse = np.unique(
        np.ascontiguousarray(packed).view(np.dtype((np.void, packed.shape[1]))).ravel(),
        return_index=True,
        return_inverse=True,
    )
    sets = flat[torch.from_numpy(first)]
    set_of = torch.from_numpy(inverse.reshape(-1, n_query))[flat_index(tuple(visible.shape[:-2]), batch)]
    size = sets.sum(-1)
    todo = size[set_of] > 0
    if wanted is not None:
        todo = todo & wanted
    member_batch, member_row = todo.nonzero(as_tuple=True)
    if member_batch.numel() == 0:
        return
    value_of = flat_index(value_batch, batch)[member_batch]
    key = value_of * len(sets) + set_of[member_batch, member_row]
    head_mask, head_mask_of, members = torch.unique(key, return_inverse=True, return_counts=True)
    order = torch.argsort(head_mask_of, stable=True)
    start = members.cumsum(0) - members
    set_index, value_index = head_mask % len(sets), head_mask // len(sets)
    for k in members.unique().tolist():
        some = (members == k).nonzero().squeeze(-1)
        # Sorted by size, a chunk pads little.
        some = some[torch.argsort(size[set_index[some]], stable=True)]
        position = 0
        while position < some.numel():
            ahead = size[set_index[some[position:]]]
            cost = ahead * (width + k) * torch.arange(1, ahead.numel() + 1)
            take = max(1, int((cost <= budget).sum()))
            chunk = some[position : position + take]
            position += take
            chosen = sets[set_index[chunk]]
            longest = int(size[set_index[chunk]].max())
            keys = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)[:, :longest]
            member = order[start[chunk].unsqueeze(-1) + torch.arange(k)]
            yield Group(
                value_index[chunk],
                keys,
                torch.gather(chosen, 1, keys),
                member_batch[member],
                member_row[member],
            )
