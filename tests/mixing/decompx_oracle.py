"""DecompX written out from its paper, in float64, one vector at a time, from the model's own weights by their names.

Modarressi et al. (ACL 2023): the state of token i is Σ_k x_{i⇐k}, at the start x_{i⇐k} = δ_ik x_i. Then in each layer

    attention   z_{i⇐k} = x_{i⇐k} + Σ_h Σ_j α^h_ij x_{j⇐k} W_v^h W_o^h + ω_k (b_v W_o + b_o)
    LayerNorm   g_{i⇐k} = γ ⊙ (z_{i⇐k} − mean z_{i⇐k}) / σ_i + ω_k β     σ_i of the whole Σ_k z_{i⇐k}
    FFN         f_{i⇐k} = θ_i ⊙ (g_{i⇐k} W_1 + ω_k b_1) W_2 + ω_k b_2    θ_i = act(u_i) / u_i, u_i the whole input of act

with every bias b shared out by ω_k = |b · vector_k| / Σ_k' |b · vector_k'| ("absdot"), the vectors being what it is added to:
for b_v W_o + b_o, as in the authors' code, attention plus residual.
Nothing here is taken from whence, attention included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Vectors = list[list[Tensor]]  # [token i][source k], each (d,)


@dataclass(frozen=True)
class Block:
    """Weights of one block as (in, out) matrices; norms as (weight, bias, eps)."""

    query: tuple[Tensor, Tensor]
    key: tuple[Tensor, Tensor]
    value: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    first: tuple[Tensor, Tensor]
    second: tuple[Tensor, Tensor]
    norms: tuple[tuple[Tensor, Tensor, float], tuple[Tensor, Tensor, float]]
    act: Callable[[Tensor], Tensor]
    heads: int
    before: bool  # norms before attention and feed-forward layer (GPT-2), or after the sums (BERT)


def lengths(x: Tensor, blocks: list[Block], causal: bool) -> Tensor:
    """(layer, i, k): ‖x_{i⇐k}‖₂ after every block, rows divided by their sums; x (token, d) the embeddings."""
    n = len(x)
    parts: Vectors = [[x[i] if i == k else torch.zeros_like(x[i]) for k in range(n)] for i in range(n)]
    rows = []
    for block in blocks:
        parts = _block(parts, block, causal)
        found = torch.stack([torch.stack([v.square().sum().sqrt() for v in vectors]) for vectors in parts])
        rows.append(found / found.sum(-1, keepdim=True))
    return torch.stack(rows)


def _block(parts: Vectors, block: Block, causal: bool) -> Vectors:
    one, two = block.norms
    read = [_norm(v, one) for v in parts] if block.before else parts
    always = block.value[1] @ block.out[0] + block.out[1]
    summed = [_add(a, b) for a, b in zip(parts, _attention(read, block, causal), strict=True)]
    summed = [_shared_out(vectors, always) for vectors in summed]
    state = summed if block.before else [_norm(v, one) for v in summed]
    read = [_norm(v, two) for v in state] if block.before else state
    summed = [_add(a, _feedforward(b, block)) for a, b in zip(state, read, strict=True)]
    return summed if block.before else [_norm(v, two) for v in summed]


def _add(one: list[Tensor], other: list[Tensor]) -> list[Tensor]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _shared_out(vectors: list[Tensor], bias: Tensor) -> list[Tensor]:
    dots = [abs(float(v @ bias)) for v in vectors]
    return [v + dot / sum(dots) * bias for v, dot in zip(vectors, dots, strict=True)]


def _norm(vectors: list[Tensor], norm: tuple[Tensor, Tensor, float]) -> list[Tensor]:
    weight, bias, eps = norm
    whole = sum(vectors[1:], vectors[0])
    sigma = math.sqrt(float((whole - whole.mean()).square().mean()) + eps)
    return _shared_out([weight * (v - v.mean()) / sigma for v in vectors], bias)


def _attention(parts: Vectors, block: Block, causal: bool) -> Vectors:
    n = len(parts)
    states = torch.stack([sum(vectors[1:], vectors[0]) for vectors in parts])
    queries, keys = (states @ w + b for w, b in (block.query, block.key))
    size = queries.shape[1] // block.heads
    values = [[v @ block.value[0] for v in vectors] for vectors in parts]
    made = []
    for i in range(n):
        seen = [j for j in range(n) if j <= i or not causal]
        gathered = [torch.zeros_like(parts[i][0]) for _ in range(n)]
        for h in range(block.heads):
            at = slice(h * size, (h + 1) * size)
            scores = torch.stack([queries[i, at] @ keys[j, at] / math.sqrt(size) for j in seen])
            weights = torch.softmax(scores, dim=0)
            for weight, j in zip(weights, seen, strict=True):
                for k in range(n):
                    gathered[k] = gathered[k] + weight * (values[j][k][at] @ block.out[0][at])
        made.append(gathered)
    return made


def _feedforward(vectors: list[Tensor], block: Block) -> list[Tensor]:
    whole = sum(vectors[1:], vectors[0])
    before = whole @ block.first[0] + block.first[1]
    theta = block.act(before) / before
    inner = _shared_out([v @ block.first[0] for v in vectors], block.first[1])
    return _shared_out([(theta * v) @ block.second[0] for v in inner], block.second[1])


# -- the weights, by their names -----------------------------------------------------------------------------------


def bert(body: Any) -> list[Block]:
    """Of a transformers BertModel."""

    def linear(module: Any) -> tuple[Tensor, Tensor]:
        return module.weight.detach().T, module.bias.detach()

    def norm(module: Any) -> tuple[Tensor, Tensor, float]:
        return module.weight.detach(), module.bias.detach(), module.eps

    return [
        Block(
            *(linear(getattr(layer.attention.self, name)) for name in ("query", "key", "value")),
            linear(layer.attention.output.dense),
            linear(layer.intermediate.dense),
            linear(layer.output.dense),
            (norm(layer.attention.output.LayerNorm), norm(layer.output.LayerNorm)),
            lambda u: u * 0.5 * (1 + torch.erf(u / math.sqrt(2))),
            body.config.num_attention_heads,
            before=False,
        )
        for layer in body.encoder.layer
    ]


def gpt2(body: Any) -> list[Block]:
    """Of a transformers GPT2Model, whose matrices are (in, out) already."""

    def norm(module: Any) -> tuple[Tensor, Tensor, float]:
        return module.weight.detach(), module.bias.detach(), module.eps

    blocks = []
    for layer in body.h:
        weights = layer.attn.c_attn.weight.detach().chunk(3, dim=1)
        biases = layer.attn.c_attn.bias.detach().chunk(3)
        blocks.append(
            Block(
                *zip(weights, biases, strict=True),
                *((m.weight.detach(), m.bias.detach()) for m in (layer.attn.c_proj, layer.mlp.c_fc, layer.mlp.c_proj)),
                (norm(layer.ln_1), norm(layer.ln_2)),
                lambda u: 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))),
                body.config.n_head,
                before=True,
            )
        )
    return blocks
