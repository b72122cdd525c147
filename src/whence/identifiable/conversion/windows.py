"""Texts of all lengths: what a model is distilled on, so that it stays faithful at every length it can read."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from whence.errors import InputError
from whence.results.run_identity import hash_texts

SHORTEST = 16  # tokens of the shortest window that is cut on purpose


@dataclass(frozen=True)
class WindowedTexts:
    """Tokenised texts without special tokens, and the special tokens that go around each of them."""

    texts: tuple[tuple[int, ...], ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    pad: int
    longest: int  # tokens that the model has positions for, special ones included

    @property
    def digest(self) -> str:
        """SHA-256 of everything that batches are made of."""
        return hash_texts([self.before, self.after, (self.pad, self.longest), *self.texts])

    @property
    def room(self) -> int:
        return self.longest - len(self.before) - len(self.after)

    def batch(self, pieces: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Pieces with their special tokens, padded together."""
        rows = [[*self.before, *piece, *self.after] for piece in pieces]
        width = max(map(len, rows))
        ids = torch.tensor([row + [self.pad] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": mask}


def tokenise(tokenizer: Any, texts: Sequence[str], longest: int, *, truncate: bool = False) -> WindowedTexts:
    """Tokenise every text once. Empty ones are refused by number. truncate: of a longer text the first part only."""
    if not texts:
        raise InputError("no texts were given: tie_keys fits and distils on texts, so give some hundreds of them.")
    for i, text in enumerate(texts):
        if not text.strip():
            raise InputError(f"text {i} is {text!r}: every text must have at least one word. Leave it out.")
    plain = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    whole = tokenizer(texts[0], verbose=False)["input_ids"]
    inner = list(plain[0])
    start = next((i for i in range(len(whole)) if whole[i : i + len(inner)] == inner), 0)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    kept = tuple(tuple(ids) for ids in plain if ids)
    if not kept:
        raise InputError(
            f"none of the {len(texts)} texts gives a token of this tokenizer; the first is {texts[0]!r:.60}."
        )
    found = WindowedTexts(kept, tuple(whole[:start]), tuple(whole[start + len(inner) :]), pad, longest)
    return replace(found, texts=tuple(ids[: found.room] for ids in kept)) if truncate else found


def batches(corpus: WindowedTexts, tokens: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Batches of about `tokens` tokens without end: in turn texts as they are, and windows of a length drawn at random.

    Window lengths are log-uniform from 16 tokens to the model's maximum. A window is the beginning or the inside of
    a long text, or several texts one after the other, so that every length occurs even where the texts are short.
    Batch number i depends on `seed` and i alone, so that a run that was stopped goes on where it was.
    """
    number = 0
    while True:
        yield batch(corpus, tokens, seed, number)
        number += 1


def batch(corpus: WindowedTexts, tokens: int, seed: int, number: int) -> dict[str, Tensor]:
    """Batch `number` of `batches`."""
    draw = random.Random(f"{seed}/{number}")
    if number % 2 == 0:
        return corpus.batch(_as_they_are(corpus, tokens, draw))
    low, high = math.log(min(SHORTEST, corpus.room)), math.log(corpus.room)
    length = round(math.exp(draw.uniform(low, high)))
    return corpus.batch([_window(corpus, length, draw) for _ in range(max(1, round(tokens / length)))])


def _as_they_are(corpus: WindowedTexts, tokens: int, draw: random.Random) -> list[tuple[int, ...]]:
    """Texts of similar length, at most the model's maximum, about `tokens` tokens in all."""
    pool = [corpus.texts[draw.randrange(len(corpus.texts))][: corpus.room] for _ in range(256)]
    pool.sort(key=len)
    at = draw.randrange(len(pool))
    windows, total = [pool[at]], len(pool[at])
    lower, upper = at - 1, at + 1
    while total < tokens and (lower >= 0 or upper < len(pool)):
        if upper < len(pool) and (lower < 0 or len(pool[upper]) - len(pool[at]) <= len(pool[at]) - len(pool[lower])):
            piece, upper = pool[upper], upper + 1
        else:
            piece, lower = pool[lower], lower - 1
        windows.append(piece)
        total += len(piece)
    return windows


def _window(corpus: WindowedTexts, length: int, draw: random.Random) -> list[int]:
    at = draw.randrange(len(corpus.texts))
    text = corpus.texts[at]
    if len(text) >= length:
        start = 0 if draw.random() < 0.5 else draw.randrange(len(text) - length + 1)
        return list(text[start : start + length])
    window: list[int] = []
    while len(window) < length:
        window += corpus.texts[at % len(corpus.texts)]
        at += 1
    return window[:length]
