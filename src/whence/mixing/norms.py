"""Norm-based analysis: how long is each token's part?

Kobayashi et al., "Attention is Not Only a Weight" (EMNLP 2020): ‖Σ_h A^h_ij V^h_j W^h‖₂, attention alone;
"Incorporating Residual and Normalization Layers into Analysis of Masked Language Models" (EMNLP 2021): ‖T_ij‖₂.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whence.mixing.decomposition import Decomposition

_KEYS = 32  # keys worked on together: their vectors stay in the processor's cache
_APART = 1e-2  # a head is apart from those before it if this much of its squared length is


def part_norms(split: Decomposition, *, residual: bool = True) -> Tensor:
    """(query, source): ‖T_ij‖₂, with no (n, n, d) work.

    For a key j, ‖Σ_h a_h U^h_j‖ = ‖R_j a‖ with R_jᵀR_j = U_j U_jᵀ (head × head): the norm is taken from R_j a rather
    than from aᵀ(U_j U_jᵀ)a, which would lose half the digits.
    """
    weights, values = split.by_key, split.values_by_key  # (head, sequence · key, query or d_v)
    lengths = split.state.new_empty(weights.shape[1:])
    buffer = split.state.new_empty(_KEYS, len(weights), weights.shape[2])
    for key in range(0, weights.shape[1], _KEYS):
        at = slice(key, key + _KEYS)
        factors = _factor(torch.bmm(values[:, at], split.weight))  # (key, head, head)
        part = buffer[: len(factors), : factors.shape[1]]
        torch.bmm(factors, weights[:, at].transpose(0, 1), out=part)
        torch.sum(part.square_(), dim=1, out=lengths[at])
    shape = split.state.shape[:-1]
    lengths = lengths.sqrt_().view(*shape[:-1], -1, shape[-1]).transpose(-1, -2)
    lengths = lengths.contiguous() if split.scale is None else lengths * split.scale
    if split.causal:
        lengths = lengths.tril_()
    if not residual:
        return lengths
    own = split.diagonal.norm(dim=-1)
    if split.crossed:
        return torch.cat([lengths, own[..., None]], dim=-1)
    torch.diagonal(lengths, dim1=-2, dim2=-1).copy_(own)
    return lengths


def _factor(sources: Tensor) -> Tensor:
    """(head, key, d) → (key, ·, head) R with RᵀR = U Uᵀ.

    float64: by QR, which squares nothing. float32: Cholesky of the Gram matrix, which is as good unless heads nearly
    cancel; keys where they might are worked on in float64, which is good to all of float32's digits whatever they do.
    """
    if sources.dtype == torch.float64:
        upper: Tensor = torch.linalg.qr(sources.permute(1, 2, 0), mode="r").R
        return upper
    by_key = sources.transpose(0, 1)
    gram = torch.bmm(by_key, by_key.transpose(1, 2))
    lengths = torch.diagonal(gram, dim1=1, dim2=2)
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(gram, upper=True)
    # A pivot is what a head adds to those before it: rounding is ~1e-6 of its whole length.
    pivots = torch.diagonal(factor, dim1=1, dim2=2).square()
    doubtful = (info != 0) | ~(pivots > _APART * lengths).all(-1)
    if bool(doubtful.any()):
        factor[doubtful] = _fine_factor(by_key[doubtful].to(torch.float64)).to(factor.dtype)
    return factor


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
