"""torch's `multi_head_attention_forward`, written out (nn.MultiheadAttention, nn.TransformerEncoder, WavLM)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _width: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,  # noqa: ARG001 (a hint beside attn_mask, which says it all)
) -> tuple[Tensor, Tensor | None] | None:
    """The same outputs, as (query, batch, d), from operations that can be watched; None for the rarer options.

    softmax(q kᵀ / √d_k + mask) v per head, the heads side by side through the output projection.
    """
    rare = (bias_k, bias_v, static_k, static_v)
    if add_zero_attn or any(t is not None for t in rare) or query.dim() != 3 or (dropout_p and training):
        return None
    weights: tuple[Tensor | None, ...] = (q_proj_weight, k_proj_weight, v_proj_weight)
    if not use_separate_proj_weight and in_proj_weight is not None:
        weights = in_proj_weight.chunk(3)
    biases: tuple[Tensor | None, ...] = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    n_query, batch, width = query.shape

    def heads(states: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None
        projected = functional.linear(states, weight, bias)
        return projected.view(states.shape[0], batch, num_heads, -1).permute(1, 2, 0, 3)

    q, k, v = (heads(s, w, b) for s, w, b in zip((query, key, value), weights, biases, strict=True))
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if attn_mask is not None:
        added = _additive(attn_mask, scores)
        scores = scores + (added if added.dim() == 2 else added.view(batch, num_heads, *added.shape[-2:]))
    if key_padding_mask is not None:
        scores = scores + _additive(key_padding_mask, scores)[:, None, None]
    attention = torch.softmax(scores, dim=-1)
    output = (attention @ v).permute(2, 0, 1, 3).reshape(n_query, batch, width)
    output = functional.linear(output, out_proj_weight, out_proj_bias)
    if not need_weights:
        return output, None
    return output, attention.mean(dim=1) if average_attn_weights else attention


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as it is added to the scores; boolean ones close the door where they are True."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)
