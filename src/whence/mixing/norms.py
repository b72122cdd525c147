"""Norm-based analysis: how long is each token's part?

Kobayashi et al., "Attention is Not Only a Weight" (EMNLP 2020): ‖Σ_h A^h_ij V^h_j W^h‖₂, attention alone;
"Incorporating Residual and Normalization Layers into Analysis of Masked Language Models" (EMNLP 2021): ‖T_ij‖₂.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whence.mixing.decomposition import Decomposition

_KEYS = 32  # keys worked on together: their vectors stay in the processor's cache


def part_norms(split: Decomposition, *, residual: bool = True) -> Tensor:
    """(query, source): ‖T_ij‖₂, with no (n, n, d) work.

    For a key j, ‖Σ_h a_h U^h_j‖ = ‖R_j a‖ with R_jᵀR_j = U_j U_jᵀ (head × head). The factor is taken from a float64
    Gram matrix, and the norm from R_j a rather than from aᵀ(U_j U_jᵀ)a, which would lose half the digits.
    """
    weights, sources = split.weights_by_key, split.sources_by_key
    lengths = split.state.new_empty(weights.shape[:2])
    for key in range(0, len(weights), _KEYS):
        at = slice(key, key + _KEYS)
        factors = _gram_factor(sources[at]).to(sources.dtype)  # (key, head, head)
        torch.sum(torch.bmm(weights[at], factors).square_(), dim=-1, out=lengths[at])
    lengths = lengths.sqrt_().T.contiguous()
    lengths = lengths if split.scale is None else lengths * split.scale
    if split.causal:
        lengths = lengths.tril_()
    if not residual:
        return lengths
    own = split.diagonal().norm(dim=-1)
    if split.crossed:
        return torch.cat([lengths, own[:, None]], dim=1)
    lengths.diagonal().copy_(own)
    return lengths


def _gram_factor(sources: Tensor) -> Tensor:
    """(key, head, d) → (key, head, head) F with F Fᵀ = U Uᵀ."""
    wide = sources.to(torch.float64)
    gram = torch.bmm(wide, wide.transpose(1, 2))
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(gram)
    failed = info != 0  # heads that give the same vector, or none at all
    if bool(failed.any()):
        values, vectors = torch.linalg.eigh(gram[failed])
        factor[failed] = vectors * values.clamp(min=0).sqrt()[:, None]
    return factor
