"""Attention, contributions and rollout again, slowly: float64 and plain loops, from the model itself and a trace's tensors.

Nothing of the measures is imported. The model's own eager attention and hidden states say whether the trace is of what
it computes; the formulas of the papers say what the measures have to be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def model_attention(model: Any, inputs: dict[str, Tensor]) -> list[Tensor] | None:
    """[head, query, key] of every layer, by the model's own eager pass; None where it does not hand them out."""
    before = getattr(model.config, "_attn_implementation", None)
    try:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            output = model(**inputs, output_attentions=True, use_cache=False)
    except (ValueError, TypeError, KeyError):
        return None
    finally:
        if before is not None:
            model.set_attn_implementation(before)
    weights = getattr(output, "attentions", None)
    return None if not weights or any(w is None or w.dim() != 4 for w in weights) else [w[0].double() for w in weights]


def _norm(norm: Any, parts: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Every part of one position (source, d), and what belongs to none (d), through the norm of their sum."""
    whole = parts.sum(0) + bias
    centred = whole - whole.mean() if norm.centred else whole
    sigma = float((centred.square().mean() + norm.eps).sqrt())
    gain = torch.ones_like(whole) if norm.weight is None else norm.weight.double() + norm.offset
    shift = torch.zeros_like(whole) if norm.bias is None else norm.bias.double()

    def linear(x: Tensor) -> Tensor:
        return gain * (x - x.mean() if norm.centred else x)

    return torch.stack([linear(part) / sigma for part in parts]), linear(bias) / sigma + shift


def parts(layer: Any) -> tuple[Tensor, Tensor]:
    """T (query, key, d) and y (query, d) of one layer of a trace."""
    attention, values = layer.attention.double(), layer.values.double()
    weight, wiring, residual = layer.projection.weight.double(), layer.wiring, layer.block_input.double()
    heads, n, _ = attention.shape
    output_bias = torch.zeros_like(residual[0]) if layer.projection.bias is None else layer.projection.bias.double()
    rows, states = [], []
    for i in range(n):
        terms = torch.zeros(n, residual.shape[1], dtype=torch.float64)
        for j in range(n):
            for h in range(heads):
                terms[j] += attention[h, i, j] * (values[h, j] @ weight[h])
        bias = output_bias
        if wiring.branch_norm is not None:
            terms, bias = _norm(wiring.branch_norm, terms, bias)
        if wiring.branch_scale is not None:
            terms, bias = terms * wiring.branch_scale, bias * wiring.branch_scale
        carried = residual[i] if wiring.residual_scale is None else residual[i] * wiring.residual_scale
        terms[i] = terms[i] + carried + (layer._side[i].double() if wiring.kind == "parallel" else 0.0)
        if wiring.norm is not None:
            terms, bias = _norm(wiring.norm, terms, bias)
        rows.append(terms)
        states.append(terms.sum(0) + bias)
    return torch.stack(rows), torch.stack(states)


def alti(terms: Tensor, states: Tensor) -> Tensor:
    """c_ij = max(0, ‖y_i‖₁ − ‖y_i − T_ij‖₁), rows divided by their sums; a row of zeros is the token's own."""
    n = len(states)
    scores = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            scores[i, j] = max(0.0, float(states[i].abs().sum() - (states[i] - terms[i, j]).abs().sum()))
        total = scores[i].sum()
        scores[i] = scores[i] / total if total > 0 else torch.eye(n, dtype=torch.float64)[i]
    return scores


def norms(terms: Tensor) -> Tensor:
    """‖T_ij‖₂, rows divided by their sums."""
    lengths = torch.tensor([[float(part.square().sum().sqrt()) for part in row] for row in terms], dtype=torch.float64)
    return lengths / lengths.sum(1, keepdim=True)


def half_residual(attention: Tensor) -> Tensor:
    """C = ½ mean_h A + ½ I."""
    return 0.5 * sum(attention) / len(attention) + 0.5 * torch.eye(attention.shape[1], dtype=torch.float64)


def rolled_out(layers: list[Tensor]) -> list[Tensor]:
    """R_l = C_l R_{l−1}, R_0 = I, number by number."""
    products, last = [], torch.eye(len(layers[0]), dtype=torch.float64)
    for mixing in layers:
        product = torch.zeros_like(last)
        for i in range(len(last)):
            for j in range(len(last)):
                product[i, j] = sum(float(mixing[i, k]) * float(last[k, j]) for k in range(len(last)))
        products.append(product)
        last = product
    return products
