"""Jobs of many small operations on one torch thread and on two, on a machine with a core to spare and on one without.

    python benchmarks/threads.py [--repeats 5]

Seconds on the wall, the best and the worst of the repeats, in turns. "one": as whence runs them; "two": the same with
`one_thread` switched off and torch on two threads. Busy: as many processes as there are cores count beside them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import whence
from benchmarks._real import TEXT


@contextmanager
def as_before() -> Iterator[None]:
    """`one_thread`, switched off."""
    yield


def counting() -> None:
    while True:
        pass


def measured(work: Callable[[], Any], repeats: int) -> dict[str, tuple[float, float]]:
    times: dict[str, list[float]] = {"one": [], "two": []}
    for _ in range(repeats):
        for name in times:
            switched_off = mock.patch.object(torch, "set_num_threads") if name == "two" else as_before()
            with switched_off:
                start = time.perf_counter()
                work()
                times[name].append(time.perf_counter() - start)
    return {name: (min(some), max(some)) for name, some in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(2)
    trace = whence.trace(whence.load(), " ".join(TEXT.split()[:60]))
    works: dict[str, Callable[[], Any]] = {
        "verdict": lambda: whence.verdict(trace, rows=4),
        "certificate": lambda: whence.certify(trace, 2, 3, 5),
    }
    for state in ("idle", "busy"):
        beside = [multiprocessing.Process(target=counting, daemon=True) for _ in range(os.cpu_count() or 1)]
        for process in beside if state == "busy" else []:
            process.start()
        try:
            for name, work in works.items():
                work()
                for way, (best, worst) in measured(work, repeats).items():
                    print(
                        f"{state:5} {name:12} {way}: {best:.3f} to {worst:.3f} s (load {os.getloadavg()[0]:.1f})",
                        flush=True,
                    )
        finally:
            for process in beside if state == "busy" else []:
                process.kill()
    print(f"torch's threads afterwards: {torch.get_num_threads()}")


if __name__ == "__main__":
    main()
