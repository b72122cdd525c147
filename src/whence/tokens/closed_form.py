"""Linear maps without training: ridge regression and orthogonal Procrustes, from second moments gathered once.

With z = (e − μ)/σ the standardised states and y the centred embeddings, C = E[zzᵀ] and D = E[zyᵀ]:

    ridge        W = (C + λI)⁻¹ D,                      g(e) = Wᵀz + mean(x)
    Procrustes   R = UVᵀ, USVᵀ = σ·D, s = tr S / E‖e − μ‖²,  g(e) = s Rᵀ(e − μ) + mean(x)

(Hoerl & Kennard 1970; Schönemann 1966, with one scale and a shift, without which L2 would compare unlike sizes.)
One eigendecomposition of C serves every λ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from whence.tokens.maps import Affine

ROWS = 8192  # read at a time
# Of the median spread. A coordinate that hardly varies in one layer may be anything in another: divided by its own
# spread, it would swamp the map wherever else that is applied (three of MiniLM's last layer are constant).
FLOOR = 1e-2


@dataclass(frozen=True)
class Moments:
    """What the closed forms need of the training pairs, in float64."""

    mean: Tensor  # [d] of the states
    spread: Tensor  # [d] standard deviations of the states, at least FLOOR of their median
    covariance: Tensor  # [d, d] of the standardised states, C
    target_mean: Tensor  # [d_x] of the embeddings
    target_spread: float  # root mean square length of the centred embeddings, per coordinate
    cross: Tensor  # [d, d_x] of standardised states and centred embeddings, D

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues [d] and eigenvectors [d, d] of C."""
        values, vectors = torch.linalg.eigh(self.covariance)
        return values.clamp_min(0), vectors


def moments(states: Tensor, embeddings: Tensor) -> Moments:
    """Means, spreads and (cross-)covariances of paired rows, (N, d) and (N, d_x), in blocks of rows."""
    n, d = states.shape
    mean, target_mean = states.new_zeros(d).double(), embeddings.new_zeros(embeddings.shape[1]).double()
    for x, y in zip(torch.split(states, ROWS), torch.split(embeddings, ROWS), strict=True):
        mean += x.double().sum(0) / n
        target_mean += y.double().sum(0) / n
    covariance = states.new_zeros(d, d).double()
    cross = states.new_zeros(d, embeddings.shape[1]).double()
    spread_y = 0.0
    for x, y in zip(torch.split(states, ROWS), torch.split(embeddings, ROWS), strict=True):
        x, y = x.double() - mean, y.double() - target_mean
        covariance.addmm_(x.T, x, alpha=1 / n)
        cross.addmm_(x.T, y, alpha=1 / n)
        spread_y += float(y.square().mean(1).sum()) / n
    spread = covariance.diagonal().clamp_min(0).sqrt()
    spread = spread.clamp_min(max(FLOOR * float(spread.median()), torch.finfo(torch.float32).tiny))
    covariance = covariance / spread[:, None] / spread[None, :]
    return Moments(mean, spread, covariance, target_mean, spread_y**0.5, cross / spread[:, None])


def ridge(moments: Moments, penalties: tuple[float, ...]) -> list[Affine]:
    """The ridge map for each λ (relative to the unit variance of the standardised states).

    >>> x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    >>> (ridge(moments(x, x @ torch.ones(3, 2)), (1e-9,))[0](x) - x @ torch.ones(3, 2)).abs().max() < 1e-4
    tensor(True)
    """
    values, vectors = moments.eigen
    rotated = vectors.T @ moments.cross
    return [
        Affine.of(moments.mean, moments.spread, vectors @ (rotated / (values + p)[:, None]), moments.target_mean)
        for p in penalties
    ]


def even_basis(moments: Moments, penalty: float) -> tuple[Tensor, Tensor]:
    """B = U diag(λ_k + penalty)^(−¼), [d, d], with C = U diag(λ) Uᵀ, and its inverse: half way to whitening.

    The first position of a decoder can have states a hundred times longer than the rest. They make up one or two
    directions of U; in this basis they no longer drown the others. Whitening wholly (−½) would make noise as loud as
    everything else.
    """
    values, vectors = moments.eigen
    root = (values + penalty) ** 0.25
    return vectors / root, (vectors * root).T


def procrustes(moments: Moments) -> Affine:
    """The rotation (or reflection), one scale and a shift that bring the states nearest to their embeddings.

    >>> x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    >>> turn = torch.tensor([[0., 1., 0.], [-1., 0., 0.], [0., 0., 1.]])
    >>> (procrustes(moments(x, 2 * x @ turn + 5))(x) - (2 * x @ turn + 5)).abs().max() < 1e-4
    tensor(True)
    """
    u, s, vt = torch.linalg.svd(moments.cross * moments.spread[:, None], full_matrices=False)
    energy = float((moments.spread.square() * moments.covariance.diagonal()).sum())
    scale = float(s.sum()) / energy if energy > 0 else 0.0
    return Affine.of(moments.mean, torch.ones_like(moments.spread), scale * (u @ vt), moments.target_mean)
