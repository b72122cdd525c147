"""The definitions written out slowly, in float64, one vector at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whence.mixing.jacobian.forward_mode import _keeping, _then
from whence.reading.capture.attach import accepted
from whence.reading.rerun.replay import block_handles, touching
from whence.reading.trace import Layer, Trace
from whence.reading.wiring.proof import proof_of


def head_expanded(layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """T (query, key, d), bias (query, d) and y (query, d) of one layer, head by head from the formula."""
    attention, values, weight = layer.attention, layer.values, layer.projection.weight.to(layer.values)
    n, heads, width = attention.shape[1], attention.shape[0], weight.shape[-1]
    parts = torch.zeros(n, attention.shape[2], width, dtype=attention.dtype)
    for h in range(heads):
        for j in range(attention.shape[2]):
            parts[:, j] += attention[h, :, j, None] * (values[h, j] @ weight[h])
    bias = layer.projection.bias
    bias = torch.zeros(n, width, dtype=attention.dtype) if bias is None else bias.expand(n, width)
    if layer.wiring.branch_norm is not None:
        norm = layer.wiring.branch_norm
        sigma = norm.scale(parts.sum(1) + bias)
        parts, bias = norm.linear(parts) / sigma[:, None], norm.linear(bias) / sigma
        bias = bias if norm.bias is None else bias + norm.bias
    factor: Any = 1.0 if layer.wiring.branch_scale is None else layer.wiring.branch_scale
    parts, bias = parts * factor, bias * factor
    residual: Any = 1.0 if layer.wiring.residual_scale is None else layer.wiring.residual_scale
    own = layer.block_input * residual
    if layer.wiring.kind == "parallel":
        own = own + layer._side
    for i in range(n):
        parts[i, i] += own[i]
    if layer.wiring.norm is not None:
        norm = layer.wiring.norm
        sigma = norm.scale(parts.sum(1) + bias)
        parts, bias = norm.linear(parts) / sigma[:, None], norm.linear(bias) / sigma
        bias = bias if norm.bias is None else bias + norm.bias
    return parts, bias, parts.sum(1) + bias


def alti(parts: Tensor, y: Tensor, order: float = 1) -> Tensor:
    n, m = parts.shape[:2]
    closer = torch.zeros(n, m, dtype=parts.dtype)
    for i in range(n):
        for j in range(m):
            closer[i, j] = torch.linalg.vector_norm(y[i], order) - torch.linalg.vector_norm(y[i] - parts[i, j], order)
    closer = closer.clamp(min=0)
    return closer / closer.sum(-1, keepdim=True)


def backward(trace: Trace, rows: list[int] | None = None, layers: list[int] | None = None) -> Tensor:
    """‖∂e_j/∂x_i‖_F (layer, hidden, input) by one backward pass per number of every state."""
    stack, model = trace.of(), trace.model
    assert model is not None
    sites = proof_of(model.model, dict(trace.inputs)).of(stack.name)
    x = stack.layers[0].block_input.clone().requires_grad_()
    found: dict[int, Tensor] = {}
    changes: dict[Any, Any] = {}
    for i, site in enumerate(sites):
        end = block_handles(site)[1]
        changes[end] = _then(changes.get(end), _keeping(found, i))
    start = block_handles(sites[0])[0]
    changes[start] = _then(changes.get(start), lambda t: x[None])
    with touching(model.model, changes):
        model.model(**accepted(model.model, trace.inputs))
    n, width = x.shape
    layers = list(range(len(sites))) if layers is None else layers
    rows = list(range(n)) if rows is None else rows
    out = torch.zeros(len(layers), len(rows), n, dtype=x.dtype)
    for a, layer in enumerate(layers):
        for b, j in enumerate(rows):
            for k in range(width):
                (slope,) = torch.autograd.grad(found[layer][0, j, k], x, retain_graph=True)
                out[a, b] += slope.square().sum(-1)
    return out.sqrt()
