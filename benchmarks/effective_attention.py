"""Effective attention against the textbook, side by side in one run, on one thread.

    python benchmarks/effective_attention.py [--lengths 64 128 256 512] [--causal | --full] [--random]

Baselines: a full SVD of T = VW head by head; one batched full SVD of V; for causal attention a thin SVD of the
visible values for every row (timed on a sample of rows, scaled up; the sample is stated). The tensors are those of
MiniLM (72 heads of 32, full attention) and SmolLM2 (270 heads of 64 on 90 key-value heads, causal) on real prose; with
--random, random ones shaped like MiniLM. Also: identifiability(trace) against the eager forward pass.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from _real import tensors
from torch import Tensor

import whence
from whence.core.attention.effective_attention import effective_attention


def random_tensors(n: int, *, heads: int = 72, d_v: int = 32, width: int = 384, seed: int = 0) -> dict[str, Tensor]:
    """Attention, values and output matrices of MiniLM's shapes; a softmax of sharp random logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(heads, n, n, generator=generator)
    return {
        "logits": logits,
        "attention": torch.softmax(logits, -1),
        "values": torch.randn(heads, n, d_v, generator=generator),
        "output": torch.randn(heads, d_v, width, generator=generator) / d_v**0.5,
    }


def timed(run: Callable[[], Tensor], repeats: int) -> tuple[float, Tensor]:
    """Best CPU time of `repeats` runs in ms (one thread), after one to warm up, and the result."""
    result = run()
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        result = run()
        best = min(best, time.process_time() - start)
    return 1e3 * best, result


def svd_of_t(attention: Tensor, values: Tensor, output: Tensor) -> Tensor:
    """The paper's definition: null space of T = VW by a full SVD, one head at a time."""
    rows = []
    for a, t in zip(attention, values @ output, strict=True):
        u, s, _ = torch.linalg.svd(t)
        rank = int((s > s[0] * max(t.shape) * torch.finfo(t.dtype).eps).sum())
        null = u[:, rank:]
        rows.append(a - (a @ null) @ null.T)
    return torch.stack(rows)


def full_svd_of_v(attention: Tensor, values: Tensor) -> Tensor:
    """The usual shortcut: one batched full SVD of V, rank tolerance per head."""
    u, s, _ = torch.linalg.svd(values, full_matrices=True)
    rank = (s > s[..., :1] * max(values.shape[-2:]) * torch.finfo(s.dtype).eps).sum(-1, keepdim=True)
    null = u * (torch.arange(u.shape[-1]) >= rank).unsqueeze(-2)
    return attention - (attention @ null) @ null.mT


def causal_by_row(attention: Tensor, values: Tensor, rows: Tensor) -> Tensor:
    """Causal textbook: a thin SVD of every row's visible values; only the rows asked for."""
    result = torch.zeros_like(attention)
    for h in range(len(attention)):
        for i in rows.tolist():
            v = values[h, : i + 1]
            u, s, _ = torch.linalg.svd(v, full_matrices=False)
            u = u[:, s > s[0] * max(v.shape) * torch.finfo(s.dtype).eps]
            result[h, i, : i + 1] = (attention[h, i, : i + 1] @ u) @ u.T
    return result


