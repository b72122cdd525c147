"""The nearest neighbour among the input embeddings, of the same sequence or of the whole vocabulary.

δ_cosine(a, b) = 1 − a·b / (‖a‖‖b‖),  δ_L2(a, b) = ‖a − b‖₂,  and for the norm alone δ_norm(a, b) = |‖a‖ − ‖b‖|.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from whence.core.numerics.tolerances import EQUAL_EMBEDDINGS

DISTANCES = ("cosine", "l2")
BLOCK = 1 << 23  # scores held at once, tens of megabytes


def distances(states: Tensor, wanted: Tensor, distance: str) -> Tensor:
    """δ row by row: (n, d) and (n, d) → (n,).

    >>> distances(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]]), "l2").item()
    5.0
    """
    if distance == "cosine":
        return 1 - torch.nn.functional.cosine_similarity(states, wanted, dim=-1)
    apart: Tensor = torch.linalg.vector_norm(states - wanted, dim=-1)
    return apart


def scores(states: Tensor, candidates: Tensor, distance: str) -> Tensor:
    """For each of (…, n, d), one number per candidate (…, m, d) that is largest for the nearest: (…, n, m)."""
    if distance == "cosine":
        lengths = torch.linalg.vector_norm(candidates, dim=-1, keepdim=True)
        candidates = candidates / lengths.clamp_min(torch.finfo(candidates.dtype).tiny)
        return states @ candidates.mT  # the length of `found` does not change the order
    if distance == "norm":
        a: Tensor = torch.linalg.vector_norm(states, dim=-1)
        b: Tensor = torch.linalg.vector_norm(candidates, dim=-1)
        return -(a[..., :, None] - b[..., None, :]).abs()
    # −‖f − c‖² without ‖f‖², which is the same for every candidate.
    return 2 * states @ candidates.mT - candidates.square().sum(-1)[..., None, :]


def sequences(lengths: Sequence[int]) -> Iterator[slice]:
    """The rows of each sequence, where sequences lie end to end.

    One at a time is faster here than padded batches: a sentence fits the processor's cache, a batch does not.
    """
    start = 0
    for n in lengths:
        yield slice(start, start + n)
        start += n


def nearest_in_sequence(states: Tensor, embeddings: Tensor, lengths: Sequence[int], distance: str) -> Tensor:
    """Row of the nearest of the same sequence's embeddings, for every token: (N, d), (N, d) → (N,).

    Sequences lie end to end, `lengths` tokens each. Computed in float64, so that the order is the data's own; of
    exactly equal distances the first is taken.

    >>> x = torch.eye(4)
    >>> nearest_in_sequence(x.roll(1, 0), x, [2, 2], "l2").tolist()       # the right one is in the other sequence
    [0, 0, 2, 2]
    """
    nearest = torch.empty(len(states), dtype=torch.long)
    for rows in sequences(lengths):
        best = scores(states[rows].double(), embeddings[rows].double(), distance).argmax(-1)
        nearest[rows] = best + rows.start
    return nearest


def equal_in_sequence(embeddings: Tensor, lengths: Sequence[int]) -> Tensor:
    """The first row of the same sequence with the same embedding, for every token: (N, d) → (N,).

    Where positions are added to the embeddings every row is its own; with rotary or no positions a repeated token's
    rows are equal, no map could tell them apart, and a hit on any of them is a hit.

    >>> equal_in_sequence(torch.tensor([[1.0], [2.0], [1.0], [1.0]]), [3, 1]).tolist()
    [0, 1, 0, 3]
    """
    first = torch.empty(len(embeddings), dtype=torch.long)
    for rows in sequences(lengths):
        x = embeddings[rows].double()
        squares = x.square().sum(-1)
        same = squares[:, None] + squares[None, :] - 2 * x @ x.T <= EQUAL_EMBEDDINGS**2 * squares[:, None]
        same |= torch.eye(len(x), dtype=torch.bool)
        first[rows] = same.long().argmax(-1) + rows.start
    return first


def nearest_in_vocabulary(states: Tensor, table: Tensor, distance: str) -> Tensor:
    """Row of the nearest of all embeddings, for every token: (N, d), (V, d) → (N,)."""
    step = max(1, BLOCK // len(table))
    return torch.cat([scores(part, table, distance).argmax(-1) for part in torch.split(states, step)])


def equal_in_vocabulary(table: Tensor) -> Tensor:
    """The first row of the table with exactly the same numbers, for every row: (V, d) → (V,)."""
    rows = np.ascontiguousarray(table.detach().cpu().numpy())
    first: dict[bytes, int] = {}
    return torch.tensor([first.setdefault(row.tobytes(), i) for i, row in enumerate(rows)])
