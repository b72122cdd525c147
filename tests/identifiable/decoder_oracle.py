"""The identifiable decoder by loops over heads and rows, in float64 and complex numbers, straight from the formulas.

Nothing of the model's own code is used, only its weights. Each row comes with what Theorem A speaks about: φ_j (what the
query is multiplied with), t_j (what is added up), b_j (what is added to the score).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares


@dataclass(frozen=True)
class Row:
    """One attention row over its visible keys; `sink`: its last entry is a sink with value 0 and a fixed logit."""

    weights: np.ndarray  # (m,)
    phi: np.ndarray  # (m, k)
    t: np.ndarray  # (m, v)
    logits_fixed: np.ndarray  # (m,)
    query: np.ndarray  # (k,), scaled


def turn(x: np.ndarray, angle: float, size: int, theta: float = 10000.0) -> np.ndarray:
    """Turn the leading `size` numbers of x (…, d), taken as pairs, by angle · theta^(−2p/size)."""
    pairs = x[..., :size:2] + 1j * x[..., 1:size:2]
    pairs = pairs * np.exp(1j * angle * theta ** (-np.arange(0, size, 2)[: pairs.shape[-1]] / size))
    out = x.copy()
    out[..., :size:2], out[..., 1:size:2] = pairs.real, pairs.imag
    return out


def rms(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def slopes(heads: int) -> list[float]:
    assert heads & (heads - 1) == 0
    return [2 ** (-8 * (h + 1) / heads) for h in range(heads)]


def layer_rows(model: Any, number: int, x: np.ndarray, first: int = 0, **forced: Any) -> list[list[Row]]:
    """[head][row from `first` on] of one layer, given its normed input x (n, d).

    `forced`: fields of the config set against its checks.
    """
    config = model.config
    field = {name: getattr(config, name) for name in ("keys", "rotate_values", "key_norm", "softcap")} | forced
    w = {k.split(f"layers.{number}.attention.")[-1]: p.detach().double().numpy() for k, p in model.state_dict().items()
         if f"layers.{number}.attention." in k}  # fmt: skip
    heads, groups, k, v = config.num_attention_heads, config.num_key_value_heads, config.key_size, config.value_size
    rope = config.position_embedding_type == "rope"
    turned = config.rotary_size(v)
    key_turned = config.rotary_size(k) if field["keys"] == "free" else turned
    rows = []
    for h in range(heads):
        g = h // (heads // groups)
        part = slice(g * v, (g + 1) * v)
        u = x @ w["value.weight"][part].T + (w["value.bias"][part] if config.attention_bias else 0)
        q = x @ w["query.weight"][h * k : (h + 1) * k].T
        q = q + (w["query.bias"][h * k : (h + 1) * k] if config.attention_bias else 0)
        u = rms(u, w["value_norm.weight"], config.rms_norm_eps) if config.shared_norm else u
        q = rms(q, w["query_norm.weight"], config.rms_norm_eps) if config.query_norm else q
        if field["keys"] == "free":
            key = x @ w["key.weight"][g * k : (g + 1) * k].T
            key = key + (w["key.bias"][g * k : (g + 1) * k] if config.attention_bias else 0)
        elif field["keys"] == "shared":
            key = u[:, :k]
        else:
            kept = min(turned, k)
            m = w["mixing_pairs"][g][:, 0] + 1j * w["mixing_pairs"][g][:, 1]
            pairs = (u[:, :kept:2] + 1j * u[:, 1:kept:2]) * m
            key = np.concatenate(
                [np.stack([pairs.real, pairs.imag], -1).reshape(len(u), -1), u[:, turned:] @ w["mixing"][g]], 1
            )
        if field["key_norm"]:
            key = rms(key, w.get("key_norm.weight", np.ones(k)), config.rms_norm_eps)
        head = []
        for i in range(first, len(x)):
            phi = np.stack([turn(key[j], j - i, key_turned) if rope else key[j] for j in range(i + 1)])
            t = np.stack([turn(u[j], j - i, turned) if rope and field["rotate_values"] else u[j] for j in range(i + 1)])
            b = np.zeros(i + 1)
            if config.position_embedding_type == "alibi":
                b = -slopes(heads)[h] * (i - np.arange(i + 1.0))
            if config.position_embedding_type == "bias":
                distance = np.minimum(i - np.arange(i + 1), config.relative_distance)
                b = w["distance_bias.weight"][distance, h]
            query = q[i] / np.sqrt(k)
            scores = phi @ query
            if field["softcap"]:
                scores = field["softcap"] * np.tanh(scores / field["softcap"])
            if config.sink == "fixed":
                phi, t = np.vstack([phi, np.zeros(k)]), np.vstack([t, np.zeros(v)])
                b, scores = np.append(b, w["sink"][h]), np.append(scores, 0.0)
            e = np.exp(scores + b - (scores + b).max())
            head.append(Row(e / e.sum(), phi, t, b, query))
        rows.append(head)
    return rows


def logits(model: Any, ids: torch.Tensor) -> np.ndarray:
    """(n, vocabulary) of one text."""
    w = {k: p.detach().double().numpy() for k, p in model.state_dict().items()}
    config = model.config
    x = w["model.embed_tokens.weight"][ids[0].numpy()]
    for number in range(config.num_hidden_layers):
        at = f"model.layers.{number}."
        rows = layer_rows(model, number, rms(x, w[at + "attention_norm.weight"], config.rms_norm_eps))
        z = np.concatenate([np.stack([row.weights @ row.t for row in head]) for head in rows], -1)
        bias = w[at + "attention.output.bias"] if config.attention_bias else 0
        x = x + z @ w[at + "attention.output.weight"].T + bias
        y = rms(x, w[at + "feed_forward_norm.weight"], config.rms_norm_eps)
        y = torch.nn.functional.gelu(torch.tensor(y @ w[at + "up.weight"].T + w[at + "up.bias"])).numpy()
        x = x + y @ w[at + "down.weight"].T + w[at + "down.bias"]
    x = rms(x, w["model.final_norm.weight"], config.rms_norm_eps)
    return x @ w["lm_head.weight"].T


def second_row(row: Row, starts: int = 8, seed: int = 0, softcap: float | None = None) -> float | None:
    """The total variation of another row that some query makes with the same output; None where none was found.

    Plain multi-start least squares on the query itself; it knows of no theorem.
    """
    draw = np.random.default_rng(seed)
    target = row.weights @ row.t

    def made(query: np.ndarray) -> np.ndarray:
        scores = row.phi @ query
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        e = np.exp(scores + row.logits_fixed - (scores + row.logits_fixed).max())
        return e / e.sum()

    def slope(query: np.ndarray) -> np.ndarray:
        a = made(query)
        phi = row.phi if not softcap else row.phi * (1 - np.tanh(row.phi @ query / softcap) ** 2)[:, None]
        return row.t.T @ (a[:, None] * phi) - np.outer(row.t.T @ a, a @ phi)

    spread = np.abs(row.phi @ row.query).max() + 1.0
    for _ in range(starts):
        guess = draw.normal(size=row.query.shape)
        guess = row.query + guess / np.abs(row.phi @ guess).max() * draw.uniform(0.5, 3) * spread
        found = least_squares(lambda q: made(q) @ row.t - target, guess, slope, xtol=1e-15, ftol=1e-15, gtol=1e-15,
                              max_nfev=100, method="trf")  # fmt: skip
        if np.linalg.norm(found.fun) < 1e-11 * np.linalg.norm(row.t, 2):
            distance = 0.5 * float(np.abs(made(found.x) - row.weights).sum())
            if distance > 1e-4:
                return distance
    return None
