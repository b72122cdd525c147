"""What the studies of papers share: surveys of the same texts by several models, kept so that a stopped study goes on.

Models: MiniLM and SmolLM2 from the catalogue, bert-tiny (fine-tuned on SST-2) and stories15M where the folder beside the
project has them. `--models NAME …` takes any other: a folder, or a name of the hub where there is one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import fill
from typing import Any

import pandas as pd
import torch
from _corpora import DATA, ROOT, WORK, imdb

import whence
from whence.reading.tokenised import position_limit
from whence.surveys.result import Survey

SHARED = {name: DATA.parent / "models" / folder for name, folder in
          (("bert-tiny", "bert-tiny-sst2"), ("stories15M", "stories15M"))}  # fmt: skip
SAMPLED = {"smollm2": 8}  # rows of a text that are decided, where it is long work; elsewhere 32
MODELS = ("minilm", "bert-tiny", "stories15M", "smollm2")
TIMES = (0.5, 1.0, 1.1, 1.25, 1.6, 2.0, 4.0, 8.0)
"""Lengths of texts, in widths of a head: published ones are 64, 70, 80, 100 and 128 tokens at a width of 64."""


@dataclass(frozen=True)
class Subject:
    """A model under study, and its surveys."""

    name: str

    @cached_property
    def model(self) -> whence.Model:
        return whence.load(str(SHARED.get(self.name, self.name)))

    @property
    def title(self) -> str:
        return {"minilm": "MiniLM", "smollm2": "SmolLM2"}.get(self.name, Path(self.name).name)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """(layers, heads, d_v)"""
        trace = whence.trace(self.model, "It was late.", keep=("values",))
        return len(trace.layers), len(trace.layers[0].heads), int(trace.layers[0].values.shape[-1])

    @property
    def causal(self) -> bool:
        return "decoder" in whence.trace(self.model, "It was late, and it rained.").stacks

    def survey(self, kind: str, texts: Sequence[Any], **options: Any) -> Survey:
        """A survey of these texts, made once and kept; one of other texts or options in its folder is refused by `survey`."""
        folder = WORK / "papers" / f"{Path(self.name).name}-{kind}"
        return whence.survey(self.model, list(texts), folder, progress=True, **options)

    def by_length(self, texts: int = 200) -> Survey:
        """Film reviews cut to so many times the width of a head: at least `texts`, every one another review."""
        width = self.shape[2]
        limit = position_limit(self.model.model) or 10**6
        lengths = [n for n in (math.floor(t * width) for t in TIMES) if n <= min(limit, 512)]
        reviews = iter(dict.fromkeys(text for text, _ in (*imdb().test, *imdb().train) if len(text.split()) >= 400))
        each = -(-texts // len(lengths))
        cut = [cut_to(self.model.tokenizer, next(reviews), n) for _ in range(each) for n in lengths]
        return self.survey("by-length", cut, rows=SAMPLED.get(self.name, 32))


def cut_to(tokenizer: Any, text: str, tokens: int) -> str:
    """The first words of a text, as many as give at most so many tokens."""
    words = text.split()
    low, high = 1, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        if len(tokenizer(" ".join(words[:middle]), verbose=False)["input_ids"]) <= tokens:
            low = middle
        else:
            high = middle - 1
    return " ".join(words[:low])


def mrpc_pairs(limit: int) -> list[tuple[str, str]]:
    """Pairs of sentences of MRPC's test part: what Brunner et al. took theirs from."""
    lines = (DATA / "mrpc/msr_paraphrase_test.txt").read_text("utf-8-sig").split("\n")[1:]
    return [(row[3], row[4]) for row in (line.split("\t") for line in lines) if len(row) >= 5][:limit]


def short_sentences(tokenizer: Any, limit: int, longest: int) -> list[str]:
    """Sentences of MRPC of at most so many tokens, each once."""
    every = dict.fromkeys(sentence for pair in mrpc_pairs(10**6) for sentence in pair)
    return [s for s in every if len(tokenizer(s, verbose=False)["input_ids"]) <= longest][:limit]


def cell(row: Any, value: str = "mean", digits: int = 2) -> str:
    """ "0.48 ± 0.03": half the width of the 95 % interval over texts."""
    number = float(row[value])
    if number != number:
        return "–"
    half = (float(row["high"]) - float(row["low"])) / 2
    return f"{number:.{digits}f}" + ("" if half != half else f" ± {half:.{digits}f}")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def write_page(name: str, title: str, script: str, body: str) -> None:
    """docs/studies/NAME.md, whole or not at all."""
    note = f"<!-- Made by: python studies/{script}. Do not edit by hand. -->"
    path = ROOT / "docs" / "studies" / f"{name}.md"
    parts = [
        part if part.startswith(("|", "#", "- ", "!", "<")) else fill(part, 128) for part in body.strip().split("\n\n")
    ]
    path.with_suffix(".part").write_text("\n\n".join([f"# {title}", note, *parts]) + "\n", encoding="utf-8")
    path.with_suffix(".part").replace(path)
    print(path)


def subjects(about: str) -> list[Subject]:
    """The models that were asked for, else all that are there."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--models", nargs="+", default=None)
    names = parser.parse_args().models
    torch.set_num_threads(1)
    pd.set_option("mode.copy_on_write", True)
    return [Subject(name) for name in names or [m for m in MODELS if m not in SHARED or SHARED[m].is_dir()]]
