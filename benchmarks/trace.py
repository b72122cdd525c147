"""What does a trace cost? Against a plain eager forward with attentions, and against the fused forward.

One thread, all in one run and in turns, best of 20; the proof is made once per model, before the clock starts. Peak memory is
the growth of the process's resident set in a fresh process per case.

    python benchmarks/trace.py [--model minilm] [--lengths 128 512] [--times]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import psutil
import torch

import whence
from whence.reading.rerun import run

TEXT = "The old doctor told the nurse that she would not leave the ward before the storm was over. "
REPEATS = 20


def best(works: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of the quickest of several runs of each, taken in turns so that all meet the same machine."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(REPEATS + 1):
        for name, work in works.items():
            start = time.process_time()  # CPU time on one thread: what else the machine does matters less
            work()
            times[name].append(time.process_time() - start)
    return {name: 1e3 * min(found[1:]) for name, found in times.items()}  # the first is to warm up


def cases(model: whence.Model, ids: dict[str, torch.Tensor]) -> dict[str, Callable[[], Any]]:
    def eager() -> Any:
        model.model.set_attn_implementation("eager")
        with torch.no_grad():
            return model.model(**ids, output_attentions=True, use_cache=False)

    def fused() -> Any:
        model.model.set_attn_implementation("sdpa")
        with torch.no_grad():
            return model.model(**ids, use_cache=False)

    return {
        "eager + attentions": eager,
        "sdpa": fused,
        "trace": lambda: whence.trace(model, ids),
        "trace, attention and values": lambda: whence.trace(model, ids, keep=("attention", "values")),
    }


def share_of_check(model: whence.Model, ids: dict[str, torch.Tensor]) -> float:
    """Which part of a trace is the check of its text: the median of many traces, both taken in the same one."""
    check, inside, shares = run.assert_on_text, [0.0], []

    def timed(*arguments: Any) -> None:
        start = time.process_time()
        check(*arguments)
        inside[0] = time.process_time() - start

    with mock.patch.object(run, "assert_on_text", timed):
        for _ in range(2 * REPEATS):
            start = time.process_time()
            whence.trace(model, ids)
            shares.append(inside[0] / (time.process_time() - start))
    return statistics.median(shares)


def peak(work: Callable[[], Any]) -> float:
    """MiB by which the resident set grew at most while `work` ran."""
    process = psutil.Process()
    before = process.memory_info().rss
    highest, done = before, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.is_set():
            highest = max(highest, process.memory_info().rss)
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = work()
    highest = max(highest, process.memory_info().rss)
    done.set()
    watcher.join()
    del kept
    return (highest - before) / 2**20


def inputs(model: whence.Model, n: int) -> dict[str, torch.Tensor]:
    return dict(model.tokenizer(TEXT * 60, return_tensors="pt", truncation=True, max_length=n))


def one_peak(name: str, n: int, case: str) -> None:
    """In a process of its own: warm up on a short text, then measure one run."""
    model = whence.load(name)
    whence.trace(model, "A few words.")
    for work in cases(model, inputs(model, 8)).values():
        work()
    print(peak(cases(model, inputs(model, n))[case]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--times", action="store_true", help="the share of the check alone, no memory")
    parser.add_argument("--peak", nargs=2, metavar=("N", "CASE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak:
        one_peak(arguments.model, int(arguments.peak[0]), arguments.peak[1])
        return
    model = whence.load(arguments.model)
    start = time.perf_counter()
    whence.trace(model, "A few words.")
    print(f"{arguments.model}: first trace with its proof {1e3 * (time.perf_counter() - start):.0f} ms")
    print(f"{'n':>4}  {'case':28} {'ms':>8} {'over eager':>10} {'over sdpa':>10} {'peak MiB':>9}")
    for n in arguments.lengths:
        ids = inputs(model, n)
        share = share_of_check(model, ids)
        print(f"{n:>4}  the check of (a) to (c) on this text is {100 * share:.1f} % of the trace (bar: 5 % at n = 128)")
        if arguments.times:
            continue
        found = best(cases(model, ids))
        for name, ms in found.items():
            command = [sys.executable, __file__, "--model", arguments.model, "--peak", str(n), name]
            out = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
            mib = float(out.stdout.strip().splitlines()[-1])
            print(
                f"{n:>4}  {name:28} {ms:8.1f} {ms / found['eager + attentions']:9.2f}x {ms / found['sdpa']:9.2f}x {mib:9.0f}"
            )


if __name__ == "__main__":
    main()
