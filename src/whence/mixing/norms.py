"""Norm-based analysis: how long is each token's part?

Kobayashi et al., "Attention is Not Only a Weight" (EMNLP 2020): ‖Σ_h A^h_ij V^h_j W^h‖₂, attention alone;
"Incorporating Residual and Normalization Layers into Analysis of Masked Language Models" (EMNLP 2021): ‖T_ij‖₂.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from whence.mixing.decomposition import Decomposition
from whence.mixing.layerwise import LayerView
from whence.mixing.mixture import normalise_rows

_KEYS, _FEW = 64, 32  # keys factorised, and keys multiplied, together: their vectors stay in the processor's cache
_APART = 1e-2  # a head is apart from those before it if this much of its squared length is


@dataclass(frozen=True)
class Norms:
    """‖T_ij‖₂ with rows divided by their sums.

    residual=True: with residual and norm (Kobayashi et al. 2021). False: ‖Σ_h A V W‖, attention only (2020).
    """

    residual: bool = True
    batched: ClassVar[bool] = True
    by_rows: ClassVar[bool] = True

    @property
    def joint(self) -> bool:
        """Cross-attention has a residual to share with; attention alone has none."""
        return self.residual

    def matrix(self, layer: LayerView) -> tuple[Tensor, Tensor]:
        """(query, source), and which rows are degenerate."""
        decomposition = layer.decomposition
        if not self.residual:
            weight = layer.layer.row_projection.weight.detach().to(decomposition.weight)
            # Where rows are turned, each has heads of its own.
            weight = weight.repeat_interleave(len(decomposition.weight) // len(weight), dim=0)
            decomposition = replace(decomposition, weight=weight, scale=None)
        lengths = part_norms(decomposition, residual=self.residual)
        return normalise_rows(lengths, crossed=layer.crossed, first_row=decomposition.first_row)


def part_norms(decomposition: Decomposition, *, residual: bool = True) -> Tensor:
    """(query, source): ‖T_ij‖₂, with no (n, n, d) work.

    For a key j, ‖Σ_h a_h U^h_j‖ = ‖R_j a‖ with R_jᵀR_j = U_j U_jᵀ (head × head): the norm is taken from R_j a rather
    than from aᵀ(U_j U_jᵀ)a, which would lose half the digits.
    """
    weights, values = decomposition.by_key, decomposition.values_by_key  # (head, sequence · key, query or d_v)
    lengths = decomposition.state.new_empty(weights.shape[1:])
    buffer = decomposition.state.new_empty(_FEW, len(weights), weights.shape[2])
    for key, factors in enumerate(_factors(values, decomposition.weight).split(_FEW)):
        at = slice(key * _FEW, key * _FEW + len(factors))
        part = buffer[: len(factors), : factors.shape[1]]
        torch.bmm(factors, weights[:, at].transpose(0, 1), out=part)
        torch.sum(part.square_(), dim=1, out=lengths[at])
    shape = decomposition.state.shape[:-1]
    lengths = lengths.sqrt_().view(*shape[:-1], -1, shape[-1]).mT.contiguous()
    lengths = lengths if decomposition.scale is None else lengths.mul_(decomposition.scale)
    if decomposition.causal:
        lengths = lengths.tril_(decomposition.first_row)
    if not residual:
        return lengths
    own = decomposition.diagonal.norm(dim=-1)
    if decomposition.crossed:
        return torch.cat([lengths, own[..., None]], dim=-1)
    torch.diagonal(lengths, decomposition.first_row, dim1=-2, dim2=-1).copy_(own)
    return lengths


def _factors(values: Tensor, weight: Tensor) -> Tensor:
    """(head, key, d_v) and (head, d_v, d) → (key, ·, head): R with RᵀR = U Uᵀ for every key.

    float64: by QR, which squares nothing. float32: Cholesky of the Gram matrix, which is as good unless heads nearly
    cancel; keys where they might are worked on in float64, which is good to all of float32's digits whatever they do.
    """
    heads, keys, _ = values.shape
    if values.dtype == torch.float64:
        return torch.cat([torch.linalg.qr(u.permute(1, 2, 0), mode="r").R for _, u in _sources(values, weight)])
    gram = values.new_empty(keys, heads, heads)
    for at, sources in _sources(values, weight):
        by_key = sources.transpose(0, 1)
        torch.bmm(by_key, by_key.transpose(1, 2), out=gram[at])
    lengths = torch.diagonal(gram, dim1=1, dim2=2)
    factors: Tensor
    factors, info = torch.linalg.cholesky_ex(gram, upper=True)
    # A pivot is what a head adds to those before it: rounding is ~1e-6 of its whole length.
    pivots = torch.diagonal(factors, dim1=1, dim2=2).square()
    doubtful = (info != 0) | ~(pivots > _APART * lengths).all(-1)
    if bool(doubtful.any()):
        fine = _sources(values[:, doubtful].to(torch.float64), weight.to(torch.float64))
        factors[doubtful] = torch.cat([_fine_factor(u.transpose(0, 1)) for _, u in fine]).to(factors.dtype)
    return factors


def _sources(values: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some keys at a time, which ones and their U (head, key, d); the next ones are put in the same memory."""
    heads, keys, _ = values.shape
    memory = values.new_empty(heads * min(keys, _KEYS) * weight.shape[2])
    for key in range(0, keys, _KEYS):
        some = values[:, key : key + _KEYS]
        shape = (heads, some.shape[1], weight.shape[2])
        out = memory[: torch.Size(shape).numel()].view(shape)
        yield slice(key, key + some.shape[1]), torch.bmm(some, weight, out=out)


def _fine_factor(sources: Tensor) -> Tensor:
    """(key, head, d) in float64 → (key, head, head), heads that give the same vector, or none at all, included."""
    gram = torch.bmm(sources, sources.transpose(1, 2))
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(gram, upper=True)
    failed = info != 0
    if bool(failed.any()):
        values, vectors = torch.linalg.eigh(gram[failed])
        factor[failed] = (vectors * values.clamp(min=0).sqrt()[:, None]).transpose(1, 2)
    return factor
