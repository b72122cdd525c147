"""From labelled texts to padded batches: the split, the token ids, the padding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whence.errors import InputError
from whence.identifiable.data import Labelled


class Encoded(torch.utils.data.Dataset[dict[str, Any]]):
    """Token ids and label numbers, one text at a time."""

    def __init__(self, ids: list[list[int]], labels: list[int]) -> None:
        self.ids, self.labels = ids, labels

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


@dataclass(frozen=True)
class Pad:
    """Pads a batch to its longest text; the mask is 1 at real tokens."""

    pad_id: int

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        width = max(len(item["input_ids"]) for item in items)
        rows = [item["input_ids"] for item in items]
        return {
            "input_ids": torch.tensor([row + [self.pad_id] * (width - len(row)) for row in rows]),
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
            "labels": torch.tensor([item["labels"] for item in items]),
        }


def split(data: Labelled, share: float, seed: int) -> tuple[Labelled, Labelled]:
    """Training and validation texts, labels in the same proportions; at least one text of every kind to train on."""
    by_label: dict[str, list[int]] = {}
    for i, label in enumerate(data.labels):
        by_label.setdefault(label, []).append(i)
    draw = random.Random(seed)
    valid: list[int] = []
    for label in sorted(by_label):
        rows = by_label[label]
        draw.shuffle(rows)
        valid += rows[: min(round(share * len(rows)), len(rows) - 1)]
    chosen = set(valid)
    kept = [i for i in range(len(data)) if i not in chosen]
    if not chosen:
        raise InputError(f"{data.source} has too few texts ({len(data)}) to set some aside for validation: give more.")

    def pick(rows: Sequence[int], what: str) -> Labelled:
        texts, labels = tuple(data.texts[i] for i in rows), tuple(data.labels[i] for i in rows)
        return Labelled(texts, labels, f"{data.source} ({what})")

    return pick(kept, "training part"), pick(sorted(chosen), "validation part")


def encode(tokenizer: Any, data: Labelled, numbers: dict[str, int], max_length: int) -> tuple[Encoded, int]:
    """Token ids, cut at `max_length` with the last special token kept, and how many texts were cut."""
    whole = tokenizer(list(data.texts), verbose=False)["input_ids"]
    cut = sum(len(ids) > max_length for ids in whole)
    ids = tokenizer(list(data.texts), truncation=True, max_length=max_length)["input_ids"] if cut else whole
    return Encoded([list(row) for row in ids], [numbers[label] for label in data.labels]), cut
