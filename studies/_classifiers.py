"""The classifiers of the faithfulness study: the embedded MiniLM, fine-tuned on SST-2's sentences, one per seed.

    python studies/_classifiers.py SEED [SEED …]     train what is missing

A finished classifier is a folder under $WHENCE_WORK (default ~/.cache/whence/studies) with its test accuracy in
`training.json`; one that is there is not trained again. One thread.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import _corpora as corpora
import torch
from torch import nn

MODELS = Path(os.environ.get("WHENCE_MODELS", corpora.ROOT.parent / "shared" / "models"))
TINY = MODELS / "bert-tiny-sst2"
"""A classifier of two layers that is there already."""
FOLDER = corpora.WORK / "faithfulness" / "classifiers"
EPOCHS, BATCH, RATE, WARMUP, DECAY, LONGEST = 2, 32, 1e-4, 0.06, 0.01, 64
LABELS = {0: "negative", 1: "positive"}


def folder(seed: int) -> Path:
    """Where the classifier of a seed is kept."""
    return FOLDER / f"minilm-sst2-{seed}"


def train(seed: int) -> dict[str, Any]:
    """Fine-tune MiniLM with AdamW, linear warm-up and decay; the seed draws the head, the dropout and the order."""
    done = folder(seed) / "training.json"
    if done.exists():
        return dict(json.loads(done.read_text()))
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from whence.model.cache import locate

    source = locate("minilm")
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    model = AutoModelForSequenceClassification.from_pretrained(
        source,
        local_files_only=True,
        num_labels=2,
        id2label=LABELS,
        label2id={name: number for number, name in LABELS.items()},
        dtype=torch.float32,
    )
    data = corpora.sst2()
    rows = [(tokenizer(text, truncation=True, max_length=LONGEST)["input_ids"], int(y)) for text, y in data.train]
    order = random.Random(seed)
    steps = EPOCHS * math.ceil(len(rows) / BATCH)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda s: min(s / (WARMUP * steps), (steps - s) / (steps - WARMUP * steps))
    )
    model.train()
    start = time.process_time()
    for epoch in range(EPOCHS):
        for step, batch in enumerate(_batches(rows, order)):
            loss = nn.functional.cross_entropy(_logits(model, [ids for ids, _ in batch]), _labels(batch))
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            if step % 50 == 0:
                print(f"seed {seed} epoch {epoch} step {step} loss {loss.item():.3f}", flush=True)
    model.eval()
    test = [(tokenizer(text, truncation=True, max_length=128)["input_ids"], int(y)) for text, y in data.test]
    report = {
        "seed": seed,
        "data": data.name,
        "train": len(rows),
        "test": len(test),
        "accuracy": accuracy(model, test),
        "settings": {"epochs": EPOCHS, "batch": BATCH, "rate": RATE, "warmup": WARMUP, "decay": DECAY},
        "cpu_seconds": round(time.process_time() - start),
    }
    unfinished = folder(seed).with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    (unfinished / "training.json").write_text(json.dumps(report, indent=1))
    shutil.rmtree(folder(seed), ignore_errors=True)
    unfinished.rename(folder(seed))
    return report


def accuracy(model: nn.Module, rows: list[tuple[list[int], int]]) -> float:
    """Share of the texts whose label the model predicts."""
    right = 0
    with torch.no_grad():
        for batch in _batches(rows, None):
            right += int((_logits(model, [ids for ids, _ in batch]).argmax(-1) == _labels(batch)).sum())
    return right / len(rows)


def _labels(batch: list[tuple[list[int], int]]) -> torch.Tensor:
    return torch.tensor([label for _, label in batch])


def _logits(model: nn.Module, rows: list[list[int]]) -> torch.Tensor:
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    logits: torch.Tensor = model(input_ids=ids, attention_mask=mask).logits
    return logits


def _batches(rows: list[tuple[list[int], int]], order: random.Random | None) -> list[list[tuple[list[int], int]]]:
    """Texts of like length together (less padding): shuffled, sorted within pieces of 32 batches, shuffled again."""
    if order is None:
        rows = sorted(rows, key=lambda row: len(row[0]))
        return [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
    rows = order.sample(rows, len(rows))
    piece = 32 * BATCH
    rows = [r for i in range(0, len(rows), piece) for r in sorted(rows[i : i + piece], key=lambda row: len(row[0]))]
    batches = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
    order.shuffle(batches)
    return batches


if __name__ == "__main__":
    for given in sys.argv[1:]:
        print(json.dumps(train(int(given))), flush=True)
