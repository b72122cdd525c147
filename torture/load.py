"""A crowd at the server: is everybody answered or told to wait, how long do they wait, does the memory stay flat?

    python -m torture.load [--clients 128] [--seconds 60]

A server with a tiny model runs as a process of its own on loopback. Every client asks for the status, traces texts and
measures them, without a pause; 429 with Retry-After counts as told to wait. At the end the server gets SIGTERM while
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
from dataclasses import dataclass, field

from torture.models import WORDS

SERVER = """
import torch
from torture.models import families
from whence.serving import server
model = families()["bert"]
at = server.listen("127.0.0.1", 0)
print(at.getsockname()[1], flush=True)
server.run([model], at, quiet=True)
"""


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


async def crowd_of(port: int, clients: int, seconds: float, first: int = 0) -> Crowd:
    """`clients` callers at once for so many seconds."""
    crowd, until = Crowd(), time.monotonic() + seconds
    await asyncio.gather(*(client(port, first + number, until, crowd) for number in range(clients)))
    return crowd


def main(given: list[str] | None = None) -> int:
    """Send the crowd that the command line asks for; 1 if anybody was turned away or the memory grew."""
    import psutil

    parser = argparse.ArgumentParser(prog="python -m torture.load", description=str(__doc__).splitlines()[0])
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=60)
    asked = parser.parse_args(given)
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        time.sleep(1)
        memory = psutil.Process(process.pid)
        asyncio.run(crowd_of(port, 8, max(5.0, asked.seconds / 6), first=1_000_000))  # until its caches are warm
        before = memory.memory_info().rss
        crowd = asyncio.run(crowd_of(port, asked.clients, asked.seconds))
        growth = memory.memory_info().rss - before
        asyncio.run(crowd_of(port, 4, 0.1, first=2_000_000))
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        end = time.monotonic() - begun
    finally:
        process.kill()
        process.wait()
    total = sum(crowd.answers.values())
    print(f"{asked.clients} clients, {asked.seconds:g} s: {total} answers, {dict(sorted(crowd.answers.items()))}")
    for kind in crowd.waits:
        print(
            f"{kind}: p50 {crowd.share(kind, 0.5):.3f} s, p99 {crowd.share(kind, 0.99):.3f} s, n {len(crowd.waits[kind])}"
        )
    print(f"memory {growth / 1e6:+.1f} MB over {total} requests; ended {end:.1f} s after SIGTERM")
    for problem, times in Counter(crowd.problems).most_common(10):
        print(f"PROBLEM ({times}×): {problem}")
    return int(bool(crowd.problems) or end > 5)


if __name__ == "__main__":
    sys.exit(main())
