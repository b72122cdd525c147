"""A shard: some texts of the corpus in their order, and the three Parquet files that become of them.

Shards are fixed by their size alone, whoever computes them. Their bytes depend on the texts, the model and the settings
only: one thread, batches fixed by the shard, samples seeded by content, no time and no name of a machine in the files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from whence.errors import InputError, MissingExtraError
from whence.results.files import is_regular_file, make_folder, write_atomically
from whence.results.run_identity import hash_texts
from whence.results.tensor_file import BLANK

TABLES = ("heads", "layers", "texts")
"""The folders of a survey, in the order in which a shard's files are written: the last one says that it is done."""

KEY = b"whence.shard"
HASH = re.compile(rb"whence\.sha256\x18@[0-9a-f]{64}")  # in the footer: the name, and the mark and length of the value
MANTISSA = 13  # bits kept of a number's 23: relative error 6e-5, and files half as large

Sequence = tuple[str, ...]  # a text, or a text and its pair
Rows = Mapping[str, list[Any] | np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Shard:
    """Texts number `first` … of the corpus; `run` is the digest of the run's identity."""

    number: int
    first: int
    sequences: tuple[Sequence, ...]
    run: str

    @property
    def key(self) -> str:
        """SHA-256 of all that decides the shard's files."""
        return hashlib.sha256(f"{self.run}\0{self.number}\0{hash_texts(self.sequences)}".encode()).hexdigest()


def shards_of(corpus: Iterable[Sequence], size: int, run: str) -> Iterator[Shard]:
    """The corpus in shards of `size` texts; the last may be smaller."""
    texts = iter(corpus)
    for number in count():
        sequences = tuple(islice(texts, size))
        if not sequences:
            return
        yield Shard(number, number * size, sequences, run)


def file_of(folder: Path, table: str, number: int) -> Path:
    """Where a shard's rows of one table are."""
    return folder / table / f"{number:06d}.parquet"


def arrow() -> Any:
    """pyarrow with its Parquet part, or an error that names the extra."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as problem:
        raise MissingExtraError(
            "a survey is kept in Parquet files, which need pyarrow: pip install 'whence[scale]'"
        ) from (problem)
    return pyarrow


def as_parquet(rows: Rows, key: str) -> bytes:
    """One table as the bytes of a zstd Parquet file. Numbers keep 13 bits of mantissa (6e-5 of their size)."""
    pa = arrow()
    columns, floats = {}, []
    for name, values in rows.items():
        column = np.asarray(values) if not isinstance(values, list) or name not in ("reason", "content") else None
        if column is None:
            columns[name] = pa.array(values, pa.string())
        elif column.dtype.kind == "f":
            columns[name] = pa.array(rounded(column), from_pandas=False)
            floats.append(name)
        else:
            columns[name] = pa.array(column)
    table = pa.table(columns).replace_schema_metadata({KEY: key.encode()})
    sink = pa.BufferOutputStream()
    with pa.parquet.ParquetWriter(
        sink, table.schema, compression="zstd", compression_level=9, write_statistics=False,
        use_dictionary=[name for name in columns if name not in floats], use_byte_stream_split=floats,
    ) as writer:  # fmt: skip
        writer.write_table(table)
        writer.add_key_value_metadata({"whence.sha256": BLANK.decode()})
    data = bytes(sink.getvalue().to_pybytes())
    start, end = _place_of_hash(data)
    return data[:start] + hashlib.sha256(data).hexdigest().encode() + data[end:]


def is_whole(data: bytes) -> bool:
    """Whether a file is what `as_parquet` made: SHA-256 of its bytes, with zeros in the place of the hash, is the hash."""
    start, end = _place_of_hash(data)
    return hashlib.sha256(data[:start] + BLANK + data[end:]).hexdigest().encode() == data[start:end]


def _place_of_hash(data: bytes) -> tuple[int, int]:
    found = HASH.findall(data)
    if len(found) != 1:
        return 0, 0
    start = data.index(found[0]) + len(found[0]) - len(BLANK)
    return start, start + len(BLANK)


def rounded(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """float32 rounded to `MANTISSA` bits; NaN and infinities stay.

    >>> rounded(np.array([0.1, 1.0, np.nan])).tolist()
    [0.09999847412109375, 1.0, nan]
    """
    single = np.ascontiguousarray(values, dtype=np.float32)
    drop = 23 - MANTISSA
    bits = single.view(np.uint32)
    near = (bits + np.uint32((1 << (drop - 1)) - 1) + ((bits >> np.uint32(drop)) & np.uint32(1))) & ~np.uint32(
        (1 << drop) - 1
    )
    return np.where(np.isfinite(single), near.view(np.float32), single).astype(np.float32)


def write_shard(folder: Path, number: int, files: Mapping[str, bytes]) -> None:
    """Put a shard's files in their folders, each whole or not at all; `texts` last."""
    for table in TABLES:
        write_atomically(file_of(folder, table, number), files[table])


def is_done(folder: Path, shard: Shard) -> bool:
    """Whether the shard's files are there, whole, and made of these very texts."""
    pa = arrow()
    for table in reversed(TABLES):
        path = file_of(folder, table, shard.number)
        try:
            data = path.read_bytes() if is_regular_file(path) else b""
            found = pa.parquet.read_schema(pa.BufferReader(data)).metadata or {} if is_whole(data) else {}
        except (pa.ArrowException, OSError):
            return False
        if found.get(KEY, b"").decode() != shard.key:
            return False
    return True


def prepare_folders(folder: Path) -> None:
    """The folders of the tables; what a killed run left half-written goes."""
    for table in TABLES:
        made = make_folder(folder / table)
        for left in made.glob(".whence-*.part"):
            left.unlink(missing_ok=True)


def sequences_of(entries: Iterable[Any]) -> Iterator[Sequence]:
    """Each entry as a tuple of one or two texts; anything else is refused with its number."""
    for i, entry in enumerate(entries):
        given = (entry,) if isinstance(entry, str) else entry
        if (
            not isinstance(given, tuple | list)
            or not 1 <= len(given) <= 2
            or not all(isinstance(t, str) for t in given)
        ):
            raise InputError(f"text {i} is {entry!r:.60}, not a text (or a pair of texts).")
        yield tuple(given)
