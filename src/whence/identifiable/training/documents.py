"""Texts for a language model: from files, or made by a program for the demo; packed into blocks of one length."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence.errors import InputError
from whence.identifiable.training.demo import GIVE, NAMES, TAKE, THINGS, WHEN
from whence.reading.texts import SUFFIXES, read_texts


@dataclass(frozen=True)
class Documents:
    """Texts to train on and texts to measure on."""

    train: tuple[str, ...]
    validation: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        for name, texts in (("to train on", self.train), ("to validate on", self.validation)):
            if not any(text.strip() for text in texts):
                raise InputError(f"{self.source} leaves no text {name}: give more.")


def read_documents(
    path: str, text: str | None = None, *, validation: str | None = None, share: float = 0.1
) -> Documents:
    """Documents of a file. A plain text file is one document, of which the end is set aside for validation; of a table
    (CSV, TSV, JSONL, Parquet) or data set every row is one, and a fixed random share is set aside. `validation`: a file
    of its own to measure on instead.
    """
    texts = _documents(path, text)
    if validation is not None:
        return Documents(texts, _documents(validation, text), path)
    if len(texts) == 1:
        whole = texts[0]
        cut = whole.rfind("\n", 0, int(len(whole) * (1 - share))) + 1 or int(len(whole) * (1 - share))
        return Documents((whole[:cut],), (whole[cut:],), path)
    order = list(range(len(texts)))
    random.Random(0).shuffle(order)
    held = set(order[: max(1, round(share * len(texts)))])
    return Documents(
        tuple(t for i, t in enumerate(texts) if i not in held), tuple(texts[i] for i in sorted(held)), path
    )


def _documents(path: str, text: str | None) -> tuple[str, ...]:
    file = Path(path).expanduser()
    if file.is_file() and SUFFIXES.get(file.suffix.lower(), "text" if text is None else "") == "text":
        try:
            return (file.read_text(encoding="utf-8"),)
        except UnicodeDecodeError as problem:
            raise InputError(f"{path!r} is not text in UTF-8: {problem.reason} at byte {problem.start}.") from problem
    return tuple(t for t in read_texts(path, text) if t.strip())


def demo_documents(count: int = 6000, seed: int = 0) -> Documents:
    """Made-up sentences, each with a question that only a look back answers: who has the thing now?"""
    draw = random.Random(seed)
    texts = []
    for _ in range(count):
        one, two = draw.sample(NAMES, 2)
        thing, when = draw.choice(THINGS), draw.choice(WHEN)
        gives = draw.random() < 0.5
        verb, owner = (draw.choice(GIVE), two) if gives else (draw.choice(TAKE), one)
        deed = f"{one} {verb} {thing} {'to' if gives else 'from'} {two}"
        texts.append(f"{when} , {deed} . who has {thing} now ? {owner} .")
    held = count // 10
    return Documents(tuple(texts[held:]), tuple(texts[:held]), "the generated demo text")


class Packed(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Documents end to end, cut into blocks; each block begins with the last token of the one before.

    So every token of the stream but the first, which ends nothing, is predicted exactly once. The last block is filled
    up with tokens that are not predicted (label −100).
    """

    def __init__(self, stream: Sequence[int], length: int, pad: int) -> None:
        count = max(1, math.ceil((len(stream) - 1) / length))
        flat = torch.full((count * length + 1,), pad, dtype=torch.long)
        flat[: len(stream)] = torch.tensor(stream)
        labels = flat.clone()
        labels[len(stream) :] = -100
        self.ids, self.labels = (t.unfold(0, length + 1, length).contiguous() for t in (flat, labels))
        self.tokens = len(stream) - 1  # that are predicted

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def pack(texts: Sequence[str], tokenizer: Any, length: int) -> Packed:
    """All texts as one stream of tokens, with the end-of-text token before the first and after each."""
    end = tokenizer.eos_token_id
    if end is None:
        raise InputError("the tokenizer has no end-of-text token (eos_token): texts could not be told apart.")
    stream = [end]
    for ids in tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]:
        stream += [*ids, end]
    return Packed(stream, length, end)
