"""What every measure of mixing gives back, and the summaries that papers draw from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from whence.errors import InputError
from whence.mixing import summaries
from whence.results.result import Result

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Mixture(Result):
    """Shares by origin, [layer, (head,) hidden, input]: entry (i, j) says how much of hidden token i is from input j.

    The summaries are tidy frames with one line per layer (and head) and group.
    """

    kind: ClassVar[str] = "mixture"

    def own_share(self) -> pd.DataFrame:
        """How much of itself is left: median, quartiles and mean of the own-token share by layer, and P̃.

        P̃ (`not_largest`, %) is the share of tokens that are not the largest contributor to their own state (Brunner et
        al. 2020, section 5); a tie counts as the token's own.
        """
        return summaries.own_share(self)

    def by_distance(self) -> pd.DataFrame:
        """Share from the 1st, 2nd, 3rd, 4–5th, 6–10th and 11th+ neighbours, both sides together, and from itself."""
        return summaries.by_distance(self)

    def by_offset(self) -> pd.DataFrame:
        """Mean share from the token at each signed offset (input − hidden)."""
        return summaries.by_offset(self)

    def by_kind(self) -> pd.DataFrame:
        """Share that each type of input token (special tokens by name, punctuation, rest) gives to each type of hidden."""
        return summaries.by_kind(self)

    def special_mass(self) -> pd.DataFrame:
        """Mean share that comes from special tokens."""
        return summaries.special_mass(self)

    def entropy(self) -> pd.DataFrame:
        """Mean entropy of a row in nats, and as a share of its largest possible value."""
        return summaries.entropy(self)

    def dominance(self) -> pd.DataFrame:
        """How much one token dominates: mean and quartiles of a row's largest share, and how often it is above one half."""
        return summaries.dominance(self)

    def sources(self, layer: int | None = None, top: int = 3) -> pd.DataFrame:
        """For each hidden token of one layer (None: the last), its `top` inputs with their shares."""
        return summaries.sources(self, layer, top)


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
