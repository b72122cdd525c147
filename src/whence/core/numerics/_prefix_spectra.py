"""Rank, largest and smallest singular value of every prefix of a head's values, plain and centred.

Causal row i sees the first i keys, so n nested matrices a head. Where a Cholesky factor proves a prefix to be of full
rank, only its two extreme singular values are wanted, and both are largest eigenvalues: of the Gram matrix and of its
inverse. Up to d_v keys the inverse factor of one Gram matrix K = VVᵀ holds those of all its leading minors; beyond, a
block of prefixes shares one factor (Woodbury), as in
`whence.core.numerics.causal_blocks`. The rest (repeated tokens, nearly square prefixes) is solved in full, between
brackets: adding a key raises every singular value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.core.numerics._bracketed_spectra import NAMES, PrefixGrams, PrefixSpectra, solve_between
from whence.core.numerics.basis import CHOLESKY_LIMIT, helmert_rows, inverse_cholesky
from whence.core.numerics.duplicate_keys import inverse_factors

_SQUARINGS = 5
# Eigenvalue problems held at once: a megabyte of float32 stays in the cache.
_TOGETHER = 1 << 18
_BUCKET = 16
_PAIRS = 48
_FIRST_BLOCK, _BLOCK = 16, 64
# Prefixes between two whose extreme singular values differ by less than this factor are interpolated.
_ROOM = 1.03


def prefix_spectra(values: Tensor, eps: float) -> PrefixSpectra:
    """values (u, n, d) float64 that came from float32 or coarser, absent keys last and zero."""
    units, width = values.shape[0], values.shape[-1]
    step = max(1, (1 << 25) // (_BLOCK * width * width))
    parts = [_some(values[i : i + step], eps) for i in range(0, units, step)]
    return PrefixSpectra(*(torch.cat([getattr(p, name) for p in parts]) for name in NAMES))


def _some(values: Tensor, eps: float) -> PrefixSpectra:
    units, n, width = values.shape
    length = torch.arange(1, n + 1)
    # ‖V‖_F ≥ σ_max, times the tolerance of every prefix: what the smallest singular value must clearly exceed.
    threshold = values.square().sum(-1).cumsum(-1).sqrt() * length.clamp(min=width) * eps
    real = torch.ones(units, n, dtype=torch.bool)
    centred_rows = helmert_rows(values, real)[0]
    largest, last, known = _extremes(values, threshold)
    rank = length.clamp(max=width).expand(units, n).clone()
    inner = [torch.zeros(units, n, dtype=torch.float64) for _ in range(2)]
    inner_known = torch.ones(units, n, dtype=torch.bool)
    if n > 1:
        inner[0][:, 1:], inner[1][:, 1:], inner_known[:, 1:] = _extremes(centred_rows[:, 1:], threshold[:, 1:])
    inner_rank = (length - 1).clamp(max=width).expand(units, n).clone()
    found = PrefixSpectra(rank, largest, last, inner_rank, *inner)
    for unit in (~(known & inner_known)).any(-1).nonzero().squeeze(-1).tolist():
        left = (~(known & inner_known))[unit].nonzero().squeeze(-1)
        span = torch.arange(int(left[0]), int(left[-1]) + 1)
        exact = solve_between(PrefixGrams(values[unit]), PrefixGrams(centred_rows[unit]), span, width, eps)
        for name in NAMES:
            getattr(found, name)[unit, left] = getattr(exact, name)[left - span[0]]
    return found


def largest_eigenvalue(gram: Tensor) -> Tensor:
    """λ_max of positive semidefinite matrices (u, d, d), float64.

    With B = (G/tr G)^32 by repeated squaring, (tr B²/tr B)^(1/32) ≤ λ_max/tr G ≤ (tr B²)^(1/64): at most 7 % apart at
    d = 64. Between the two, the Rayleigh quotient of the column of B² with the largest diagonal entry of B, which is
    64 steps of the power method from the best unit vector and as a rule within 0.1 %.
    """
    count, width = gram.shape[:2]
    step = max(1, _TOGETHER // width**2)
    # Buffers that stay: fresh memory for every product would cost more than the product.
    buffers = [torch.empty(min(step, count), width, width, dtype=torch.float32) for _ in range(3)]
    found = torch.empty(count, dtype=torch.float64)
    for first in range(0, count, step):
        some = gram[first : first + step]
        found[first : first + step] = _by_squaring(some, *(buffer[: len(some)] for buffer in buffers))
    return found


def _by_squaring(gram: Tensor, unit: Tensor, power: Tensor, other: Tensor) -> Tensor:
    trace = _trace(gram).clamp(min=torch.finfo(torch.float64).tiny)
    torch.mul(gram, trace.reciprocal()[:, None, None], out=unit)
    source = unit
    logarithm = torch.zeros(len(gram), dtype=torch.float64)  # of what the power was divided by
    for k in range(_SQUARINGS):
        torch.bmm(source, source, out=power)
        logarithm *= 2
        if k % 2:
            # λ_max ≥ 1/d after each division, so that two squarings cannot underflow.
            size = _trace(power).clamp(min=torch.finfo(torch.float32).tiny)
            power *= size.reciprocal()[:, None, None]
            logarithm += size.double().log()
        source, power, other = power, other, power
    diagonal = source.diagonal(dim1=-2, dim2=-1)
    best = diagonal.argmax(-1)
    vector = source @ source[torch.arange(len(gram)), best].unsqueeze(-1)
    quotient = ((unit @ vector) * vector).sum((-2, -1)) / vector.square().sum((-2, -1)).clamp(min=1e-38)
    square = torch.linalg.vector_norm(source, dim=(-2, -1)).double().log() * 2
    count = 2**_SQUARINGS
    low = ((square - _trace(source).double().log() + logarithm) / count).exp()
    high = ((square + 2 * logarithm) / (2 * count)).exp()
    found = torch.minimum(torch.maximum(quotient.double(), low), high) * trace
    return found.masked_fill(trace <= torch.finfo(torch.float64).tiny, 0.0)


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


def _extremes(rows: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """σ_max and σ_min of the first k rows (u, m, d), k = 1 … m, and whether they are known (provably of full rank)."""
    units, m, width = rows.shape
    largest, last = (torch.zeros(units, m, dtype=torch.float64) for _ in range(2))
    known = torch.zeros(units, m, dtype=torch.bool)
    short = min(m, width)
    inverse, size = inverse_factors(rows[:, :short], torch.ones(units, short, dtype=torch.bool))
    known[:, :short] = _proved(size, rows, threshold)[:, :short]
    first = torch.linalg.vector_norm(rows[:, 0], dim=-1)
    # The minors grow, the inverse factors too: a row more adds to KKᵀ and to L⁻ᵀL⁻¹ alike.
    largest[:, :short] = _leading(rows[:, :short] @ rows[:, :short].mT, first, squared=False)
    last[:, :short] = _leading(inverse, first.reciprocal(), squared=True).reciprocal()
    end = last[:, short - 1].where(known[:, short - 1], torch.nan)
    for start, stop, top, bottom, good in _blocks(rows, threshold, largest[:, short - 1], end):
        largest[:, start:stop], last[:, start:stop], known[:, start:stop] = top, bottom, good
    return largest, last, known


def _leading(matrix: Tensor, first: Tensor, *, squared: bool) -> Tensor:
    """λ_max^½ of the leading minors (u, m) of matrices (u, m, m), or, squared, σ_max of their leading rows."""
    size = matrix.shape[-1]

    def solve(unit: Tensor, row: Tensor) -> Tensor:
        found = torch.empty(len(unit), dtype=torch.float64)
        last = row + 1  # row 0 is known
        for stop in (last // _BUCKET).unique() * _BUCKET + _BUCKET:
            width = min(int(stop), size)
            where = (last // _BUCKET * _BUCKET + _BUCKET == stop).nonzero().squeeze(-1)
            inside = (torch.arange(width) <= last[where].unsqueeze(-1)).to(torch.float64)
            part = matrix[:, :width, :width][unit[where]].mul_(inside.unsqueeze(-1))
            part = part.mT @ part if squared else part.mul_(inside.unsqueeze(-2))
            found[where] = largest_eigenvalue(part).sqrt()
        return found

    return torch.cat([first.unsqueeze(-1), _fill(first, solve, size - 1)], -1) if size > 1 else first.unsqueeze(-1)


def _proved(size: Tensor, rows: Tensor, threshold: Tensor) -> Tensor:
    """size: ‖L⁻¹‖_F ≥ 1/σ_min of the first prefixes. Half the tolerance, so that rounding cannot turn the decision."""
    k = size.shape[-1]
    norm = rows[:, :k].square().sum(-1).cumsum(-1).sqrt()
    return (size * threshold[:, :k] < 0.5) & (size * norm < CHOLESKY_LIMIT)


def _blocks(
    rows: Tensor, threshold: Tensor, top: Tensor, bottom: Tensor
) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor]]:
    """Prefixes of more than d rows, a block at a time: start, stop, σ_max, σ_min and whether they are known.

    top, bottom (u,): those of the first d rows (bottom NaN where not known).
    G_i⁻¹ = L⁻ᵀ(I − W_≤i W_≤iᵀ)L⁻¹ with L that of the block's start.
    """
    units, m, width = rows.shape
    gram = rows[:, :width].mT @ rows[:, :width]
    stop = width
    while stop < m:
        start, stop = stop, min(stop + (_BLOCK if stop > width else _FIRST_BLOCK), m)
        fresh = rows[:, start:stop]
        inverse, size, good = inverse_cholesky(gram)
        spread = size * gram.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
        good &= (spread < CHOLESKY_LIMIT) & (size * threshold[:, stop - 1] < 0.5)
        # A nearly singular head would make U huge; zero keeps its (unused) numbers finite.
        inverse = torch.where(good[:, None, None], inverse, 0.0)
        u = inverse @ fresh.mT
        small = torch.linalg.cholesky(u.mT @ u + torch.eye(stop - start, dtype=torch.float64))
        w = inverse.mT @ torch.linalg.solve_triangular(small, u.mT, upper=False).mT
        precision = inverse.mT @ inverse

        block = _Block(gram, fresh, precision, w)
        tops = _fill(top, block.largest, stop - start)
        bottoms = _fill(bottom, block.smallest, stop - start)
        top, bottom = tops[:, -1], bottoms[:, -1].where(good, torch.nan)
        gram = gram + fresh.mT @ fresh
        yield start, stop, tops, bottoms, good.unsqueeze(-1).expand(units, stop - start)


@dataclass(frozen=True)
class _Block:
    """G (u, d, d) before the block, its rows (u, r, d), L⁻ᵀL⁻¹ (u, d, d) and L⁻ᵀW (u, d, r)."""

    gram: Tensor
    fresh: Tensor
    precision: Tensor
    w: Tensor

    def largest(self, unit: Tensor, row: Tensor) -> Tensor:
        """σ_max of the prefixes that end with these rows of the block; unit, row (p,)."""
        mask = (torch.arange(self.fresh.shape[1]) <= row.unsqueeze(-1)).to(torch.float64)
        fresh = self.fresh[unit]
        return largest_eigenvalue(self.gram[unit].baddbmm_(fresh.mT * mask.unsqueeze(1), fresh)).sqrt()

    def smallest(self, unit: Tensor, row: Tensor) -> Tensor:
        """σ_min of the same."""
        mask = (torch.arange(self.w.shape[-1]) <= row.unsqueeze(-1)).to(torch.float64)
        w = self.w[unit]
        inverse = self.precision[unit].baddbmm_(w * mask.unsqueeze(1), w.mT, alpha=-1)
        return largest_eigenvalue(inverse).rsqrt()


def _fill(before: Tensor, solve: Callable[[Tensor, Tensor], Tensor], count: int) -> Tensor:
    """A quantity that grows with every row, of rows 0 … count − 1 (u, count); before (u,): that of row −1.

    The last row is solved, then the middle between any two that differ by more than _ROOM; those left between are
    interpolated.
    """
    units = len(before)
    found = torch.full((units, count + 1), torch.nan, dtype=torch.float64)
    found[:, 0] = before
    unit, low, high = torch.arange(units), torch.zeros(units, dtype=torch.int64), torch.full((units,), count)
    todo = unit, high
    while todo[0].numel():
        # A few at a time: what they gather then stays in the cache.
        pairs = zip(todo[0].split(_PAIRS), todo[1].split(_PAIRS), strict=True)
        found[todo] = torch.cat([solve(u, row - 1) for u, row in pairs])
        # NaN (an end that is not known) counts as too much.
        wide = (high - low > 1) & ~(found[unit, high] <= _ROOM * found[unit, low])
        unit, low, high = unit[wide], low[wide], high[wide]
        middle = (low + high) // 2
        todo = unit, middle
        unit = unit.repeat(2)
        low, high = torch.cat([low, middle]), torch.cat([middle, high])
    position = torch.arange(count + 1)
    known = ~found.isnan()
    known[:, 0] = True
    previous = torch.where(known, position, 0).cummax(-1).values
    following = torch.where(known, position, count).flip(-1).cummin(-1).values.flip(-1)
    share = (position - previous) / (following - previous).clamp(min=1)
    left, right = (torch.gather(found, -1, i).log() for i in (previous, following))
    return torch.where(known, found, torch.lerp(left, right, share.double()).exp())[:, 1:]
