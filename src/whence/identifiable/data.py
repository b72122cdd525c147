"""Labelled texts to train on, and what makes them unfit for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whence.errors import InputError
from whence.reading.texts import read_texts


@dataclass(frozen=True)
class Labelled:
    """Texts with their labels (as strings), and where they came from."""

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    source: str
    empty: int = 0  # texts that were empty and left out

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.labels):
            raise InputError(f"{self.source}: {len(self.texts)} texts and {len(self.labels)} labels were given.")

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def classes(self) -> tuple[str, ...]:
        """The labels that occur, in order."""
        return tuple(sorted(set(self.labels), key=_natural))

    def check_trainable(self) -> None:
        """Refuse data that nothing can be learned from."""
        if not self.texts:
            raise InputError(f"{self.source} holds no texts.")
        if len(self.classes) < 2:
            raise InputError(
                f"{self.source} holds one class only, {self.classes[0]!r}, in all {len(self)} texts: a classifier "
                "needs at least two."
            )

    def check_known(self, classes: Sequence[str]) -> None:
        """Refuse labels that are not among `classes`."""
        unseen = Counter(label for label in self.labels if label not in set(classes))
        if unseen:
            shown = ", ".join(f"{label!r} ({count} texts)" for label, count in unseen.most_common(5))
            raise InputError(
                f"{self.source} has labels that do not occur in training: {shown}. Training has "
                f"{', '.join(map(repr, classes))}; "
                "give training texts with them, or leave these texts out."
            )


def _natural(label: str) -> tuple[int, float, str]:
    try:
        return (0, float(label), label)
    except ValueError:
        return (1, 0.0, label)


def read_labelled(
    path: str | Path,
    text: str | None = None,
    label: str = "label",
    *,
    skip_empty: bool = False,
    split: str = "train",
    limit: int | None = None,
) -> Labelled:
    """Labelled texts of whatever `whence.reading.texts.read_texts` reads: CSV, TSV, JSONL, Parquet, a name for `datasets`.

    `text`, `label`: the columns. An empty text is refused by its row, or with `skip_empty` left out and counted.
    """
    found = read_texts(path, text, label, split=split, limit=limit)
    kept: list[tuple[str, str]] = []
    for number, (one, mark) in enumerate(zip(found.texts, found.labels or (), strict=True), 1):
        if not one.strip():
            if not skip_empty:
                raise InputError(
                    f"row {number} of {found.source!r} has an empty text ({one!r}). Fill it in, or leave such rows "
                    "out with skip_empty=True (--skip-empty)."
                )
            continue
        if mark is None or mark != mark or str(mark).strip() == "":  # NaN is not equal to itself
            raise InputError(f"row {number} of {found.source!r} has no {label}: label it or remove the row.")
        kept.append((one, _label(mark)))
    texts, labels = tuple(t for t, _ in kept), tuple(m for _, m in kept)
    return Labelled(texts, labels, found.source, len(found) - len(kept))


def _label(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # 1.0 and 1 are one label; a column with a gap in it is read as floats
    return str(value).strip()
