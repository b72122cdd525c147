"""Weights that are not safetensors, converted once: reading a GGUF file takes some 20 seconds, its copy under one.

The copy is made from files whose hashes were checked, in a folder that appears in one step, with a list of its own
hashes; it is used only while they hold, and made again otherwise. A new format is one function and one entry in
`CONVERTERS`.
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

from whence.errors import UnavailableError
from whence.model.cache import cache_dir
from whence.model.catalogue import EmbeddedModel
from whence.model.pickled_weights import from_antiberty, from_rxnmapper, from_whisper


def unpacked(model: EmbeddedModel, folder: Path) -> Path:
    """The folder with the safetensors copy of a model that lies, checked, in `folder`."""
    from whence.model.load import quietly

    target = cache_dir() / "converted" / f"{model.name}-{model.sha256[:16]}"
    if _whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{model.name}-", dir=target.parent) as partial:
            ready = Path(partial) / "ready"
            with quietly():
                CONVERTERS[str(model.converter)](model, folder, ready)
            hashes = {path.name: _sha256(path) for path in sorted(ready.iterdir())}
            (ready / LIST).write_text(json.dumps(hashes, indent=1), encoding="utf-8")
            if target.exists() and not _whole(target):
                shutil.rmtree(target)
            if not target.exists():  # another process may have been quicker
                ready.replace(target)
    except OSError as problem:
        raise UnavailableError(
            f"the embedded model {model.name!r} could not be unpacked into {target.parent} "
            f"({problem.strerror or problem}); it needs about 600 MB. Free some space, or set WHENCE_CACHE to a folder "
            "on another disk."
        ) from problem
    return target


LIST = "whence.json"


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


def _whole(folder: Path) -> bool:
    try:
        hashes = json.loads((folder / LIST).read_text(encoding="utf-8"))
        return bool(hashes) and all(_sha256(folder / name) == digest for name, digest in hashes.items())
    except (OSError, ValueError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
