"""The data sets of the studies, read from a folder beside the project (`../shared/data`, or $WHENCE_DATA).

Nothing here is copied into the project; a study whose data are absent says so and stops.
"""

from __future__ import annotations

import csv
import io
import os
import random
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("WHENCE_DATA", ROOT.parent / "shared" / "data"))
WORK = Path(os.environ.get("WHENCE_WORK", Path.home() / ".cache" / "whence" / "studies"))
"""Where results and checkpoints of unfinished studies are kept, so that a stopped one goes on."""


@dataclass(frozen=True)
class Labelled:
    """Texts and labels, split into training and test."""

    name: str
    train: list[tuple[str, str]]
    test: list[tuple[str, str]]


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="latin-1").split("\n") if line.strip()]


def _label_first(path: Path) -> list[tuple[str, str]]:
    rows = [line.strip().partition(" ") for line in _lines(path)]
    return [(text.strip(), label) for label, _, text in rows if text.strip()]


def _split(name: str, rows: list[tuple[str, str]], test: int) -> Labelled:
    """A fixed split, the same for every run; a text that occurs twice is kept on one side only."""
    rows = list(dict(rows).items())
    random.Random(0).shuffle(rows)
    return Labelled(name, rows[test:], rows[:test])


def trec6() -> Labelled:
    return Labelled("TREC-6", _label_first(DATA / "trec6/train.txt"), _label_first(DATA / "trec6/test.txt"))


def sst2() -> Labelled:
    folder = DATA / "sst2-sentences"
    return Labelled("SST-2", _label_first(folder / "stsa.binary.train"), _label_first(folder / "stsa.binary.test"))


def mr() -> Labelled:
    return _split("MR", _label_first(DATA / "mr/rt-polarity.all"), 1066)


def subj() -> Labelled:
    return _split("Subj", _label_first(DATA / "subj/subj.all"), 1000)


def agnews() -> Labelled:
    train = [tuple(line.rsplit("\t", 1)) for line in _lines(DATA / "agnews/dev10k.tsv")]
    names = {"1": "World", "2": "Sports", "3": "Business", "4": "Sci/Tech"}
    with (DATA / "agnews/test.csv").open(encoding="utf-8", newline="") as file:
        test = [(description, names[label]) for label, _, description in csv.reader(file)]
    return Labelled(
        "AG News 10k", [(row[0], row[1]) for row in train if row[0].strip()], [t for t in test if t[0].strip()]
    )


def imdb() -> Labelled:
    def read(path: Path) -> list[tuple[str, str]]:
        with path.open(encoding="utf-8", newline="") as file:
            return [(row["review"].replace("<br />", " "), row["sentiment"]) for row in csv.DictReader(file)]

    return Labelled("IMDB subset", read(DATA / "imdb-subset/train.csv"), read(DATA / "imdb-subset/test.csv"))


def agreement() -> Labelled:
    """The number of the verb, from the words before it (Linzen et al. 2016); lemma-balanced singular/plural forms."""
    folder = DATA / "agreement-gulordava-linzen/linzen_testset"
    rows = []
    for text, gold in zip(
        _lines(folder / "subj_agr_filtered.text"), _lines(folder / "subj_agr_filtered.gold"), strict=True
    ):
        index, right, wrong, _ = gold.split("\t")
        words = text.split()[: int(index)]
        # English: of the two forms of a verb the singular one ends in s (is, was, has, does; runs).
        singular = right.endswith("s") and not (wrong.endswith("s") and len(wrong) > len(right))
        if words:
            rows.append((" ".join(words), "singular" if singular else "plural"))
    return _split("agreement", rows, 1500)


def imdb_like_documents() -> list[str]:
    """Long film reviews without labels (the polarity corpus of 2,000 documents)."""
    with zipfile.ZipFile(DATA / "movie-reviews-2000/movie_reviews.zip") as archive:
        names = sorted(n for n in archive.namelist() if n.endswith(".txt"))
        return [" ".join(io.TextIOWrapper(archive.open(n), "latin-1").read().split()) for n in names]


def mrpc_sentences() -> list[str]:
    rows = [
        line.split("\t") for line in (DATA / "mrpc/msr_paraphrase_train.txt").read_text("utf-8-sig").split("\n")[1:]
    ]
    return [text for row in rows if len(row) >= 5 for text in row[3:5] if text.strip()]


def snli_sentences() -> list[str]:
    return [s for name in ("s1.dev", "s2.dev") for s in dict.fromkeys(_lines(DATA / "esnli-dev-test" / name))]


def more_sentences() -> list[str]:
    """Sentences of film reviews, news, explanations, opinions and grammar examples, without labels."""
    found = [s for review, _ in imdb().train for s in re.split(r"(?<=[.!?])\s+", review)]
    with zipfile.ZipFile(DATA / "movie-reviews-2000/movie_reviews.zip") as archive:
        for name in sorted(n for n in archive.namelist() if n.endswith(".txt")):
            found += io.TextIOWrapper(archive.open(name), "latin-1").read().split("\n")  # a sentence a line
    found += [text for text, _ in agnews().test] + [text for text, _ in _label_first(DATA / "mpqa/mpqa.all")]
    for path in sorted((DATA / "esnli-dev-test").glob("*.*")):
        if path.stem not in ("SOURCE", "labels"):
            found += _lines(path)
    found += [line.split("\t")[-1] for line in _lines(DATA / "cola/train.tsv")]
    plain = _lines(DATA / "agreement-gulordava-linzen/linzen_testset/subj_agr_filtered.text")
    found += [line.removesuffix("<eos>") for line in map(str.strip, plain)]
    return [one for text in found if 2 < len((one := " ".join(text.split())).split()) < 80]


def still_more_sentences() -> list[str]:
    """News passages (RTE) and phrases of film reviews (the training part of GLUE's SST-2), without labels."""
    found = [text for line in _lines(DATA / "rte/train.tsv")[1:] for text in line.split("\t")[1:3]]
    found += [line.split("\t")[0] for line in _lines(DATA / "sst2-glue/train.tsv")[1:]]
    return [one for text in found if 2 < len((one := " ".join(text.split())).split()) < 200]


def present() -> bool:
    return DATA.is_dir()
