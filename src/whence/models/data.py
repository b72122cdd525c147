"""Reading labelled texts: CSV, TSV, JSON lines, Parquet, or a data set of the `datasets` library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whence.errors import InputError, MissingExtraError

TEXT_COLUMNS = ("text", "sentence", "review", "content", "description")
LABEL_COLUMNS = ("label", "labels", "class", "category", "sentiment")


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
                f"{self.source} holds one class only, {self.classes[0]!r}, in all {len(self)} texts: a classifier needs at least two."
            )

    def check_known(self, classes: Sequence[str]) -> None:
        """Refuse labels that are not among `classes`."""
        unseen = Counter(label for label in self.labels if label not in set(classes))
        if unseen:
            shown = ", ".join(f"{label!r} ({count} texts)" for label, count in unseen.most_common(5))
            raise InputError(
                f"{self.source} has labels that do not occur in training: {shown}. Training has {', '.join(map(repr, classes))}; "
                "give training texts with them, or leave these texts out."
            )


def _natural(label: str) -> tuple[int, float, str]:
    try:
        return (0, float(label), label)
    except ValueError:
        return (1, 0.0, label)


def read_labelled(
    path: str | Path, text: str | None = None, label: str | None = None, *, skip_empty: bool = False, split: str = "train"
) -> Labelled:
    """Labelled texts of a file (.csv, .tsv, .jsonl, .parquet), or of a data set that `datasets` can load.

    `text`, `label`: the columns; None: the usual names. An empty text is refused by its row, or with `skip_empty`
    left out and counted.
    """
    place = Path(path).expanduser()
    rows = _read_file(place) if place.exists() or place.suffix else _read_dataset(str(path), split)
    return from_rows(rows, str(path), text, label, skip_empty=skip_empty)


def from_rows(rows: Any, source: str, text: str | None, label: str | None, *, skip_empty: bool = False) -> Labelled:
    """Labelled texts of a data frame."""
    texts = _column(rows, source, text, TEXT_COLUMNS, "text")
    labels = _column(rows, source, label, LABEL_COLUMNS, "label")
    kept: list[tuple[str, str]] = []
    empty = 0
    for number, (one, mark) in enumerate(zip(rows[texts].tolist(), rows[labels].tolist(), strict=True)):
        if not isinstance(one, str) or not one.strip():
            empty += 1
            if not skip_empty:
                raise InputError(
                    f"row {number + 1} of {source} has an empty {texts} ({one!r}). Fill it in, or leave such rows out with "
                    "skip_empty=True (--skip-empty)."
                )
            continue
        if mark is None or mark != mark or str(mark).strip() == "":  # NaN is not equal to itself
            raise InputError(f"row {number + 1} of {source} has no {labels}: label it or remove the row.")
        kept.append((one, _label(mark)))
    return Labelled(tuple(t for t, _ in kept), tuple(m for _, m in kept), source, empty)


def _label(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # 1.0 and 1 are one label; a column with a gap in it is read as floats
    return str(value).strip()


def _column(rows: Any, source: str, asked: str | None, usual: tuple[str, ...], what: str) -> str:
    found = [str(name) for name in rows.columns]
    if asked is not None:
        if asked not in found:
            raise InputError(f"{source} has no column {asked!r}; it has: {', '.join(map(repr, found))}. Name one with --{what}.")
        return asked
    for name in usual:
        if name in found:
            return name
    raise InputError(
        f"{source} has no column called {' or '.join(map(repr, usual))}; it has: {', '.join(map(repr, found))}. Name the {what} "
        f"column with --{what}."
    )


def _read_file(path: Path) -> Any:
    import pandas as pd

    if not path.is_file():
        raise InputError(f"there is no file {str(path)!r}.")
    kind = path.suffix.lower()
    try:
        if kind in (".csv", ".tsv"):
            return pd.read_csv(path, sep="," if kind == ".csv" else "\t", keep_default_na=False, dtype=str)
        if kind in (".jsonl", ".ndjson"):
            return pd.read_json(path, lines=True, dtype=False, convert_dates=False)
        if kind == ".parquet":
            return pd.read_parquet(path)
    except ImportError as problem:
        raise MissingExtraError("reading Parquet needs pyarrow: pip install 'whence[train]'") from problem
    except (ValueError, UnicodeDecodeError, OSError) as problem:
        raise InputError(f"{str(path)!r} could not be read as {kind.lstrip('.')}: {problem}") from problem
    raise InputError(f"{str(path)!r}: its ending {kind!r} is none of .csv, .tsv, .jsonl, .parquet.")


def _read_dataset(name: str, split: str) -> Any:
    try:
        import datasets
    except ImportError as problem:
        raise MissingExtraError(
            f"{name!r} is no file; to load it as a data set by name, install datasets: pip install 'whence[train]'"
        ) from problem
    try:
        found = datasets.load_dataset(name, split=split)
    except (OSError, ValueError) as problem:
        said = " ".join(str(problem).split())[:200]
        raise InputError(f"{name!r} is no file here and could not be loaded as a data set ({said}).") from problem
    frame = found.to_pandas()
    for column, feature in found.features.items():
        names = getattr(feature, "names", None)
        if names:
            frame[column] = [names[i] for i in frame[column]]
    return frame
