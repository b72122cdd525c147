"""Texts out of a `datasets.Dataset`: which columns hold them, and its rows as `read_texts` gives those of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from whence.errors import InputError
from whence.reading.texts import Texts, as_text, columns_chosen

LABEL_NAMES = ("label", "labels")
NAME = "the data set"


def is_dataset(thing: Any) -> bool:
    """Whether it has the named columns of a data set; a dictionary of splits is refused."""
    columns = getattr(thing, "column_names", None)
    if isinstance(columns, dict):
        first = next(iter(columns), "train")
        raise InputError(f"this data set has the splits {', '.join(map(repr, columns))}: give one, as data[{first!r}].")
    return isinstance(columns, list | tuple) and hasattr(thing, "__iter__")


def dataset_rows(data: Any, text: str | None = None, pair: str | None = None) -> Iterator[tuple[str, ...]]:
    """(text,) or (text, pair) of each row, one in memory at a time."""
    columns = columns_chosen(list(data.column_names), text, pair, NAME)
    for i, row in enumerate(data):
        yield tuple(as_text(row[column], column, i, NAME) for column in columns)


def dataset_texts(data: Any, text: str | None = None, label: str | None = None, *, pair: str | None = None) -> Texts:
    """Every row of a data set; labels from `label`, else from a column called label or labels where there is one."""
    if label is not None and label not in data.column_names:
        raise InputError(f"{NAME} has no label column {label!r}; it has {', '.join(map(repr, data.column_names))}.")
    named = label or next((name for name in LABEL_NAMES if name in data.column_names), None)
    sequences = list(dataset_rows(data, text, pair))
    if not sequences:
        raise InputError(f"{NAME} has no rows: there is no text in it.")
    return Texts(
        tuple(sequence[0] for sequence in sequences),
        None if pair is None else tuple(sequence[1] for sequence in sequences),
        None if named is None else tuple(row[named] for row in data),
        "dataset",
    )
