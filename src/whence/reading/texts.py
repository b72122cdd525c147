"""Texts from a file or a data set: CSV, TSV, JSONL, Parquet, plain text (one a line), or a name that `datasets` knows.

One small reader for everything that takes many texts. It guesses the column only where the guess is plain, and a wrong
column is answered with the list of those that are there.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from whence.errors import InputError, MissingExtraError, UnavailableError
from whence.results.short_repr import short_repr

FORMATS = ("csv", "tsv", "jsonl", "json", "parquet", "text", "datasets")
SUFFIXES = {
    ".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json",
    ".parquet": "parquet", ".pq": "parquet", ".txt": "text", "": "text",
}  # fmt: skip
TEXT_NAMES = ("text", "sentence", "content", "document", "review")
LINE = "text"  # the one column of a plain text file

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Texts:
    """Texts in their order, with the second text and the label of each where they were asked for."""

    __repr__ = short_repr

    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None = None
    labels: tuple[Any, ...] | None = None
    source: str = ""

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)

    @property
    def sequences(self) -> list[tuple[str, ...]]:
        """(text,) or (text, pair), one for each."""
        if self.pairs is None:
            return [(text,) for text in self.texts]
        return list(zip(self.texts, self.pairs, strict=True))


def read_texts(
    path: str | os.PathLike[str],
    text: str | None = None,
    label: str | None = None,
    *,
    pair: str | None = None,
    format: str | None = None,  # noqa: A002 (what users call it)
    split: str = "train",
    limit: int | None = None,
) -> Texts:
    """Texts (and labels, and second texts) from a file or a data set.

    `path`: a file, or a name for `datasets` ("glue:mrpc": name and configuration). `text`, `label`, `pair`: the names
    of the columns; `text=None` takes the only column, or one called text, sentence, content, document or review.
    `format`: one of csv, tsv, jsonl, json, parquet, text, datasets; None: by the file's ending. `split`: of a data set.
    `limit`: only so many rows, from the start. An empty cell is an empty text: nothing is dropped here.

    >>> import tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "two.csv"
    >>> _ = file.write_text("text,label\\nA fine day.,1\\nA wet one.,0\\n")
    >>> data = read_texts(file, label="label")
    >>> data.texts, data.labels
    (('A fine day.', 'A wet one.'), ('1', '0'))
    """
    kind = _format(path, format)
    if limit is not None and limit < 1:
        raise InputError(f"limit={limit} leaves no text: give 1 or more, or None for all.")
    columns, rows = _READERS[kind](path, split)
    name = str(path)
    chosen = _text_column(text, columns, name)
    for what, column in (("label", label), ("pair", pair)):
        if column is not None and column not in columns:
            raise InputError(f"{name!r} has no {what} column {column!r}; {_columns_in_words(columns)}")
    taken = list(islice(rows, limit))
    if not taken:
        raise InputError(
            f"{name!r} holds no texts: it is empty{' below its header' if kind in ('csv', 'tsv') else ''}."
        )
    return Texts(
        tuple(as_text(row.get(chosen), chosen, i, name) for i, row in enumerate(taken)),
        None if pair is None else tuple(as_text(row.get(pair), pair, i, name) for i, row in enumerate(taken)),
        None if label is None else tuple(row.get(label) for row in taken),
        name,
    )


def stream_texts(
    path: str | os.PathLike[str],
    text: str | None = None,
    *,
    pair: str | None = None,
    format: str | None = None,  # noqa: A002 (what users call it)
    split: str = "train",
) -> Iterator[tuple[str, ...]]:
    """(text,) or (text, pair) of each row as `read_texts` reads them, one after the other.

    Nothing but the row at hand is in memory (format "json" excepted, which is one value)."""
    columns, rows = _READERS[_format(path, format)](path, split)
    name = str(path)
    chosen = columns_chosen(columns, text, pair, name)
    for i, row in enumerate(rows):
        yield tuple(as_text(row.get(column), column, i, name) for column in chosen)


def _format(path: str | os.PathLike[str], given: str | None) -> str:
    if given is not None:
        if given not in FORMATS:
            raise InputError(f"format={given!r} is not known; choose one of {', '.join(FORMATS)}.")
        if given == "datasets":
            return given
    file = Path(path).expanduser()
    try:
        kind = file.stat().st_mode
    except (OSError, ValueError):  # also a name that is too long, or has a NUL in it
        kind = 0
    if stat.S_ISDIR(kind):
        raise InputError(f"{str(path)!r} is a folder; give a file, or the name of a data set.")
    if stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
        raise InputError(f"{str(path)!r} is a device; give a file, or the name of a data set.")
    if not kind:
        if given is None and file.suffix.lower() not in SUFFIXES.keys() - {""} and not file.is_absolute():
            return "datasets"
        raise InputError(f"there is no file {str(path)!r}.")
    if given is not None:
        return given
    if file.suffix.lower() not in SUFFIXES:
        raise InputError(
            f"{str(path)!r} ends in {file.suffix!r}, which says nothing of how to read it: pass format= (--format), "
            f"one of {', '.join(FORMATS[:-1])}."
        )
    return SUFFIXES[file.suffix.lower()]


def columns_chosen(columns: Sequence[str], text: str | None, pair: str | None, name: str) -> list[str]:
    """The names of the columns of texts and, where asked for, second texts; refused where they are not there."""
    names = [_text_column(text, columns, name)]
    if pair is not None:
        if pair not in columns:
            raise InputError(f"{name!r} has no pair column {pair!r}; {_columns_in_words(columns)}")
        names.append(pair)
    return names


def _text_column(asked: str | None, columns: Sequence[str], name: str) -> str:
    if asked is not None:
        if asked not in columns:
            raise InputError(f"{name!r} has no text column {asked!r}; {_columns_in_words(columns)}")
        return asked
    if len(columns) == 1:
        return columns[0]
    named = {column.strip().lower(): column for column in columns}
    for known in TEXT_NAMES:
        if known in named:
            return named[known]
    raise InputError(
        f"{name!r}: which column holds the texts? Name it with text= (--text); {_columns_in_words(columns)}"
    )


def _is_text(value: str) -> bool:
    """Whether it can be written: half of a surrogate pair is no character."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _columns_in_words(columns: Sequence[str]) -> str:
    return f"it has the columns {', '.join(map(repr, columns))}." if columns else "it has no columns."


