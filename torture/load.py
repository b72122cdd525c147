"""A crowd at the server: is everybody answered or told to wait, how long do they wait, does the memory stay flat?

    python -m torture.load [--clients 128] [--seconds 60]

A server with a tiny model runs as a process of its own on loopback. Every client asks for the status, traces texts and
reads them, without a pause; 429 with Retry-After counts as told to wait. The server's memory is read when its stores are
full (they are small here), after 2,000 requests and at the end. Then the server gets SIGTERM (a second one SIGINT) while
jobs are running.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

from torture.models import WORDS

SERVER = """
import sys
from torture.models import families
from whence.serving import server
from whence.serving.limits import Limits
at = server.listen("127.0.0.1", 0)
print(at.getsockname()[1], flush=True)
limits = Limits(trace_bytes=2 << 20, results=64, client_jobs=8, seconds=30)  # all callers have one address here
server.run([families()["bert"]], at, limits=limits, quiet=True)
"""
GROWTH = 32 << 20  # bytes that a server may gain in 2,000 requests and more: the allocator's own pools


@dataclass
class Crowd:
    """What the clients saw."""

    answers: Counter[int] = field(default_factory=Counter)
    waits: dict[str, list[float]] = field(default_factory=lambda: {"status": [], "trace": [], "job": []})
    problems: list[str] = field(default_factory=list)

    def share(self, kind: str, quantile: float) -> float:
        """A quantile of the waiting times of one kind, in seconds."""
        waits = sorted(self.waits[kind]) or [0.0]
        return waits[min(len(waits) - 1, int(quantile * len(waits)))]


async def client(port: int, number: int, until: float, crowd: Crowd) -> None:
    """One caller, until the time is over."""
    import httpx

    draw = random.Random(number)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        while time.monotonic() < until:
            try:
                await ask(http, draw, crowd)
            except httpx.HTTPError as problem:
                crowd.problems.append(f"client {number}: {type(problem).__name__}: {problem}")


async def ask(http: object, draw: random.Random, crowd: Crowd) -> None:
    """One round: the status, a trace, its measures."""

    async def timed(kind: str, method: str, path: str, **given: object) -> object:
        begun = time.monotonic()
        answer = await http.request(method, path, **given)  # type: ignore[attr-defined]
        crowd.waits[kind].append(time.monotonic() - begun)
        crowd.answers[answer.status_code] += 1
        if answer.status_code not in (200, 202, 404, 429):
            crowd.problems.append(f"{method} {path}: {answer.status_code}")
        if answer.status_code == 429 and "retry-after" not in answer.headers:
            crowd.problems.append("429 without Retry-After")
        return answer

    await timed("status", "GET", "/health")
    text = " ".join(draw.choices(WORDS, k=draw.randrange(3, 30)))
    begun = time.monotonic()
    answer = await timed("trace", "POST", "/api/traces", json={"model": "bert", "text": text})
    if answer.status_code == 429:  # type: ignore[attr-defined]
        await asyncio.sleep(draw.uniform(0.5, 2.0))
        return
    job = answer.json()  # type: ignore[attr-defined]
    while job.get("state") in ("queued", "running"):
        await asyncio.sleep(0.2)
        answer = await timed("status", "GET", f"/api/jobs/{job['id']}")
        job = answer.json()  # type: ignore[attr-defined]
    crowd.waits["job"].append(time.monotonic() - begun)
    if job.get("state") == "failed":
        crowd.problems.append(f"a job failed: {job['error']}")
    elif job.get("result"):
        await timed("status", "GET", f"/api/traces/{job['result']['trace']}/blocks/head/encoder/1/0")


async def crowd_of(port: int, clients: int, seconds: float, crowd: Crowd, first: int = 0) -> None:
    """`clients` callers at once for so many seconds; `crowd` hears what they saw."""
    until = time.monotonic() + seconds
    await asyncio.gather(*(client(port, first + number, until, crowd) for number in range(clients)))


@contextmanager
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server's process and its port."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def seconds_to_end(process: subprocess.Popen[str], port: int, how: signal.Signals) -> float:
    """How long the server takes to end after a signal that comes while jobs are under way."""
    import httpx

    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        for k in range(8):
            http.post("/api/traces", json={"model": "bert", "text": " ".join(WORDS * 12 + WORDS[: k + 1])})
        begun = time.monotonic()
        process.send_signal(how)
        process.wait(timeout=30)
        return time.monotonic() - begun


async def watched(port: int, clients: int, seconds: float, process: psutil.Process) -> tuple[Crowd, dict[int, int]]:
    """The crowd, and the server's memory by the number of answers so far, read every half second."""
    crowd, sizes = Crowd(), {0: process.memory_info().rss}
    task = asyncio.create_task(crowd_of(port, clients, seconds, crowd))
    while not task.done():
        await asyncio.sleep(0.5)
        sizes[sum(crowd.answers.values())] = process.memory_info().rss
    return crowd, sizes


def main(given: list[str] | None = None) -> int:
    """Send the crowd that the command line asks for; 1 if anybody was turned away or the memory grew."""
    parser = argparse.ArgumentParser(prog="python -m torture.load", description=str(__doc__).splitlines()[0])
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=60)
    asked = parser.parse_args(given)
    ends = {}
    with server() as (process, port):
        asyncio.run(crowd_of(port, asked.clients, max(3.0, asked.seconds / 4), Crowd(), first=1_000_000))  # to warm up
        crowd, sizes = asyncio.run(watched(port, asked.clients, asked.seconds, psutil.Process(process.pid)))
        ends["SIGTERM"] = seconds_to_end(process, port, signal.SIGTERM)
    with server() as (process, port):
        ends["SIGINT"] = seconds_to_end(process, port, signal.SIGINT)
    total = sum(crowd.answers.values())
    print(f"{asked.clients} clients, {asked.seconds:g} s: {total} answers, {dict(sorted(crowd.answers.items()))}")
    for kind, waits in crowd.waits.items():
        print(f"{kind}: p50 {crowd.share(kind, 0.5):.3f} s, p99 {crowd.share(kind, 0.99):.3f} s, n {len(waits)}")
    first, *_, last = sizes.values()
    at_2000 = next((size for answers, size in sizes.items() if answers >= 2000), last)
    print(
        f"memory {first / 1e6:.0f} MB, after 2,000 requests {(at_2000 - first) / 1e6:+.1f} MB, "
        f"after {total} {(last - first) / 1e6:+.1f} MB"
    )
    print("ended " + ", ".join(f"{seconds:.1f} s after {name}" for name, seconds in ends.items()) + ", jobs running")
    if last - first > GROWTH:
        crowd.problems.append(f"the memory grew by {(last - first) / 1e6:.0f} MB")
    crowd.problems += [f"it took {seconds:.1f} s to end after {name}" for name, seconds in ends.items() if seconds > 5]
    for problem, times in Counter(crowd.problems).most_common(10):
        print(f"PROBLEM ({times}×): {problem}")
    return int(bool(crowd.problems))


if __name__ == "__main__":
    sys.exit(main())
