"""The texts of a survey: a file, a data set or a list, read again from its beginning as often as need be.

A file is streamed: once to count and hash it, once for the texts that are still to be done. So a corpus may be larger
than memory; only what can be read once, a generator, is held.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from whence.errors import InputError
from whence.reading.datasets import dataset_rows, is_dataset
from whence.reading.texts import Texts, stream_texts
from whence.surveys.shards import Sequence, sequences_of


@dataclass(frozen=True)
class SurveyCorpus:
    """Texts (or pairs) that can be read again and again, and the name of where they come from."""

    name: str
    open: Callable[[], Iterable[Any]]
    limit: int | None = None

    def __iter__(self) -> Iterator[Sequence]:
        return islice(sequences_of(self.open()), self.limit)


def corpus_of(
    texts: Any,
    text: str | None = None,
    *,
    pair: str | None = None,
    format: str | None = None,  # noqa: A002 (what users call it)
    split: str = "train",
    limit: int | None = None,
) -> SurveyCorpus:
    """What the user gave as a corpus: the path of a file or a data set's name, a Dataset, texts that were read, a list."""
    if limit is not None and limit < 1:
        raise InputError(f"limit={limit} leaves no text: give 1 or more, or None for all.")
    if isinstance(texts, str | os.PathLike):
        return SurveyCorpus(
            Path(texts).name, lambda: stream_texts(texts, text, pair=pair, format=format, split=split), limit
        )
    if isinstance(texts, Texts):
        return SurveyCorpus(Path(texts.source).name or "texts", lambda: texts.sequences, limit)
    if is_dataset(texts):
        return SurveyCorpus("dataset", lambda: dataset_rows(texts, text, pair), limit)
    if isinstance(texts, tuple) and len(texts) == 2 and all(isinstance(part, str) for part in texts):
        return SurveyCorpus("texts", lambda: [texts], limit)  # one pair of texts
    if not isinstance(texts, Iterable):
        raise InputError(f"texts is a {type(texts).__name__}: give a file, a data set or a list of texts.")
    held = list(texts)
    return SurveyCorpus("texts", lambda: held, limit)
