"""Writing files whole or not at all, and saying in one sentence why one could not be written or read."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence.errors import InputError, UnavailableError, WhenceError


def write_atomically(path: str | os.PathLike[str], *data: bytes | memoryview) -> Path:
    """Write a file so that it is either the whole new one or what was there before. A link's target is replaced.

    Refused: what is there and is no regular file (a device, a FIFO, a folder), and names that no file can have.
    """
    target = regular_target(path)
    part = target.with_name(f".whence-{secrets.token_hex(8)}.part")
    try:
        handle = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except OSError as problem:
        raise write_problem(problem, path, "Choose a folder that exists and can be written.") from problem
    try:
        with os.fdopen(handle, "wb") as file:
            for piece in data:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
        _sync_folder(target.parent)
    except OSError as problem:
        raise write_problem(problem, path) from problem
    finally:
        part.unlink(missing_ok=True)
    return target


def regular_target(path: str | os.PathLike[str]) -> Path:
    """Where a file is to be written: links followed, `~` expanded; an InputError where no regular file can be."""
    name = os.fspath(path)
    refuse_name(name)
    try:
        target = Path(os.path.realpath(Path(name).expanduser()))
        kind = target.stat().st_mode
    except FileNotFoundError:
        return target
    except (OSError, RuntimeError) as problem:
        raise write_problem(problem, path, "Choose another name.") from problem
    if not stat.S_ISREG(kind):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        raise InputError(
            f"{name!r} is {kinds.get(stat.S_IFMT(kind), 'a device')}, not a file: nothing was written. Give the name of "
            "a file."
        )
    return target


def refuse_name(name: str) -> None:
    """Raise an InputError for a name that no file can have: none at all, a NUL, half a character."""
    if not name:
        raise InputError("the name of the file or folder is empty: give one ('.' for the folder you are in).")
    if "\0" in name:
        raise InputError(f"{name!r} has a NUL character in it: no file can be called that.")
    try:
        os.fsencode(name)
    except UnicodeEncodeError as problem:
        raise InputError(
            f"{name!r} has half a character ({name[problem.start]!r}) in it: no file can be called that."
        ) from None


def is_regular_file(path: Path) -> bool:
    """Whether a file is there that can be read to its end: no folder, FIFO or device, and no name that cannot be."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or a link that leads to itself
        return False


def write_problem(problem: Exception, path: str | os.PathLike[str], advice: str = "") -> WhenceError:
    """One sentence about a file that could not be written; a full disk is told apart."""
    if disk_is_full(problem):
        return UnavailableError(
            f"{os.fspath(path)!r} could not be written: the disk is full. What was there before is untouched; free some "
            "space and try again."
        )
    reason = (problem.strerror if isinstance(problem, OSError) else None) or str(problem)
    if advice:
        return InputError(f"{os.fspath(path)!r} cannot be written: {reason}. {advice}")
    return WhenceError(f"{os.fspath(path)!r} could not be written ({reason}); what was there before is untouched.")


WRITERS_WORDS = ("PytorchStreamWriter", "write failed", "iostream error", "inline_container")
"""What torch says of a file that it could not write, by how much of it was still in a buffer."""


def disk_is_full(problem: Exception) -> bool:
    """Whether a write failed for want of space (or of the size a file may have).

    torch and safetensors have errors of their own for it, which only their message tells apart.
    """
    if isinstance(problem, OSError) and problem.errno is not None:
        return problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    said = str(problem)
    system = any(f"os error {n}" in said or os.strerror(n) in said for n in (errno.ENOSPC, errno.EFBIG))
    return system or any(words in said for words in WRITERS_WORDS)


def make_folder(path: str | os.PathLike[str]) -> Path:
    """The folder `path`, made with its parents if it is not there. Its name must be UTF-8: safetensors takes no other."""
    name = os.fspath(path)
    refuse_name(name)
    if not name.isascii() and name != name.encode(errors="replace").decode():
        raise InputError(f"{name!r} is not UTF-8, and weights cannot be written there: give another folder.")
    try:
        folder = Path(path).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as problem:
        raise write_problem(problem, path, "Give a folder that can be made.") from problem
    return folder


def remove_parts(folder: Path) -> None:
    """Remove what a run that was killed while it wrote left in its folder."""
    for left in folder.glob(".whence-*.part"):
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


@contextmanager
def whole_files(folder: Path) -> Iterator[Path]:
    """A scratch folder whose files go to `folder` when all of them are on the disk; on any error none does.

    For writers that only know how to write a folder (`save_pretrained`): no half-written weights pose as whole ones.
    """
    remove_parts(folder)
    try:
        scratch = Path(tempfile.mkdtemp(dir=folder, prefix=".whence-", suffix=".part"))
        try:
            yield scratch
            written = sorted(path for path in scratch.rglob("*") if path.is_file())
            targets = {}
            for path in written:  # all of them, before the first is replaced
                target = folder / path.relative_to(scratch)
                target.parent.mkdir(parents=True, exist_ok=True)
                targets[path] = regular_target(target)
            for path in written:
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
            for path in written:
                path.replace(targets[path])
            _sync_folder(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except Exception as problem:
        if isinstance(problem, OSError) or disk_is_full(problem):
            raise write_problem(problem, folder) from problem
        raise


def _sync_folder(folder: Path) -> None:
    """Make a rename last beyond a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def parse_json(data: bytes | str) -> Any:
    """JSON that whence wrote; a ValueError in words for anything else, however deep or odd."""
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        return json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None
    except UnicodeDecodeError as problem:
        raise ValueError(f"it is not UTF-8 at byte {problem.start}") from None
    except json.JSONDecodeError as problem:
        raise ValueError(f"it is not JSON: {problem}") from None


def as_plain(value: Any) -> Any:
    """Tensors as nested lists, for JSON."""
    if isinstance(value, Tensor):
        return value.detach().to(torch.float64).tolist() if value.is_floating_point() else value.tolist()
    return value
