"""All singular values of the prefixes of a head's values: of as few prefixes as settle the rank of every one.

Adding a key raises every singular value, so two solved prefixes bracket all between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_GRID = 8
NAMES = ("rank", "largest", "last", "inner_rank", "inner_largest", "inner_last")


@dataclass(frozen=True)
class PrefixSpectra:
    """For each head and prefix of 1 … n keys, (u, n): rank, σ_max and σ_rank of V, and of V − 1μᵀ (inner)."""

    rank: Tensor
    largest: Tensor
    last: Tensor
    inner_rank: Tensor
    inner_largest: Tensor
    inner_last: Tensor


class PrefixGrams:
    """Gram matrices of chosen prefixes of rows (n, d): running sums every 8 rows, the rest added when asked for.

    All n of them at once would be n·d² numbers, and writing those costs more than the eigenvalues.
    """

    def __init__(self, rows: Tensor) -> None:
        pad = -len(rows) % _GRID
        blocks = torch.cat([rows, rows.new_zeros(pad, rows.shape[1])]).reshape(-1, _GRID, rows.shape[1])
        sums = (blocks.mT @ blocks).cumsum(0)
        self.before: Tensor = torch.cat([torch.zeros_like(sums[:1]), sums])
        self.blocks: Tensor = blocks

    def sigma(self, index: Tensor) -> Tensor:
        """All singular values of the prefixes that end with these rows, descending.

        From the Gram matrix: for float32 values only, eps64^½ is far below their tolerance.
        """
        block = index // _GRID
        part = self.blocks[block] * (torch.arange(_GRID) <= (index - block * _GRID).unsqueeze(-1)).unsqueeze(-1)
        eigenvalues: Tensor = torch.linalg.eigvalsh(self.before[block] + part.mT @ part)
        return eigenvalues.clamp(min=0).sqrt().flip(-1)


def solve_between(plain: PrefixGrams, centred: PrefixGrams, span: Tensor, width: int, eps: float) -> PrefixSpectra:
    """One head, the prefixes that end with the rows `span`: full spectra, of as few of them as decide all.

    Two solved prefixes bracket all between them: where they agree on the rank and leave less than 10 % in
    σ_max/σ_r, nothing between needs solving; elsewhere they are halved.
    """
    count = len(span)
    length = span + 1
    s, t = (torch.zeros(count, width, dtype=torch.float64) for _ in range(2))
    solved = torch.zeros(count, dtype=torch.bool)
    todo = torch.tensor(sorted({0, count - 1}))
    while todo.numel():
        s[todo], t[todo] = plain.sigma(span[todo]), centred.sigma(span[todo])
        solved[todo] = True
        ends = solved.nonzero().squeeze(-1)
        low, high = ends[:-1], ends[1:]
        wide = (high - low > 1) & ~_agree(s, t, length, low, high, width, eps)
        todo = ((low + high) // 2)[wide]
    # Between two solved rows: the geometric middle of their spectra, within 5 % of each and never across a rank.
    ends = solved.nonzero().squeeze(-1)
    after = torch.searchsorted(ends, torch.arange(count))
    high = ends[after]
    low = torch.where(solved, high, ends[(after - 1).clamp(min=0)])
    exact = _counted(s[high], t[high], length[high], width, eps)
    middle = _counted((s[low] * s[high]).sqrt(), (t[low] * t[high]).sqrt(), length, width, eps)
    return replace(middle, rank=exact.rank, inner_rank=exact.inner_rank)


def _counted(s: Tensor, t: Tensor, length: Tensor, width: int, eps: float) -> PrefixSpectra:
    tolerance = (s[:, 0] * length.clamp(min=width) * eps).unsqueeze(-1)
    # A matrix with n rows cannot have rank above n; the sums that build Gram matrices may round past it.
    rank = torch.minimum((s > tolerance).sum(-1), length)
    inner = torch.minimum((t > tolerance).sum(-1), length - 1)

    def last(sigma: Tensor, r: Tensor) -> Tensor:
        return torch.gather(sigma, -1, (r - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)

    return PrefixSpectra(rank, s[:, 0], last(s, rank), inner, t[:, 0], last(t, inner))


def _agree(s: Tensor, t: Tensor, length: Tensor, low: Tensor, high: Tensor, width: int, eps: float) -> Tensor:
    """Whether two solved rows leave nothing open for the rows between them."""
    # Both σ_max and the length grow, so the tolerance of every row between lies between these two.
    least, most = (s[i, 0] * length[i].clamp(min=width) * eps for i in (low, high))
    agreed = torch.ones(len(low), dtype=torch.bool)
    for sigma in (s, t):
        at_least = (sigma[low] > most.unsqueeze(-1)).sum(-1)
        at_most = (sigma[high] > least.unsqueeze(-1)).sum(-1)
        last = (at_least - 1).clamp(min=0).unsqueeze(-1)
        smallest, largest = (torch.gather(sigma[i], -1, last).squeeze(-1) for i in (low, high))
        room = (sigma[high, 0] / sigma[low, 0]) * (largest / smallest)
        agreed &= (at_least == at_most) & ((room <= 1.1) | (at_least == 0))
    return agreed
