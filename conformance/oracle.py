"""Attention, contributions and rollout again, slowly: float64, row by row, from the model itself and a trace's tensors.

Nothing of the measures is imported. The model's own eager attention and hidden states say whether the trace is of what
it computes; the formulas of the papers say what the measures have to be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ModelOutputs:
    """What the model's own eager pass hands out, by stack; nothing where it hands out nothing."""

    output: Any

    def attention(self, stack: str, stacks: int) -> list[Tensor] | None:
        """[head, query, key] of every layer of that stack."""
        return self._layers("attentions" if stacks == 1 else f"{stack}_attentions", 4)

    def states(self, stack: str, stacks: int) -> list[Tensor] | None:
        """[token, d] before the first layer and after each."""
        return self._layers("hidden_states" if stacks == 1 else f"{stack}_hidden_states", 3)

    def _layers(self, field: str, dimensions: int) -> list[Tensor] | None:
        tensors = getattr(self.output, field, None)
        if not tensors or any(t is None or t.dim() != dimensions or len(t) != 1 for t in tensors):
            return None
        return [t[0].double() for t in tensors]


def model_outputs(model: Any, inputs: dict[str, Tensor]) -> ModelOutputs:
    """The model's own eager pass with everything that it hands out; its implementation is put back."""
    before = getattr(model.config, "_attn_implementation", None)
    try:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            return ModelOutputs(model(**inputs, output_attentions=True, output_hidden_states=True, use_cache=False))
    except (ValueError, TypeError, KeyError):
        return ModelOutputs(None)
    finally:
        if before is not None:
            model.set_attn_implementation(before)


def as_shown(layer: Any, theirs: Tensor) -> Tensor:
    """A layer's attention as the model shows it: some scale by the sink's share only after the softmax they hand out.

    What the sink takes is then part of the head outputs, and judged with the states.
    """
    ours: Tensor = layer.attention.double()[:, -theirs.shape[1] :, -theirs.shape[2] :]  # CpmAnt hides its prompt
    shown_before_sink = layer.sink is not None and bool((theirs.sum(-1) - 1).abs().max() <= 1e-4)
    return ours / (1 - layer.sink.double())[..., None] if shown_before_sink else ours


def identifiability(layer: Any) -> dict[str, Tensor]:
    """Null share, r and ranks [head, query] of a layer, each row by an SVD of the values that it sees."""
    attention, values = layer.attention_and_sink.double(), layer.values.double()
    heads, n, _ = attention.shape
    if layer.sink is not None:
        values = torch.cat([values, torch.zeros_like(values[:, :1])], 1)
    result = {name: torch.zeros(heads, n, dtype=torch.float64) for name in ("null share", "r", "rank", "simplex_rank")}
    for h in range(heads):
        for q in range(n):
            visible = layer.visible_of(h)
            seen = torch.ones(attention.shape[-1], dtype=torch.bool)
            if visible is not None:
                seen[: visible.shape[-1]] = visible[q if len(visible) > 1 else 0]
            row, body = attention[h, q, seen], values[h, seen]
            bases = [_basis(body, body), _basis(body - body.mean(0), body)]
            effective = bases[0] @ (bases[0].T @ row)
            result["null share"][h, q] = (row - effective).abs().sum() / row.abs().sum()
            pair = torch.stack([row, effective])
            varies = bool((pair.amax(1) - pair.amin(1) > 1e-9).all())  # a correlation with a constant is none
            result["r"][h, q] = torch.corrcoef(pair)[0, 1] if varies else float("nan")
            result["rank"][h, q], result["simplex_rank"][h, q] = bases[0].shape[1], bases[1].shape[1] + 1
    return result


def _basis(body: Tensor, values: Tensor) -> Tensor:
    """An orthonormal basis of the columns, ranks cut at float32's eps of the values' own size."""
    tolerance = torch.linalg.matrix_norm(values, ord=2) * max(values.shape) * torch.finfo(torch.float32).eps
    u, s, _ = torch.linalg.svd(body, full_matrices=False)
    return u[:, s > tolerance]


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
        for h in range(heads):
            terms += attention[h, i, :, None] * (values[h] @ weight[h])
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
        scores[i] = (states[i].abs().sum() - (states[i] - terms[i]).abs().sum(-1)).clamp(min=0)
        total = scores[i].sum()
        scores[i] = scores[i] / total if total > 0 else torch.eye(n, dtype=torch.float64)[i]
    return scores


def norms(terms: Tensor) -> Tensor:
    """‖T_ij‖₂, rows divided by their sums."""
    lengths = terms.square().sum(-1).sqrt()
    return lengths / lengths.sum(1, keepdim=True)


def half_residual(attention: Tensor) -> Tensor:
    """C = ½ mean_h A + ½ I."""
    return 0.5 * sum(attention) / len(attention) + 0.5 * torch.eye(attention.shape[1], dtype=torch.float64)


def rolled_out(layers: list[Tensor]) -> list[Tensor]:
    """R_l = C_l R_{l−1}, R_0 = I."""
    products = [layers[0]]
    for mixing in layers[1:]:
        products.append(mixing @ products[-1])
    return products
