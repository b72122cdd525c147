"""From the texts a user gives to the sequences that are measured: what is left out, and why, is counted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whence.errors import InputError
from whence.model.load import Model
from whence.reading.encodings import sequences_given
from whence.reading.tokenised import position_limit
from whence.tokens.split import FEWEST

EMPTY, DUPLICATE, NO_TOKENS, ONE_TOKEN = "empty", "duplicate", "without tokens", "of one token"


@dataclass(frozen=True)
class Corpus:
    """The sequences to measure, shortest first, and how many texts were left out for each reason."""

    sequences: tuple[tuple[str, ...], ...]  # one text, or the two of a pair
    lengths: tuple[int, ...]  # tokens, special ones included
    left_out: Mapping[str, int]


def corpus(model: Model, texts: Any, *, truncate: bool = False) -> Corpus:
    """Different, non-empty sequences of at least two tokens, ordered by length.

    Two texts that give the same token ids are one (an uncased model does not know them apart).
    """
    left_out = dict.fromkeys((EMPTY, DUPLICATE, NO_TOKENS, ONE_TOKEN), 0)
    kept: dict[tuple[str, ...], None] = {}
    for sequence in _sequences(model, texts):
        if not all(text.strip() for text in sequence):
            left_out[EMPTY] += 1
        elif sequence in kept:
            left_out[DUPLICATE] += 1
        else:
            kept[sequence] = None
    found = list(kept)
    if not found:
        raise InputError(
            f"no text was left of those given ({_said(left_out)}): give at least {FEWEST} different texts."
        )
    rows = _tokenised(model, found, truncate)
    seen: set[tuple[int, ...]] = set()
    chosen: list[tuple[int, tuple[str, ...]]] = []
    for sequence, (ids, bare) in zip(found, rows, strict=True):
        if bare == 0:
            left_out[NO_TOKENS] += 1
        elif len(ids) < 2:
            left_out[ONE_TOKEN] += 1
        elif ids in seen:
            left_out[DUPLICATE] += 1
        else:
            seen.add(ids)
            chosen.append((len(ids), sequence))
    if len(chosen) < FEWEST:
        raise InputError(
            f"{len(chosen)} different text{'s' * (len(chosen) != 1)} of two or more tokens ({_said(left_out)}) cannot "
            f"be split into training, validation and test: at least {FEWEST} are needed, some hundreds for rates that "
            "mean something."
        )
    chosen.sort(key=lambda pair: pair[0])
    return Corpus(tuple(s for _, s in chosen), tuple(n for n, _ in chosen), left_out)


def _sequences(model: Model, texts: Any) -> list[tuple[str, ...]]:
    """Each text as a tuple: (text,) or (text, text_pair)."""
    if isinstance(texts, (str, os.PathLike)):
        raise InputError(
            f"texts={str(texts)!r:.80} is one string: give a list of texts, or read a file: whence.read_texts(path)."
        )
    return sequences_given(model, texts)


def _tokenised(model: Model, texts: list[tuple[str, ...]], truncate: bool) -> list[tuple[tuple[int, ...], int]]:
    """Token ids of every sequence, and how many of them are not special."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise InputError(
            f"{model.name} came without a tokenizer, so texts cannot be read. Give one: whence.Model(model, tokenizer)."
        )
    limit = position_limit(model.model)
    special = set(tokenizer.all_special_ids)
    options = {"truncation": True, "max_length": limit} if truncate and limit is not None else {}
    rows = []
    for sequence in texts:
        ids = tuple(tokenizer(*sequence, **options)["input_ids"])
        rows.append((ids, sum(i not in special for i in ids)))
    long = [i for i, (ids, _) in enumerate(rows) if limit is not None and len(ids) > limit]
    if long:
        first = texts[long[0]][0]
        raise InputError(
            f"{len(long)} of {len(texts)} texts are longer than the {limit} tokens {model.name} has positions for, the "
            f"first is {first!r:.60} ({len(rows[long[0]][0])} tokens). Shorten them, or pass truncate=True "
            "(--truncate) to use their first part."
        )
    return rows


def _said(left_out: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {why}" for why, n in left_out.items() if n) or "none left out"