def compare_full(tensors: dict[str, Any], repeats: int) -> None:
    attention, values, output = tensors["attention"], tensors["values"], tensors["output"]
    n = attention.shape[-1]
    outputs = attention @ values
    slow, _ = timed(lambda: svd_of_t(attention, values, output), 1)
    full, _ = timed(lambda: full_svd_of_v(attention, values), max(1, repeats // 2))
    plain, ours = timed(lambda: effective_attention(attention, values), repeats)
    given, from_outputs = timed(lambda: effective_attention(attention, values, outputs=outputs), repeats)
    simplex, _ = timed(lambda: effective_attention(attention, values, constraint="simplex"), repeats)
    exact = effective_attention(attention.double(), values.double())
    error = max(float((x - exact).abs().max()) for x in (ours, from_outputs))
    forward, _ = timed(tensors["forward"], repeats) if "forward" in tensors else (float("nan"), None)
    print(
        f"full    n={n:4d}  SVD of T {slow:8.1f}  full SVD of V {full:7.1f}  ours {plain:6.2f}"
        f"  ours, C given {given:6.2f}  simplex {simplex:6.2f} ms"
        f"   {slow / plain:6.1f}x  {full / plain:5.1f}x  (C given {slow / given:6.1f}x "
        f" {full / given:5.1f}x)  max error {error:.1e}  forward {forward:6.1f} ms, ours {plain / forward:.0%} of it, "
        f"C given {given / forward:.0%}"
    )


def compare_causal(tensors: dict[str, Any], repeats: int, sample: int) -> None:
    n = tensors["attention"].shape[-1]
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    if "logits" in tensors:
        attention = torch.softmax(tensors["logits"].masked_fill(~visible, -torch.inf), -1)
    else:
        attention = tensors["attention"]
    values = tensors["values"]
    # Evenly spaced rows have the mean cost of all rows.
    rows = torch.linspace(0, n - 1, min(sample, n)).round().long().unique()
    slow, reference = timed(lambda: causal_by_row(attention, values, rows), 1)
    slow *= n / len(rows)
    groups = tensors.get("groups", len(values))  # one factorisation serves the query heads that share a key-value head
    grouped = attention.unflatten(0, (groups, -1)), values.unflatten(0, (groups, -1))[:, :1]
    fast, ours = timed(lambda: effective_attention(*grouped, visible=visible).flatten(0, 1), repeats)
    exact = effective_attention(attention.double(), values.double(), visible=visible)
    # Nearly square prefixes are ill-conditioned, and float32 and float64 rightly disagree on some of their ranks.
    far = rows[rows >= 2 * values.shape[-1] - 1]
    error = apart = float("nan")
    if len(far):
        error = float((ours - exact)[:, 2 * values.shape[-1] - 1 :].abs().max())
        apart = float((ours - reference)[:, far].abs().max())
    print(
        f"causal  n={n:4d}  thin SVD a row {slow:9.1f} ms ({len(rows)} rows timed)  ours {fast:7.2f} ms"
        f"  {slow / fast:6.1f}x  rows of >= 2 d_v keys: max error {error:.1e}, from the float32 SVD {apart:.1e}"
    )


def compare_identifiability(tensors: dict[str, Any], repeats: int) -> None:
    forward, _ = timed(tensors["forward"], repeats)
    whole, _ = timed(lambda: whence.identifiability(tensors["trace"]), repeats)
    print(
        f"identifiability(trace)  n={tensors['attention'].shape[-1]:4d}  forward {forward:7.1f}  ours {whole:7.1f} ms  "
        f"= {whole / forward:.2f} of the forward pass"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--causal", action="store_true", help="causal only")
    parser.add_argument("--full", action="store_true", help="full attention only")
    parser.add_argument("--sample", type=int, default=32, help="rows timed for the causal baseline")
    parser.add_argument("--random", action="store_true", help="random tensors of MiniLM's shapes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.random:
        for n in options.lengths:
            random = random_tensors(n)
            if not options.causal:
                compare_full(random, options.repeats)
            if not options.full:
                compare_causal(random, options.repeats, options.sample)
        return
    for name, wanted in (("minilm", not options.causal), ("smollm2", not options.full)):
        if not wanted:
            continue
        print(f"-- {name}")
        for n in options.lengths:
            real = tensors(name, n)
            if name == "minilm":
                compare_full(real, options.repeats)
            else:
                real["groups"] = sum(layer.grouped_values.shape[0] for layer in real["trace"])
                compare_causal(real, max(1, options.repeats // 3), options.sample)
            compare_identifiability(real, max(1, options.repeats // 2))


if __name__ == "__main__":
    main()
