"""Certificates, witnesses and alternative maps: what they cost, beside the textbook, in one run on one thread.

    python benchmarks/certify.py [--random] [--heads 72] [--rounds 2] [--skip-map]

Baseline for intervals: scipy.optimize.linprog, one cold solve for each end of each interval, straight from the
definition. The tensors are MiniLM's on real prose; with --random, random ones of its shapes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _real import tensors
from effective_attention import random_tensors
from scipy.optimize import linprog
from torch import Tensor

from whence.core.attention.alternatives import alternative_attention
from whence.core.attention.certificate import certify_row
from whence.core.attention.head_certificate import certify_head
from whence.core.attention.witness import witness_row


def clock(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def cold_linprog(row: Tensor, values: Tensor, top: int) -> list[float]:
    """Both ends of the top intervals and the mass outside, one cold program each."""
    a, v = row.double().numpy(), values.double().numpy()
    a = a / a.sum()
    n = len(a)
    matrix, right = np.vstack([v.T, np.ones(n)]), np.append(a @ v, 1.0)
    keys = np.argsort(-a)[:top]
    costs = [sign * np.eye(n)[j] for j in keys for sign in (1.0, -1.0)]
    outside = -np.ones(n)
    outside[keys] = 0.0
    return [float(linprog(c, A_eq=matrix, b_eq=right).fun) for c in [*costs, outside]]


def rows(tensors: dict[str, Any], sample: int) -> None:
    attention, values = tensors["attention"], tensors["values"]
    heads, n = attention.shape[:2]
    cold, warm, ordered, checks, wide = [], [], [], [], 0.0
    certify_row(attention[0, 0], values[0])
    for k in range(sample):
        h, i = k % heads, (37 * k) % n
        a, v = attention[h, i], values[h]
        begin = time.process_time()
        ends = cold_linprog(a, v, 5)
        cold.append(time.process_time() - begin)
        begin = time.process_time()
        certificate = certify_row(a, v, orders=False)
        warm.append(time.process_time() - begin)
        ordered.append(clock(lambda a=a, v=v: certify_row(a, v)))  # type: ignore[misc]
        checks.append(clock(certificate.check))
        for j in range(5):
            wide = max(wide, abs(ends[2 * j] - float(certificate.lower[j])))
            wide = max(wide, abs(-ends[2 * j + 1] - float(certificate.upper[j])))
    c, w, o, p = (1e3 * float(np.median(x)) for x in (cold, warm, ordered, checks))
    print(
        f"row     n={n:4d} d_v={values.shape[-1]}  cold linprog {c:7.1f} ms  ours, top-5 + outside {w:6.1f} ms"
        f"  {c / w:5.1f}x  with orders {o:6.1f} ms  check {p:5.2f} ms  largest difference {wide:.1e}"
    )


def head(tensors: dict[str, Any]) -> None:
    attention, values = tensors["attention"][0], tensors["values"][0]
    begin = time.process_time()
    pooled = certify_head(attention, values)
    seconds = time.process_time() - begin
    ratio = []
    for i in range(0, len(attention), 13):
        exact = certify_row(attention[i], values, orders=False)
        ratio.append(float((pooled.upper[i][exact.keys] / exact.upper).mean()))
    one = clock(lambda: certify_row(attention[1], values, top=None, orders=False))
    print(
        f"head    n={len(attention):4d}  dual pool {seconds:5.2f} s for {len(attention)} rows  (exact, all keys: "
        f"{one * len(attention):6.1f} s)  {one * len(attention) / seconds:4.1f}x  upper ends on top-5 "
        f"{np.mean(ratio):.3f} of exact  checks {pooled.check()}"
    )


def whole_map(tensors: dict[str, Any], heads: int, rounds: int, sample: int) -> None:
    attention, values = tensors["attention"][:heads], tensors["values"][:heads]
    n = attention.shape[-1]
    single = []
    begin = time.process_time()
    for k in range(sample):
        h, i = k % len(attention), (37 * k) % n
        single.append(((h, i), witness_row(attention[h, i], values[h]).total_variation))
    cost = (time.process_time() - begin) / sample
    found = alternative_attention(attention, values, rounds=rounds)
    same = np.mean([float(found.total_variation[at]) for at, _ in single])
    best = float(np.mean([tv for _, tv in single]))
    print(
        f"map     n={n:4d}  {len(attention)} heads, {attention.shape[0] * n} rows in {found.seconds:5.1f} s, "
        f"{found.rounds} rounds: mean total variation {float(found.total_variation.mean()):.3f}; on {sample} rows "
        f"{same:.3f} against "
        f"{best:.3f} of single witnesses ({1e3 * cost:.0f} ms each) = {100 * same / best:.0f} %  "
        f"largest residual {float(found.residual.max()):.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--sample", type=int, default=12, help="rows timed")
    parser.add_argument("--heads", type=int, default=72)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--skip-map", action="store_true")
    parser.add_argument("--random", action="store_true", help="random tensors of MiniLM's shapes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [random_tensors(n) if options.random else tensors("minilm", n) for n in options.lengths]
    for case in cases:
        rows(case, options.sample)
    head(cases[0])
    if not options.skip_map:
        whole_map(cases[0], options.heads, options.rounds, options.sample)


if __name__ == "__main__":
    main()
