"""Why a model cannot be had, in one sentence with the next step."""

from __future__ import annotations

import difflib
from pathlib import Path

from whence.errors import ModelError, UnavailableError
from whence.model import catalogue


def names() -> str:
    """The embedded models, for a sentence."""
    return ", ".join(m.name for m in catalogue.MODELS)


def absent(name: str, why: str) -> str:
    """A model that is nowhere, with the names that are near."""
    known = [m.name for m in catalogue.MODELS] + [p.name for p in Path().iterdir() if (p / "config.json").exists()]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"{name!r} is no folder here, is not in the Hugging Face cache, and {why}.{meant} Without a network, use a local "
        f"folder or an embedded model: {names()}."
    )


def explained(name: str, local: bool, allow_pickle: bool, problem: Exception) -> Exception:
    """Why a model could not be loaded, in one sentence with the next step."""
    said = " ".join(str(problem).split())
    lowered = said.lower()
    if "safetensors" in lowered and not allow_pickle:
        return ModelError(
            f"{name!r} has no safetensors weights, and others (pickle) can run code when read. If you trust it, load it "
            "with allow_pickle=True (--allow-pickle)."
        )
    if "trust_remote_code" in lowered:
        return ModelError(
            f"{name!r} comes with code of its own, which whence does not run unless asked. If you trust it, load it with "
            "trust_remote_code=True (--trust-remote-code)."
        )
    if not local:
        return UnavailableError(absent(name, f"could not be fetched from the hub ({said[:160]})"))
    return ModelError(f"the model in {name!r} could not be loaded: {said[:300]}")
