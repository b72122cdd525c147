"""A collection: trace + ALTI + identifiability of many short texts, against plain batched inference with fused attention.

One thread, CPU time, in one run and in turns, best of three; the texts are SST-2 sentences, or made-up ones without them.

    python benchmarks/collection.py [--texts 300] [--file sentences.txt]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import whence
from benchmarks._real import TEXT

BATCH = 8


def made_up(count: int) -> list[str]:
    words = TEXT.split()
    return [" ".join(words[7 * i % 200 :][: 5 + 13 * i % 40]) for i in range(count)]


def plain(model: whence.Model, texts: list[str]) -> None:
    """What a user would run: batches of texts of similar length, sdpa."""
    ordered = sorted(texts, key=lambda text: len(model.tokenizer(text)["input_ids"]))
    with torch.no_grad():
        for start in range(0, len(ordered), BATCH):
            model.model(**model.tokenizer(ordered[start : start + BATCH], padding=True, return_tensors="pt"))


def whole(model: whence.Model, texts: list[str]) -> tuple[Any, Any]:
    traces = whence.trace(model, texts, batch_size=BATCH)
    return whence.contributions(traces, "alti"), whence.identifiability(traces, leverage=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=300)
    parser.add_argument("--file", type=Path, help="one text a line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = whence.load("minilm")
    texts = made_up(arguments.texts)
    if arguments.file is not None:
        texts = [line.strip() for line in arguments.file.read_text().splitlines() if line.strip()][: arguments.texts]
    mixed, rows = whole(model, texts)
    sample = range(0, len(texts), max(1, len(texts) // 20))
    apart = 0.0
    for i in sample:
        one = whence.trace(model, texts[i])
        apart = max(apart, float((mixed[i].values - whence.contributions(one, "alti").values).abs().max()))
        apart = max(apart, float((rows[i].values - whence.identifiability(one, leverage=False).values).abs().max()))
    works: dict[str, Callable[[], Any]] = {"plain": lambda: plain(model, texts), "whence": lambda: whole(model, texts)}
    works["trace"] = lambda: whence.trace(model, texts, batch_size=BATCH)
    best = dict.fromkeys(works, float("inf"))
    for _ in range(3):
        for name, work in works.items():
            start = time.process_time()
            work()
            best[name] = min(best[name], time.process_time() - start)
    print(
        f"{len(texts)} texts: plain {best['plain']:.2f} s; trace {best['trace']:.2f} s; trace + ALTI + identifiability "
        f"{best['whence']:.2f} s, {best['whence'] / best['plain']:.2f}x; largest difference from one by one {apart:.1e}"
    )


if __name__ == "__main__":
    main()
