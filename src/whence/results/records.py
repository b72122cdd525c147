"""Records that are appended one by one and survive a kill: JSON lines, each with a hash of itself.

The first line is the identity of the run. A line that a kill cut short is the last one and is dropped; a damaged line
before it is refused with its number. What was appended is on the disk before `append` returns. A run that came to its
end says so in a last line.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from whence.errors import InputError
from whence.results.files import (
    is_regular_file,
    make_folder,
    parse_json,
    regular_target,
    write_atomically,
    write_problem,
)
from whence.results.run_identity import RunIdentity

FINISHED = "finished"  # the one key of the last line of a run that came to its end


class Records:
    """The records of one run in one file; opened again by the same run, it goes on after the last whole one.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Records(f"{folder.name}/r.jsonl", RunIdentity("survey")) as records:
    ...     records.append({"text": 0, "share": 0.5})
    >>> with Records(f"{folder.name}/r.jsonl", RunIdentity("survey")) as records:
    ...     list(records)
    [{'text': 0, 'share': 0.5}]
    """

    def __init__(self, path: str | os.PathLike[str], identity: RunIdentity) -> None:
        self.path = regular_target(path)
        make_folder(self.path.parent)
        self._records: list[Any] = []
        self.finished: list[str] | None = None
        """The keys of the records, where the run came to its end."""
        whole = self._read(identity) if self.path.exists() else 0
        try:
            # Unbuffered: what could not be written would wait in a buffer, and be written or refused again at the close.
            self._file = self.path.open("r+b" if self.path.exists() else "wb", buffering=0)
            self._file.truncate(whole)
            self._file.seek(whole)
        except OSError as problem:
            raise write_problem(problem, path, "Choose a file that can be written.") from problem
        if whole == 0:
            self._write(identity.to_dict())

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._records)

    def append(self, record: Any) -> None:
        """Add a record (plain data); it is on the disk when this returns, or was never there."""
        self._write(record)
        self._records.append(json.loads(json.dumps(record)))

    def finish(self, keys: list[str]) -> None:
        """Note that the run is done: the keys of its records in the order of what was asked."""
        self._write({FINISHED: keys})
        self.finished = keys

    def _write(self, content: Any) -> None:
        before = self._file.tell()
        try:
            left = memoryview(_line(content))
            while left:
                left = left[self._file.write(left) or 0 :]
            os.fsync(self._file.fileno())
        except OSError as problem:
            try:
                os.ftruncate(self._file.fileno(), before)  # shrinking needs no space
                self._file.seek(before)
            finally:
                raise write_problem(problem, self.path) from problem

    def _read(self, identity: RunIdentity) -> int:
        """Read what is there and give how many bytes of it are whole lines."""
        lines = self.path.read_bytes().split(b"\n")
        ended, whole = lines[:-1], 0  # what follows the last line end was cut short
        for number, line in enumerate(ended, 1):
            try:
                content = _content(line)
                if number == 1:
                    there = RunIdentity.from_dict(content)
            except ValueError as problem:
                if number == len(ended) and number > 1 and not lines[-1]:
                    return whole  # a line whose end reached the disk before its middle did
                raise InputError(
                    f"{str(self.path)!r}, line {number}, is damaged ({problem}): remove the file to run again."
                ) from problem
            if number == 1:
                identity.refuse_other(there, self.path)
            elif _is_end(content):
                self.finished = content[FINISHED]
            else:
                self._records.append(content)
            whole += len(line) + 1
        return whole


def read_records(
    path: str | os.PathLike[str], method: str, *, unfinished: bool = False
) -> tuple[RunIdentity, list[Any]]:
    """The identity and the records of a file of `method`, whichever run wrote it.

    A file without its last line was cut, or its run was stopped: refused, but for `unfinished`, which leaves out a
    line cut short.
    """
    source = Path(path).expanduser()
    if not is_regular_file(source):
        raise InputError(f"there is no file {str(path)!r} to load.")
    contents = []
    *lines, rest = source.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            contents.append(_content(line))
            identity = RunIdentity.from_dict(contents[0])
        except ValueError as problem:
            raise InputError(f"{str(path)!r}, line {number}, is damaged ({problem}).") from problem
    if not contents or identity.method != method:
        raise InputError(f"{str(path)!r} holds no run of {method}.")
    records = [content for content in contents[1:] if not _is_end(content)]
    whole = not rest and _is_end(contents[-1]) and len(records) == len(contents) - 2
    if not whole and not unfinished:
        raise InputError(
            f"{str(path)!r} is not whole: its run was stopped (the same command goes on with it), or the file was cut or "
            "added to since."
        )
    return identity, _in_order(records, contents[-1][FINISHED]) if whole else records


def write_records(path: str | os.PathLike[str], identity: RunIdentity, records: Sequence[Any]) -> Path:
    """All records of a run at once, whole or not at all; `Records` and `read_records` read them."""
    end = {FINISHED: [record["key"] for record in records]}
    return write_atomically(path, b"".join(map(_line, (identity.to_dict(), *records, end))))


def _in_order(records: list[Any], keys: list[str]) -> list[Any]:
    """The records by the keys of the last line, in which a record that answers for two may stand twice."""
    by_key = {record["key"]: record for record in records}
    return [by_key[key] for key in keys]


def _is_end(content: Any) -> bool:
    return isinstance(content, dict) and content.keys() == {FINISHED}


def _line(content: Any) -> bytes:
    body = json.dumps(content)
    return f"{hashlib.sha256(body.encode()).hexdigest()[:16]} {body}\n".encode()


def _content(line: bytes) -> Any:
    digest, _, body = line.partition(b" ")
    if hashlib.sha256(body).hexdigest()[:16].encode() != digest:
        raise ValueError("its hash is not that of its content")
    return parse_json(body)
