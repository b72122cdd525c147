"""The nearest neighbour among the input embeddings, of the same sequence or of the whole vocabulary.

δ_cosine(a, b) = 1 − a·b / (‖a‖‖b‖),  δ_L2(a, b) = ‖a − b‖₂,  and for the norm alone δ_norm(a, b) = |‖a‖ − ‖b‖|.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

DISTANCES = ("cosine", "l2")
BLOCK = 1 << 23  # entries of one block of padded vectors or of scores: tens of megabytes
EQUAL = 1e-6  # two embeddings nearer than this, relative to their length, are the same one


def distances(found: Tensor, wanted: Tensor, distance: str) -> Tensor:
    """δ row by row: (n, d) and (n, d) → (n,).

    >>> distances(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]]), "l2").item()
    5.0
    """
    if distance == "cosine":
        return 1 - torch.nn.functional.cosine_similarity(found, wanted, dim=-1)
    apart: Tensor = torch.linalg.vector_norm(found - wanted, dim=-1)
    return apart


def scores(found: Tensor, candidates: Tensor, distance: str) -> Tensor:
    """For each of (…, n, d), one number per candidate (…, m, d) that is largest for the nearest: (…, n, m)."""
    if distance == "cosine":
        lengths = torch.linalg.vector_norm(candidates, dim=-1, keepdim=True)
        candidates = candidates / lengths.clamp_min(torch.finfo(candidates.dtype).tiny)
        return found @ candidates.mT  # the length of `found` does not change the order
    if distance == "norm":
        a: Tensor = torch.linalg.vector_norm(found, dim=-1)
        b: Tensor = torch.linalg.vector_norm(candidates, dim=-1)
        return -(a[..., :, None] - b[..., None, :]).abs()
    # −‖f − c‖² without ‖f‖², which is the same for every candidate.
    return 2 * found @ candidates.mT - candidates.square().sum(-1)[..., None, :]


def padded_blocks(lengths: Sequence[int], width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences laid end to end, gathered into rectangles of similar length: places (s, n) and which are real (s, n).

    Places of padding are 0: any valid row serves, since what is there is masked.
    """
    starts = np.concatenate([[0], np.cumsum(lengths)])
    order = np.argsort(lengths, kind="stable")
    i = 0
    while i < len(order):
        j = i + 1
        while j < len(order) and (j + 1 - i) * lengths[order[j]] * max(width, lengths[order[j]]) <= BLOCK:
            j += 1
        group = order[i:j]
        n = max(lengths[k] for k in group)
        offsets = torch.arange(n)
        real = offsets[None] < torch.tensor([lengths[k] for k in group])[:, None]
        places = (torch.tensor([int(starts[k]) for k in group])[:, None] + offsets[None]) * real
        yield places, real
        i = j


def nearest_in_sequence(found: Tensor, embeddings: Tensor, lengths: Sequence[int], distance: str) -> Tensor:
    """Row of the nearest of the same sequence's embeddings, for every token: (N, d), (N, d) → (N,).

    Sequences lie end to end, `lengths` tokens each. Computed in float64, so that the order is the data's own; of
    exactly equal distances the first is taken.

    >>> x = torch.eye(4)
    >>> nearest_in_sequence(x.roll(1, 0), x, [2, 2], "l2").tolist()       # the right one is in the other sequence
    [0, 0, 2, 2]
    """
    chosen = torch.empty(len(found), dtype=torch.long)
    for places, real in padded_blocks(lengths, embeddings.shape[-1]):
        block = scores(found[places].double(), embeddings[places].double(), distance)
        best = block.masked_fill(~real[:, None, :], -torch.inf).argmax(-1)
        chosen[places[real]] = places.gather(1, best)[real]
    return chosen


def equal_in_sequence(embeddings: Tensor, lengths: Sequence[int]) -> Tensor:
    """The first row of the same sequence with the same embedding, for every token: (N, d) → (N,).

    Where positions are added to the embeddings every row is its own; with rotary or no positions a repeated token's
    rows are equal, no map could tell them apart, and a hit on any of them is a hit.

    >>> equal_in_sequence(torch.tensor([[1.0], [2.0], [1.0], [1.0]]), [3, 1]).tolist()
    [0, 1, 0, 3]
    """
    first = torch.empty(len(embeddings), dtype=torch.long)
    for places, real in padded_blocks(lengths, embeddings.shape[-1]):
        x = embeddings[places].double()
        squares = x.square().sum(-1)
        apart = squares[:, :, None] + squares[:, None, :] - 2 * x @ x.mT
        same = (apart <= EQUAL**2 * squares[:, :, None]) & real[:, None, :]
        same |= torch.eye(x.shape[1], dtype=torch.bool)
        first[places[real]] = places.gather(1, same.long().argmax(-1))[real]
    return first


def nearest_in_vocabulary(found: Tensor, table: Tensor, distance: str) -> Tensor:
    """Row of the nearest of all embeddings, for every token: (N, d), (V, d) → (N,)."""
    step = max(1, BLOCK // len(table))
    return torch.cat([scores(part, table, distance).argmax(-1) for part in torch.split(found, step)])


def equal_in_vocabulary(table: Tensor) -> Tensor:
    """The first row of the table with exactly the same numbers, for every row: (V, d) → (V,)."""
    rows = np.ascontiguousarray(table.detach().cpu().numpy())
    first: dict[bytes, int] = {}
    return torch.tensor([first.setdefault(row.tobytes(), i) for i, row in enumerate(rows)])
