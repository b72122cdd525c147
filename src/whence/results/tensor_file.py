"""Results and traces as files: safetensors with a JSON header and a hash of the whole file.

The hash is SHA-256 of every byte of the file with 64 zeros in the place of the hash itself. A file is read into memory
and checked before anything in it is believed, so no damage passes, and a trace does not die with its file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from whence.errors import InputError
from whence.results.declared import is_kind
from whence.results.files import is_regular_file, parse_json, write_atomically
from whence.results.provenance import library_versions

FORMAT = 3  # 2: without the list of tensors in the header
BLANK = b"0" * 64
ABOUT = {"format": int, "kind": str, "whence": str}
SEAL = re.compile(rb'"sha256":"([0-9a-f]{64})"')


def save_tensors(
    path: str | os.PathLike[str], kind: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any]
) -> Path:
    """One safetensors file; `header` goes into it as JSON, with the kind of thing it is."""
    from safetensors.torch import save

    ready = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    about = {"format": FORMAT, "kind": kind, "whence": library_versions()["whence"], "tensors": _list(ready), **header}
    # JSON inside JSON: its quotes are escaped, so that the seal below is the only text of its form in the header.
    data = save(ready, metadata={"whence": json.dumps(about), "sha256": BLANK.decode()})
    seal = _seal(data)
    if seal is None:
        raise AssertionError("safetensors no longer writes its metadata as compact JSON")
    start, end = seal.span(1)
    digest = hashlib.sha256(data).hexdigest().encode()
    whole = memoryview(data)
    return write_atomically(path, whole[:start], digest, whole[end:])


def load_tensors(path: str | os.PathLike[str], kind: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a file that `save_tensors` wrote; anything else is refused in one sentence."""
    from safetensors.torch import load

    source = Path(path).expanduser()
    name = os.fspath(path)
    if not is_regular_file(source):
        raise InputError(f"there is no file {name!r} to load.")
    try:
        data = source.read_bytes()
    except OSError as problem:
        raise InputError(f"{name!r} cannot be read: {problem.strerror}.") from problem
    seal = _seal(data)
    if seal is None:
        raise InputError(_why_no_seal(data, name))
    start, end = seal.span(1)
    digest = hashlib.sha256(memoryview(data)[:start])
    digest.update(BLANK)
    digest.update(memoryview(data)[end:])
    if digest.hexdigest().encode() != seal.group(1):
        raise InputError(
            f"{name!r} is damaged: its content is not what was saved. Restore it from a copy, or make it again."
        )
    with understood(path, kind or "result"):
        header = parse_json(parse_json(data[8 : _header_end(data)])["__metadata__"]["whence"])
        if not is_kind(header, Mapping[str, Any]) or not all(is_kind(header[n], of) for n, of in ABOUT.items()):
            raise ValueError("its header does not say what it is")
    if header["format"] > FORMAT:
        raise InputError(
            f"{name!r} was written by whence {header['whence']} (format {header['format']}); this one reads {FORMAT}."
        )
    if kind is not None and header["kind"] != kind:
        raise InputError(f"{name!r} holds a {header['kind']}, not a {kind}.")
    with understood(path, kind or "result"):
        tensors = load(data)
        if header["format"] > 2 and _list(tensors) != header["tensors"]:
            raise ValueError("its tensors are not those that its header names")
    return tensors, header


def _list(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """What there is, in plain data: the dtype and the shape of every tensor."""
    return {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}


@contextmanager
def understood(path: str | os.PathLike[str], kind: str) -> Iterator[None]:
    """Around the code that makes a `kind` of what was loaded: what does not fit is refused in one sentence."""
    try:
        yield
    except Exception as problem:  # whatever it is that a strange content trips over, safetensors' own errors included
        what = f"{problem.args[0]!r} is missing" if isinstance(problem, KeyError) else " ".join(str(problem).split())
        raise InputError(
            f"{os.fspath(path)!r} does not hold a whole {kind}: {what[:200]}. It was not written by this version of "
            f"whence ({library_versions()['whence']}); make it again."
        ) from problem


@contextmanager
def savable(path: str | os.PathLike[str], kind: str) -> Iterator[None]:
    """Around the check of what is to be saved: what could not be loaded again is not written."""
    try:
        yield
    except ValueError as problem:
        raise InputError(
            f"this {kind} does not fit together and was not saved to {os.fspath(path)!r}: {problem}."
        ) from problem


def _header_end(data: bytes) -> int:
    """Where the JSON header of a safetensors file ends: its length is in the first eight bytes."""
    return 8 + int.from_bytes(data[:8], "little")


def _seal(data: bytes) -> re.Match[bytes] | None:
    """Where the hash of the file stands in its header; None if there is not exactly one."""
    end = _header_end(data)
    if len(data) < 8 or end > len(data):
        return None
    first = SEAL.search(data, 8, end)
    return None if first is None or SEAL.search(data, first.end(), end) else first


def _why_no_seal(data: bytes, name: str) -> str:
    """What to say of a file without a hash: an older version's, another program's, or no whole file at all."""
    try:
        meta = parse_json(data[8 : _header_end(data)] if _header_end(data) <= len(data) else b"").get("__metadata__")
    except (ValueError, AttributeError):
        return f"{name!r} is not a whole safetensors file: it was cut, damaged, or is something else."
    if not isinstance(meta, dict) or "whence" not in meta:
        return f"{name!r} was not written by whence: its header says nothing of it."
    try:
        version = parse_json(meta["whence"])["provenance"]["versions"]["whence"]
    except (ValueError, KeyError, TypeError):
        version = "of an unknown version"
    return (
        f"{name!r} was written by whence {version} in a format without a hash of its content, which this version "
        "cannot check: load it with that version, or make it again."
    )
