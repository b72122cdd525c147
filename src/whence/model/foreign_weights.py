"""Weights that are not safetensors, converted once: reading a GGUF file takes some 20 seconds, its copy under one.

The copy is made from files whose hashes were checked, by one process at a time, in a folder that appears in one step.
It is used only while its weights are those pinned in the catalogue and its other files those of a list that lies beside
the folder, and made again otherwise. A new format is one function and one entry in `CONVERTERS`.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from safetensors import SafetensorError, safe_open

from whence.errors import UnavailableError
from whence.model.cache import cache_dir
from whence.model.catalogue import EmbeddedModel
from whence.model.pickled_weights import from_antiberty, from_rxnmapper, from_whisper
from whence.results.files import parse_json, write_atomically


def unpacked(model: EmbeddedModel, folder: Path) -> Path:
    """The folder with the safetensors copy of a model that lies, checked, in `folder`."""
    target = cache_dir() / "converted" / f"{model.name}-{model.sha256[:12]}"
    if _whole(model, target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):
            if not _whole(model, target):  # another process may have been quicker
                _convert(model, folder, target)
    except OSError as problem:
        raise UnavailableError(
            f"the embedded model {model.name!r} could not be unpacked into {target.parent} "
            f"({problem.strerror or problem}); it needs about 600 MB. Free some space, or set WHENCE_CACHE to a folder "
            "on another disk."
        ) from problem
    return target


def _convert(model: EmbeddedModel, folder: Path, target: Path) -> None:
    """Make the copy beside `target`, check it and put it there; the lock is held."""
    from whence.model.quiet import quietly

    for left in target.parent.glob(f"{model.name}-*.part"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{model.name}-", suffix=".part", dir=target.parent))
    try:
        with quietly():
            CONVERTERS[str(model.converter)](model, folder, partial / "ready")
        actual = tensors_sha256(partial / "ready")
        if model.converted_sha256 not in (None, actual):
            raise UnavailableError(
                f"the conversion of {model.name!r} gave other weights (SHA-256 {actual[:12]}…) than are pinned "
                f"({str(model.converted_sha256)[:12]}…): the library that reads them computes differently here. Please "
                "report it with the versions of transformers and gguf."
            )
        hashes = {path.name: _sha256(path) for path in sorted((partial / "ready").iterdir()) if not _is_weights(path)}
        if target.exists():
            shutil.rmtree(target)
        (partial / "ready").replace(target)
        write_atomically(_list_of(target), json.dumps(hashes, indent=1).encode())
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _from_gguf(entry: EmbeddedModel, folder: Path, into: Path) -> None:
    """A language model, its configuration and its tokenizer, all of which a GGUF file holds."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with redirect_stderr(io.StringIO()):  # the reader of GGUF has a progress bar that nothing turns off
        options: dict[str, Any] = {"gguf_file": entry.gguf_file, "local_files_only": True}
        config = AutoConfig.from_pretrained(folder, **options)
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, **options)
        # The weights are plain numbers now, but transformers still marks them as quantised and would not save them.
        setattr(model, "hf_quantizer", None)  # noqa: B010 (not a field that types know)
        for owner, name in (
            (model, "quantization_method"),
            (model, "is_quantized"),
            (model.config, "quantization_config"),
        ):
            if hasattr(owner, name):
                delattr(owner, name)
        model.save_pretrained(into)
        tokenizer.save_pretrained(into)


CONVERTERS: dict[str, Callable[[EmbeddedModel, Path, Path], None]] = {
    "gguf": _from_gguf,
    "whisper": from_whisper,
    "rxnmapper": from_rxnmapper,
    "antiberty": from_antiberty,
}
"""name → function(entry, folder of the checked files, folder to write): a model folder with safetensors weights."""


def _whole(model: EmbeddedModel, folder: Path) -> bool:
    """Whether the copy is there and right: the weights by the catalogue, the rest by the list beside the folder."""
    try:
        hashes = parse_json(_list_of(folder).read_bytes())
        if not hashes or any(_sha256(folder / name) != digest for name, digest in hashes.items()):
            return False
        if {path.name for path in folder.iterdir() if not _is_weights(path)} != set(hashes):
            return False
        return model.converted_sha256 in (None, tensors_sha256(folder))
    except (OSError, ValueError, AttributeError, SafetensorError):
        return False


def _list_of(folder: Path) -> Path:
    return folder.with_suffix(".json")


def _is_weights(path: Path) -> bool:
    return path.suffix == ".safetensors"


def tensors_sha256(folder: Path) -> str:
    """SHA-256 of the name, dtype, shape and bytes of every tensor in a folder's safetensors files, by name.

    Not of the files: their headers differ between versions of the library that writes them.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                digest.update(f"{name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
                digest.update(np.ascontiguousarray(tensor).data)
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