def as_text(value: Any, column: str, row: int, name: str) -> str:
    """A cell as a text: nothing is the empty text, and what is no text is refused."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(f"{name!r}: row {row} of the column {column!r} is {value!r:.60}, not a text.")
    return value


# -- one reader per format: the columns, and the rows as they come -----------------------------------------------------


def _lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """The file's lines, one in memory at a time, each with its line end written \\n.

    Lines end at line ends only: str.splitlines would also cut at form feeds and U+2028. A carriage return alone is
    refused: it may be a line end or not.
    """
    offset = 0
    try:
        with Path(path).expanduser().open("rb") as file:
            for number, data in enumerate(file, 1):
                line = data.decode("utf-8-sig" if number == 1 else "utf-8")
                if line.endswith("\r\n"):
                    line = line[:-2] + "\n"
                if "\0" in line:
                    raise InputError(
                        f"{str(path)!r}, line {number}, has a NUL character in it: it is no text, or UTF-16; save it as UTF-8."
                    )
                if "\r" in line:
                    raise InputError(
                        f"{str(path)!r}, line {number}, has a carriage return without a line feed: save the file with the "
                        "line ends of Unix or Windows, or write \\r inside a JSON text."
                    )
                yield line
                offset += len(data)
    except UnicodeDecodeError as problem:
        raise InputError(
            f"{str(path)!r}, line {number}, is not UTF-8 (byte {offset + problem.start}): save it as UTF-8."
        ) from problem
    except OSError as problem:
        raise InputError(f"{str(path)!r} cannot be read: {problem.strerror}.") from problem


def _lines_of(path: str | os.PathLike[str], split: str) -> tuple[list[str], Iterator[Row]]:  # noqa: ARG001
    return [LINE], ({LINE: line.removesuffix("\n")} for line in _lines(path))


def _csv(path: str | os.PathLike[str], split: str) -> tuple[list[str], Iterator[Row]]:  # noqa: ARG001
    return _table(path, _fields(path, ",", quoted=True))


def _tsv(path: str | os.PathLike[str], split: str) -> tuple[list[str], Iterator[Row]]:  # noqa: ARG001
    """Most TSV corpora (GLUE, MRPC) use no quoting, spreadsheets do: taken as unquoted where that fits the header."""
    fits = all_quoted = True
    width = None
    for _, fields in _fields(path, "\t", quoted=False):
        width = width or len(fields)
        fits = fits and len(fields) == width
        all_quoted = all_quoted and all(f.startswith('"') and f.endswith('"') for f in fields)
    return _table(path, _fields(path, "\t", quoted=not fits or all_quoted))


def _fields(path: str | os.PathLike[str], mark: str, *, quoted: bool) -> Iterator[tuple[int, list[str]]]:
    """(line number, fields) of every line that is not empty."""
    csv.field_size_limit(1 << 30)
    reader = csv.reader(
        _lines(path), delimiter=mark, quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE, strict=True
    )
    try:
        for fields in reader:
            if fields:
                yield reader.line_num, fields
    except csv.Error as problem:
        raise InputError(
            f"{str(path)!r}, line {reader.line_num}: {problem}. Quote texts that begin with a quotation mark, double the "
            "marks inside, and close every quotation."
        ) from problem


def _table(path: str | os.PathLike[str], lines: Iterator[tuple[int, list[str]]]) -> tuple[list[str], Iterator[Row]]:
    header = next(lines, None)
    if header is None:
        raise InputError(f"{str(path)!r} is empty: a table needs a header line with the names of its columns.")
    columns = [name.strip() for name in header[1]]
    _refuse_repeated(path, columns, f", line {header[0]}")

    def rows() -> Iterator[Row]:
        for line, fields in lines:
            if len(fields) != len(columns):
                raise InputError(
                    f"{str(path)!r}, line {line}: {len(fields)} fields where the header has {len(columns)}. Quote "
                    "texts that contain the separator or a line end."
                )
            yield dict(zip(columns, fields, strict=True))

    return columns, rows()


def _refuse_repeated(path: str | os.PathLike[str], columns: Sequence[str], where: str = "") -> None:
    repeated = [name for name, number in Counter(columns).items() if number > 1]
    if repeated:
        raise InputError(
            f"{str(path)!r}{where}: the column {repeated[0]!r} is there {columns.count(repeated[0])} times: give every "
            "column a name of its own."
        )


def _jsonl(path: str | os.PathLike[str], split: str) -> tuple[list[str], Iterator[Row]]:  # noqa: ARG001
    """Read once for the names of the columns, which any line may add to, and once for the rows."""

    def rows() -> Iterator[Row]:
        for number, line in enumerate(_lines(path), 1):
            if line.strip():
                yield _object(path, f"line {number}", _parsed(line, f"{str(path)!r}, line {number},"))

    return list(dict.fromkeys(key for row in rows() for key in row)), rows()


def _once(pairs: list[tuple[str, Any]]) -> Row:
    """An object of JSON; a name that is there twice is refused, as a column would be."""
    row = dict(pairs)
    if len(row) < len(pairs):
        repeated = next(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
        raise ValueError(f"the name {repeated!r} is there twice in one object")
    return row


def _parsed(text: str, where: str, advice: str = "") -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise InputError(f"{where} is JSON that is nested too deep: give texts, or objects with texts.") from None
    except ValueError as problem:
        raise InputError(f"{where} is not JSON: {problem}{advice}") from problem


def _json(path: str | os.PathLike[str], split: str) -> tuple[list[str], Iterator[Row]]:  # noqa: ARG001
    rows = _parsed("".join(_lines(path)), repr(str(path)), ". One object a line is format='jsonl'.")
    if not isinstance(rows, list):
        raise InputError(f"{str(path)!r} holds a {type(rows).__name__}; a list of texts or of objects is needed.")
    made = [_object(path, f"entry {i}", row) for i, row in enumerate(rows)]
    return list(dict.fromkeys(key for row in made for key in row)), iter(made)


def _object(path: str | os.PathLike[str], where: str, row: Any) -> Row:
    """An object as a row, a text as a row of one column; `where` it stands in the file, in words."""
    parsed = {LINE: row} if isinstance(row, str) else row
    if not isinstance(parsed, dict):
        raise InputError(f"{str(path)!r}: {where} is {parsed!r:.60}; a text or an object is needed.")
    for value in (*parsed, *parsed.values()):
        if isinstance(value, str) and not _is_text(value):
            raise InputError(
                f"{str(path)!r}, {where}, holds half a surrogate pair ({value!a:.60}), which is no character: "
                "write the whole pair, or leave it out."
            )
    return parsed


def _parquet(path: str | os.PathLike[str], split: str) -> tuple[list[str], Iterator[Row]]:  # noqa: ARG001
    arrow = _extra("pyarrow", f"Reading {str(path)!r}")
    parquet = importlib.import_module("pyarrow.parquet")

    def refusal(what: str, problem: Exception) -> InputError:
        return InputError(
            f"{str(path)!r} is {what} ({' '.join(str(problem).split())[:200]}): make or copy the file again."
        )

    try:
        file = parquet.ParquetFile(Path(path).expanduser(), page_checksum_verification=True)
    except (arrow.ArrowException, OSError) as problem:
        raise refusal("not a Parquet file", problem) from problem

    def rows() -> Iterator[Row]:
        read = 0
        try:
            with file:
                for batch in file.iter_batches():
                    for row in batch.to_pylist():
                        read += 1
                        yield row
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as problem:
            raise refusal(f"damaged after row {read}", problem) from problem

    names = list(file.schema_arrow.names)
    _refuse_repeated(path, names)
    return names, rows()


def _datasets(path: str | os.PathLike[str], split: str) -> tuple[list[str], Iterator[Row]]:
    name, _, configuration = str(path).partition(":")
    library = _extra("datasets", f"There is no file {str(path)!r}, and taking it as the name of a data set")
    try:
        data = library.load_dataset(name, configuration or None, split=split)
    except (OSError, ValueError) as problem:  # what `datasets` raises: not found, no network, no such split
        said = " ".join(str(problem).split())[:200]
        raise UnavailableError(
            f"{str(path)!r} is no file here, and no data set of that name (split {split!r}) could be loaded: {said}"
        ) from problem
    return list(data.column_names), iter(data)


def _extra(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        raise MissingExtraError(f"{what} needs {module}: pip install 'whence[train]'") from problem


_READERS = {
    "csv": _csv, "tsv": _tsv, "jsonl": _jsonl, "json": _json, "parquet": _parquet, "text": _lines_of,
    "datasets": _datasets,
}  # fmt: skip
