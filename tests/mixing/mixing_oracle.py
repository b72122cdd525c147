"""The definitions written out slowly, in float64, one vector at a time."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn


def _through(norm: Any, parts: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The parts (query, key, d) and the bias (query, d) of a sum, through y = gain ⊙ (x − mean x) / σ + β at the sum."""
    total = parts.sum(1) + bias
    gain = torch.ones_like(total[0]) if norm.weight is None else norm.weight.to(total) + norm.offset
    if norm.centred:
        parts, bias, total = (x - x.mean(-1, keepdim=True) for x in (parts, bias, total))
    sigma = (total.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    bias = gain * bias / sigma
    return gain * parts / sigma[:, None], bias if norm.bias is None else bias + norm.bias.to(total)


def head_expanded(layer: Any) -> tuple[Tensor, Tensor, Tensor]:
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
        parts, bias = _through(layer.wiring.branch_norm, parts, bias)
    factor: Any = 1.0 if layer.wiring.branch_scale is None else layer.wiring.branch_scale
    parts, bias = parts * factor, bias * factor
    residual: Any = 1.0 if layer.wiring.residual_scale is None else layer.wiring.residual_scale
    own = layer.block_input * residual
    if layer.wiring.kind == "parallel":
        own = own + layer._side
    for i in range(n):
        parts[i, i] += own[i]
    if layer.wiring.norm is not None:
        parts, bias = _through(layer.wiring.norm, parts, bias)
    return parts, bias, parts.sum(1) + bias


def alti(parts: Tensor, y: Tensor, order: float = 1) -> Tensor:
    n, m = parts.shape[:2]
    closer = torch.zeros(n, m, dtype=parts.dtype)
    for i in range(n):
        for j in range(m):
            closer[i, j] = torch.linalg.vector_norm(y[i], order) - torch.linalg.vector_norm(y[i] - parts[i, j], order)
    closer = closer.clamp(min=0)
    return closer / closer.sum(-1, keepdim=True)


def blocks_of(model: nn.Module, depth: int) -> list[nn.Module]:
    """The model's blocks: its outermost list of `depth` modules."""
    return list(next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth))


def backward(trace: Any, rows: list[int] | None = None, layers: list[int] | None = None) -> Tensor:
    """‖∂e_j/∂x_i‖_F (layer, hidden, input) by one backward pass per number of every state.

    x is put in where the first block reads its states, and a block's output is taken from its own module, by plain hooks.
    """
    model, x = trace.model.model, trace.of().layers[0].block_input.clone().requires_grad_()
    blocks = blocks_of(model, len(trace.of()))
    found: dict[int, Tensor] = {}

    def start(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        name = next((k for k, v in kwargs.items() if k == "hidden_states"), None)
        given = args[0] if name is None else kwargs[name]
        put = x[None] if given.shape[0] == 1 else x[:, None]  # XLNet has (token, sequence, d)
        return ((put, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: put})

    def end(number: int) -> Any:
        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            state = output[0] if isinstance(output, tuple) else output
            found[number] = state if state.shape[0] == 1 else state.transpose(0, 1)

        return note

    hooks = [blocks[0].register_forward_pre_hook(start, with_kwargs=True)]
    hooks += [block.register_forward_hook(end(i)) for i, block in enumerate(blocks)]
    takes = inspect.signature(model.forward).parameters
    try:
        model(**{name: value for name, value in trace.inputs.items() if name in takes})
    finally:
        for hook in hooks:
            hook.remove()
    n, width = x.shape
    layers = list(range(len(blocks))) if layers is None else layers
    rows = list(range(n)) if rows is None else rows
    out = torch.zeros(len(layers), len(rows), n, dtype=x.dtype)
    for a, layer in enumerate(layers):
        for b, j in enumerate(rows):
            for k in range(width):
                (slope,) = torch.autograd.grad(found[layer][0, j, k], x, retain_graph=True)
                out[a, b] += slope.square().sum(-1)
    return out.sqrt()
