"""Long texts: ALTI, rollout and null shares of every layer of a stream, against the model's own fused pass.

One thread; the fused pass and the stream in one process and in turns, their ratio printed. Peak memory is the growth of the
process's resident set while the stream runs, in a process of its own.

    python benchmarks/long.py [--model smollm2] [--lengths 512 2048 4096]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import Any

import torch

import whence
from benchmarks._real import TEXT
from benchmarks.trace import peak


def inputs(model: whence.Model, n: int) -> dict[str, torch.Tensor]:
    return dict(model.tokenizer(TEXT * 20, return_tensors="pt", truncation=True, max_length=n))


def measured(model: whence.Model, ids: dict[str, torch.Tensor]) -> list[Any]:
    """The rollout of ALTI at the last layer, and the null share of every row of every layer."""
    return whence.stream(model, ids).measure(
        lambda layers: whence.contributions(layers, "alti", rollout=True, layers=[-1]), whence.identifiability
    )


def fused(model: whence.Model, ids: dict[str, torch.Tensor]) -> Any:
    with torch.no_grad():
        return model.model(**ids, use_cache=False, logits_to_keep=1)


def seconds(work: Any, *arguments: Any) -> tuple[float, Any]:
    start = time.process_time()
    result = work(*arguments)
    return time.process_time() - start, result


def in_a_process(name: str, n: int, what: str) -> str:
    command = [sys.executable, "-m", "benchmarks.long", "--model", name, "--only", what, str(n)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1]


def only(name: str, what: str, n: int) -> None:
    model = whence.load(name)
    ids = inputs(model, n)
    measured(model, inputs(model, 16))  # the proof and the libraries
    if what == "peak":
        print(f"{peak(lambda: measured(model, ids)):.0f}")
        return
    if what == "certify":
        layers = whence.stream(model, ids)
        took, row = seconds(lambda: whence.certify(layers, 3, 4, n - 1, orders=False))
        print(f"{took:.1f} s, checked {row.check()}, dimension {row.dimension}")
        return
    plain, _ = seconds(fused, model, ids)
    again, _ = seconds(fused, model, ids)
    plain = min(plain, again)
    took, (mixed, shares) = seconds(measured, model, ids)
    line = f"fused pass {plain:.1f} s, stream {took:.1f} s, {took / plain:.1f}x"
    if n <= 512:
        trace = whence.trace(model, ids)
        rolled = whence.contributions(trace, "alti").rollout().values[-1]
        apart = max(
            float((mixed.values[0] - rolled).abs().max()),
            float((shares.values - whence.identifiability(trace, leverage=False).values).abs().max()),
        )
        line += f", largest difference from the collected trace {apart:.1e}"
    print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--only", nargs=2, metavar=("WHAT", "N"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.only:
        only(arguments.model, arguments.only[0], int(arguments.only[1]))
        return
    for n in arguments.lengths:
        print(f"n = {n}: {in_a_process(arguments.model, n, 'times')}", flush=True)
        print(f"n = {n}: rise of peak memory {in_a_process(arguments.model, n, 'peak')} MiB", flush=True)
        print(f"n = {n}: certify of one row {in_a_process(arguments.model, n, 'certify')}", flush=True)


if __name__ == "__main__":
    main()
