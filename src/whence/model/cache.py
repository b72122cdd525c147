"""The models on this machine: where they are kept, and whether their bytes are still the pinned ones.

`locate` answers with a folder only after every file in it was checked against the SHA-256 in the catalogue.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from pathlib import Path

from whence.errors import UnavailableError
from whence.model.catalogue import EmbeddedModel, get


def cache_dir(cache: str | os.PathLike[str] | None = None) -> Path:
    """Models are kept in `cache`, $WHENCE_CACHE, $XDG_CACHE_HOME/whence, ~/.cache/whence: first set wins."""
    try:
        if chosen := cache or os.environ.get("WHENCE_CACHE"):
            return Path(chosen).expanduser().absolute()
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        if Path(xdg).is_absolute():  # the XDG specification: a relative path is to be ignored
            return Path(xdg) / "whence"
        return Path.home() / ".cache" / "whence"
    except RuntimeError as error:
        raise UnavailableError("There is no home directory to keep models in: set WHENCE_CACHE to a folder.") from error


def locate(name: str, *, cache: str | os.PathLike[str] | None = None) -> Path:
    """The folder of an embedded model, every file checked: from the cache, else from the installed wheel.

    Never touches the network. Where neither place has the model whole, an UnavailableError says why and names
    the command that fetches it.
    """
    model, root = get(name), cache_dir(cache)
    problems = []
    for folder in (cached_folder(model, root), _installed(model)):
        if folder is not None and folder.is_dir():
            if (problem := integrity_problem(model, folder)) is None:
                return folder
            problems.append(problem)
    what = "; ".join(problems) or f"it is not in {root}, and {model.requirement} is not installed"
    raise UnavailableError(
        f"The model {model.name!r} is not on this machine: {what}. Fetch it with: whence get {model.name}"
    )


def cached_folder(model: EmbeddedModel, root: Path) -> Path:
    """Where a fetched model is kept below the cache's `root`."""
    return root / "models" / f"{model.name}-{model.version}"


def _installed(model: EmbeddedModel) -> Path | None:
    """The model's folder in site-packages, where its wheel is installed (found without importing it)."""
    try:
        distribution = importlib.metadata.distribution(model.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(distribution.locate_file(model.folder)))


def integrity_problem(model: EmbeddedModel, folder: Path) -> str | None:
    """None where every file of the model in `folder` has its pinned hash; else what is wrong, in words.

    The bytes are hashed at every load (90 MB take less than a tenth of a second): a note that they were right once
    says nothing of what is there now.
    """
    for name, sha256 in model.files:
        path = folder / name
        try:
            with path.open("rb") as file:
                actual = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            return f"{path} cannot be read ({error.strerror or error})"
        if actual != sha256:
            return f"{path} is damaged (its SHA-256 is {actual[:12]}…, not {sha256[:12]}…)"
    return None
