"""What does a survey cost? Against plain batched fused inference on the same texts, in one run.

CPU seconds of one thread, batches of 32 sorted by length on both sides; the model's proof is made before the clock
starts. With --workers 2 also the wall time of one and of two worker processes, start-up included (only on idle cores
does that say anything: the load average is printed).

    python benchmarks/survey.py --texts sst2/dev.tsv [--limit 1000] [--workers 2]
"""

from __future__ import annotations

import argparse
import os
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


def wall(model: str, texts: list[str], **options: Any) -> float:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        whence.survey(model, texts, Path(folder) / "run", **options)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", required=True)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=1)
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
        one, many = (wall(given.model, texts, workers=n) for n in (1, given.workers))
        print(
            f"{given.workers} workers: {one / many:.2f}× one in-process run ({many:.0f} s, {one:.0f} s), start-up included"
        )


if __name__ == "__main__":
    main()
