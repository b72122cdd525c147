"""The texts of the faithfulness study: sentences, long reviews, passages with rationales, and contrasts of verb forms."""

from __future__ import annotations

import json
import random
import re
import zipfile
from dataclasses import dataclass
from typing import Any

import _corpora as corpora

NUMBERS = {"positive": "1", "negative": "0"}
"""SST-2's labels."""


def sentences(limit: int, shortest: int = 2, longest: int = 60) -> list[str]:
    """The first test sentences of so many words."""
    return [text for text, _ in corpora.sst2().test if shortest <= len(text.split()) <= longest][:limit]


def reviews(tokenizer: Any, tokens: int, limit: int) -> list[str]:
    """The beginnings of IMDB reviews, cut at so many tokens (special ones included)."""
    cut = []
    for text, _ in corpora.imdb().test:
        spans = tokenizer(text, truncation=True, max_length=tokens, return_offsets_mapping=True)["offset_mapping"]
        if len(spans) == tokens and len(cut) < limit:
            cut.append(text[: max(end for _, end in spans)])
    return cut


def leaves() -> dict[str, list[tuple[str, str]]]:
    """SST's own labels of words, (label 0 … 4, word), by the sentence without spaces."""
    trees = {}
    for line in (corpora.DATA / "sst-trees" / "test.txt").read_text("utf-8").splitlines():
        words = re.findall(r"\((\d) ([^()]+)\)", line)
        trees["".join(w for _, w in words).lower().replace(" ", "")] = words
    return trees


@dataclass(frozen=True)
class Passage:
    """A part of a review with the stretches that people marked (0/1 for each word), and the review's label."""

    text: str
    marks: tuple[int, ...]
    label: str


def passages(limit: int, longest: int = 70) -> list[Passage]:
    """ERASER's movie reviews: whole sentences around the first marked stretch, up to `longest` words."""
    found = []
    with zipfile.ZipFile(corpora.DATA / "eraser-movies" / "docs.zip") as archive:
        for name in ("test.jsonl", "val.jsonl"):
            for line in (corpora.DATA / "eraser-movies" / name).read_text("utf-8").splitlines():
                row = json.loads(line)
                evidence = [one for group in row["evidences"] for one in group]
                if not evidence:
                    continue
                document = archive.read(f"data/movies/docs/{evidence[0]['docid']}").decode()
                made = _passage(document, evidence, longest)
                if made is not None:
                    found.append(Passage(*made, {"POS": "positive", "NEG": "negative"}[row["classification"]]))
    random.Random(0).shuffle(found)
    return found[:limit]


def _passage(document: str, evidence: list[dict[str, Any]], longest: int) -> tuple[str, tuple[int, ...]] | None:
    lines = [line.split() for line in document.split("\n")]
    starts = [sum(map(len, lines[:i])) for i in range(len(lines) + 1)]
    words = [w for line in lines for w in line]
    first, last = evidence[0]["start_sentence"], evidence[0]["end_sentence"]
    while last < len(lines) and starts[last + 1] - starts[first] <= longest:
        last += 1
    begin, end = starts[first], starts[last]
    marks = [0] * len(words)
    for one in evidence:
        marks[one["start_token"] : one["end_token"]] = [1] * (one["end_token"] - one["start_token"])
    right = " ".join(words[evidence[0]["start_token"] : evidence[0]["end_token"]]) == evidence[0]["text"]
    if not right or not 10 <= end - begin <= longest or not 0 < sum(marks[begin:end]) < end - begin:
        return None
    return " ".join(words[begin:end]), tuple(marks[begin:end])


@dataclass(frozen=True)
class Contrast:
    """A text, the token that should follow it and the one that should not; the position of the subject, where known."""

    text: str
    good: int
    bad: int
    subject: int | None = None


def blimp(tokenizer: Any, limit: int) -> list[Contrast]:
    """BLiMP, distractor_agreement_relational_noun: "A niece of most senators": has, not have; the subject is before "of"."""
    with zipfile.ZipFile(corpora.DATA / "blimp" / "BLiMP.zip") as archive:
        lines = archive.read("data/distractor_agreement_relational_noun.jsonl").decode().splitlines()
    rows = [json.loads(line) for line in lines]
    given = [(r["one_prefix_prefix"], r["one_prefix_word_good"], r["one_prefix_word_bad"]) for r in rows]
    return [c for c in (_contrast(tokenizer, *one) for one in given) if c is not None][:limit]


def agreement(tokenizer: Any, limit: int, longest: int = 12) -> list[Contrast]:
    """Linzen et al.'s natural sentences up to the verb, of at most `longest` words."""
    folder = corpora.DATA / "agreement-gulordava-linzen" / "linzen_testset"
    texts, golds = ((folder / f"subj_agr_filtered.{kind}").read_text("utf-8").splitlines() for kind in ("text", "gold"))
    given = []
    for text, gold in zip(texts, golds, strict=True):
        index, right, wrong, _ = gold.split("\t")
        words = text.split()[: int(index)]
        if 4 <= len(words) <= longest and "<unk>" not in words:
            given.append((" ".join(words), right, wrong))
    random.Random(0).shuffle(given)
    return [c for c in (_contrast(tokenizer, *one, subject=False) for one in given) if c is not None][:limit]


def _contrast(tokenizer: Any, text: str, good: str, bad: str, subject: bool = True) -> Contrast | None:
    """None where a form is more than one token."""
    before = tokenizer(text)["input_ids"]
    ids = []
    for word in (good, bad):
        after = tokenizer(f"{text} {word}")["input_ids"]
        if after[: len(before)] != before or len(after) != len(before) + 1:
            return None
        ids.append(int(after[-1]))
    words = text.split()
    at = words.index("of") - 1 if subject and "of" in words else None
    return Contrast(text, *ids, subject=at)
