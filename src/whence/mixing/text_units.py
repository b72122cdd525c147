"""Tokens gathered into what people cite: words, sentences, documents."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from whence.errors import InputError
from whence.results.labels import Tokens

UNITS = ("token", "word", "sentence", "document")
SENTENCE_END = re.compile(r"(?<=[.!?…。！？])[\"'”’)\]]*\s+|\s*\n\s*")  # closing quotation marks stay with the sentence
PARAGRAPH_END = re.compile(r"\n\s*\n")
REST, ANSWER = "(the rest)", "(the answer so far)"

Groups = list[tuple[str, list[int]]]


def unit_groups(
    tokens: Tokens, text: str | None, unit: str, *, documents: Sequence[str] | None = None, answer: int | None = None
) -> Groups:
    """(name, positions) of each unit; every position is in one of them.

    A sentence ends at . ! ? … before white space, or at a line end; a document at an empty line, unless `documents`
    quotes them. What is in none (special tokens, instructions around quoted documents) is the rest. answer: where the
    answer begins; then it is a document of its own.
    """
    if unit not in UNITS:
        raise InputError(f"{unit!r} is not one of {', '.join(UNITS)}.")
    if documents is not None and unit != "document":
        raise InputError(f"documents= names documents, but the unit asked for is {unit!r}.")
    if unit == "token":
        return [(token, [i]) for i, token in enumerate(tokens)]
    if unit == "word":
        return [(name, group) for name, group in zip(tokens.by_word(), tokens.groups(), strict=True)]
    if text is None or tokens.spans is None:
        raise InputError(f"{unit}s need a text and a tokenizer that says where its tokens stand in it.")
    end = next((s[0] for s in tokens.spans[answer:] if s is not None), len(text)) if answer is not None else len(text)
    if unit == "sentence":
        places = [
            *_pieces(text[:end], SENTENCE_END),
            *((end + a, end + b) for a, b in _pieces(text[end:], SENTENCE_END)),
        ]
    elif documents is None:
        places = _pieces(text[:end], PARAGRAPH_END)
    else:
        places = _quoted(text[:end], documents)
    return _gathered(tokens, text, places, answer if unit == "document" else None)


def _pieces(text: str, end: re.Pattern[str]) -> list[tuple[int, int]]:
    edges = [0, *(m.end() for m in end.finditer(text)), len(text)]
    return [(a, b) for a, b in itertools.pairwise(edges) if text[a:b].strip()]


def _quoted(text: str, documents: Sequence[str]) -> list[tuple[int, int]]:
    places = []
    start = 0
    for number, document in enumerate(documents):
        at = text.find(document, start) if document.strip() else -1
        if at < 0:
            raise InputError(
                f"document {number} ({document!r:.60}) does not stand in the prompt after the one before it: quote the "
                "documents as they are there, in their order."
            )
        places.append((at, at + len(document)))
        start = at + len(document)
    return places


def _gathered(tokens: Tokens, text: str, places: list[tuple[int, int]], answer: int | None) -> Groups:
    """A token belongs to the piece that its last character is in: a leading space is a part of many tokens."""
    groups: list[list[int]] = [[] for _ in places]
    rest: list[int] = []
    written: list[int] = []
    for i, span in enumerate(tokens.spans or ()):
        if answer is not None and i >= answer:
            written.append(i)
            continue
        last = None if span is None else max(span[0], span[1] - 1)
        piece = next((k for k, (a, b) in enumerate(places) if last is not None and a <= last < b), None)
        (rest if piece is None else groups[piece]).append(i)
    named = [(" ".join(text[a:b].split()), group) for (a, b), group in zip(places, groups, strict=True) if group]
    return [*named, *([(ANSWER, written)] if written else []), *([(REST, rest)] if rest else [])]
