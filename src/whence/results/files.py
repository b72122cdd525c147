"""Writing and reading results: safetensors with a JSON header, whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence.errors import InputError, WhenceError

FORMAT = 1


def write_atomically(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write a file so that it is either the whole new one or what was there before."""
    target = Path(path).expanduser()
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    except OSError as problem:
        raise InputError(
            f"{str(path)!r} cannot be written: {problem.strerror}. Choose a folder that exists."
        ) from problem
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(target)
    except OSError as problem:
        raise WhenceError(
            f"{str(path)!r} could not be written ({problem.strerror}); what was there before is untouched."
        ) from problem
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def save_tensors(
    path: str | os.PathLike[str], kind: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any]
) -> Path:
    """One safetensors file; `header` goes into it as JSON, with the kind of thing it is."""
    from safetensors.torch import save

    ready = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    meta = {"whence": json.dumps({"format": FORMAT, "kind": kind, **header}, ensure_ascii=False)}
    return write_atomically(path, save(ready, metadata=meta))


def load_tensors(path: str | os.PathLike[str], kind: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a file that `save_tensors` wrote; anything else is refused by name."""
    from safetensors import SafetensorError, safe_open

    source = Path(path).expanduser()
    if not source.is_file():
        raise InputError(f"there is no file {str(path)!r} to load.")
    try:
        with safe_open(source, framework="pt") as file:
            meta = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as problem:
        raise InputError(f"{str(path)!r} is not a whole safetensors file: {problem}") from problem
    if "whence" not in meta:
        raise InputError(f"{str(path)!r} was not written by whence: its header says nothing of it.")
    header = json.loads(meta["whence"])
    if header["format"] > FORMAT:
        raise InputError(
            f"{str(path)!r} was written by a newer whence (format {header['format']}); this one reads {FORMAT}."
        )
    if kind is not None and header["kind"] != kind:
        raise InputError(f"{str(path)!r} holds a {header['kind']}, not a {kind}.")
    return tensors, header


def as_plain(value: Any) -> Any:
    """Tensors as nested lists, for JSON."""
    if isinstance(value, Tensor):
        return value.detach().to(torch.float64).tolist() if value.is_floating_point() else value.tolist()
    return value
