"""What every measure of mixing gives back, and the summaries that papers draw from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from whence.errors import InputError
from whence.mixing import summaries
from whence.results.result import Result


@dataclass(frozen=True)
class Mixture(Result):
    """Shares by origin, [layer, (head,) hidden, input]: entry (i, j) says how much of hidden token i is from input j.

    Its summaries are tidy frames with one line per layer (and head) and group; `whence.mixing.summaries` says what each is.
    """

    kind: ClassVar[str] = "mixture"

    own_share = summaries.own_share
    by_distance = summaries.by_distance
    by_offset = summaries.by_offset
    by_kind = summaries.by_kind
    special_mass = summaries.special_mass
    entropy = summaries.entropy
    dominance = summaries.dominance
    sources = summaries.sources


def check_rows(values: Tensor, name: str) -> Tensor:
    """Refuse what is not a number instead of handing it on."""
    if not bool(torch.isfinite(values.sum())):
        raise InputError(f"{name}: the trace holds NaN or infinite numbers; load the model with dtype=torch.float32.")
    return values


def normalise_rows(scores: Tensor, *, crossed: bool = False, first_row: int = 0) -> tuple[Tensor, Tensor]:
    """Rows divided by their sums, and which were all zero: those become their own token (crossed: the last column).

    first_row: which column is the first row's own token.
    """
    total = scores.sum(-1, keepdim=True)
    empty = total[..., 0] <= 0
    rows = scores / total.masked_fill(total <= 0, 1.0)
    if bool(empty.any()):
        own = torch.zeros_like(rows[(0,) * (rows.dim() - 2)])
        if crossed:
            own[:, -1] = 1
        else:
            torch.diagonal(own, first_row).fill_(1)
        rows = torch.where(empty[..., None], own, rows)
    return rows, empty
