"""What does a survey cost? Against plain batched fused inference on the same texts, in one run.

CPU seconds of one thread, batches of 32 sorted by length on both sides; the model's proof is made before the clock
starts. With --workers 2 also the wall time of one in-process run and of two worker processes (only on idle cores does that
say anything: the load average is printed): start-up included, and after it, as texts a second between the first shard that is
done and the last. With --ray the same of as many actors on a Ray cluster of this machine alone, which Ray must not open to
others: run it in a network namespace of its own, where the script refuses to start it anywhere else.

    python benchmarks/survey.py --texts sst2/dev.tsv [--limit 1000] [--workers 2]
    unshare --net --pid --fork --kill-child --mount-proc python benchmarks/survey.py --texts sst2/dev.tsv --workers 2 --ray
"""

from __future__ import annotations

import argparse
import fcntl
import os
import socket
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import whence
from whence.surveys.settings import SurveySettings, chosen_measures
from whence.surveys.shards import Shard
from whence.surveys.worker import Task, Worker

BATCH = 32
SHARD = 32  # small shards, so that the last ones leave nobody idle for long
BARS = {"default measures": 6.0, "without certainty": 4.0}


def plain(model: whence.Model, texts: list[str]) -> float:
    """CPU seconds of the model alone, with its fused attention."""
    model.model.set_attn_implementation("sdpa")
    order = sorted(texts, key=lambda text: len(model.tokenizer(text)["input_ids"]))
    start = time.process_time()
    with torch.no_grad():
        for at in range(0, len(order), BATCH):
            model.model(**model.tokenizer(order[at : at + BATCH], padding=True, return_tensors="pt"))
    return time.process_time() - start


def surveyed(model: whence.Model, texts: list[str], settings: SurveySettings) -> tuple[float, int]:
    """CPU seconds of the survey's shards, files compressed but not written, and their bytes."""
    worker = Worker(Task(model, model.weights_hash, settings))
    size = settings.shard_size
    seconds = total = 0.0
    for number, first in enumerate(range(0, len(texts), size)):
        shard = Shard(number, first, tuple((text,) for text in texts[first : first + size]), "benchmark")
        start = time.process_time()
        files = worker.files(shard)
        seconds += time.process_time() - start
        total += sum(map(len, files.values()))
    return seconds, int(total)


def wall(model: str, texts: list[str], **options: Any) -> tuple[float, float]:
    """Seconds of the whole run, and texts a second from the first shard that is done to the last."""
    told: list[tuple[float, float]] = []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        watch = lambda _what, done, _total: told.append((time.perf_counter(), done))  # noqa: E731
        whence.survey(model, texts, Path(folder) / "run", progress=watch, shard_size=SHARD, **options)
    seconds = time.perf_counter() - start
    (first, before), (last, after) = told[0], told[-1]
    return seconds, (after - before) / (last - first)


def on_ray(model: str, texts: list[str], actors: int) -> tuple[float, float]:
    """The same on a cluster of one node, in a network namespace that has nothing but loopback."""
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        raise SystemExit("--ray: Ray may listen on every interface; run this under unshare --net (see above).")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:  # ip link set lo up, without the program
        fcntl.ioctl(handle, 0x8914, struct.pack("16sh", b"lo", 1) + b"\0" * 22)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    from ray.cluster_utils import Cluster

    small = {"num_cpus": actors, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    try:
        return wall(model, texts, engine="ray", address=cluster.address, workers=actors)
    finally:
        cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", required=True)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--ray", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    texts = list(whence.read_texts(given.texts, limit=given.limit).texts)
    model = whence.load(given.model)
    print(f"{given.model}, {len(texts)} texts, load average {os.getloadavg()[0]:.1f}")
    plain(model, texts[:BATCH])
    base = plain(model, texts)
    print(f"plain inference      {1e3 * base / len(texts):7.1f} ms a text")
    for name, without in (("default measures", ()), ("without certainty", ("certainty",))):
        seconds, size = surveyed(model, texts, SurveySettings(chosen_measures(without=without)))
        again = plain(model, texts)  # before and after: what else the machine does changes
        ratio = 2 * seconds / (base + again)
        print(
            f"{name:20s} {1e3 * seconds / len(texts):7.1f} ms a text, {ratio:.2f}× (bar {BARS[name]:.0f}×), "
            f"{size / len(texts) / 1024:.2f} KB a text"
        )
    if given.workers > 1:
        (one, alone), (many, rate) = (wall(given.model, texts, workers=n) for n in (1, given.workers))
        print(
            f"{given.workers} workers: {rate / alone:.2f}× one in-process run after start-up ({rate:.1f}, {alone:.1f} texts/s; "
            f"bar 1.7×), {one / many:.2f}× with it ({many:.0f} s, {one:.0f} s)"
        )
        if given.ray:
            whole, actors = on_ray(given.model, texts, given.workers)
            print(
                f"{given.workers} Ray actors: {rate / actors:.2f}× the time of worker processes after start-up "
                f"({actors:.1f} texts/s; bar 1.25×); {whole:.0f} s with it"
            )


if __name__ == "__main__":
    main()
