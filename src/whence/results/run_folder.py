"""The folder of a run: run.json says whose it is, and at the end what the run left in it.

A folder belongs to one run. Started again, the same run goes on; another is refused with the difference named; a
finished one is finished, as long as the files it left are those that are there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whence.errors import InputError
from whence.results.files import is_regular_file, make_folder, parse_json, remove_parts, write_atomically
from whence.results.run_identity import RunIdentity

NAME = "run.json"
MODEL_FILES = ("config.json", "model*.safetensors", "README.md")  # of any run that ends in a model


@dataclass(frozen=True)
class RunFolder:
    """A folder that was found or made to belong to this run. `finished`: the run was done before, and is all there."""

    path: Path
    identity: RunIdentity
    finished: bool = False

    def finish(self, files: Sequence[str]) -> None:
        """Note that the run is done and that these files (names in the folder) are what it left."""
        hashes = {name: _sha256(self.path / name) for name in files}
        _write(self.path, self.identity, hashes)


def run_folder(path: str | Path, identity: RunIdentity, *, state: Sequence[str] = ()) -> RunFolder:
    """The folder `path` for the run `identity`; made if need be. `state`: globs of the files that the run will write.

    Refused: a folder of another run, one with such files of which nobody knows whose they are, a damaged run.json, and
    a finished run whose files were changed since.
    """
    folder = make_folder(path)
    place = folder / NAME
    # Of several processes that train together one writes: another would take its half-written file for a left one.
    leads = os.environ.get("RANK", "0") == "0"
    if not place.exists():
        if taken := sorted(str(one.relative_to(folder)) for glob in state for one in folder.glob(glob)):
            raise InputError(
                f"{str(folder)!r} holds {taken[0]!r}, which the run would write, and no {NAME} says whose it is: the state "
                "of an unknown run, or something of yours. Give another folder."
            )
        if leads:
            remove_parts(folder)
            _write(folder, identity, None)
        return RunFolder(folder, identity)
    known, files = read_run(place)
    identity.refuse_other(known, folder)
    if leads:
        remove_parts(folder)
    if files is None:
        return RunFolder(folder, identity)
    for name, digest in files.items():
        if not (folder / name).is_file() or _sha256(folder / name) != digest:
            raise InputError(
                f"the run in {str(folder)!r} is finished, but its {name!r} is gone or was changed since: give another "
                "folder, or remove this one to run again."
            )
    return RunFolder(folder, identity, finished=True)


def _write(folder: Path, identity: RunIdentity, files: dict[str, str] | None) -> None:
    write_atomically(folder / NAME, json.dumps({**identity.to_dict(), "files": files}, indent=2).encode())


def read_run(path: Path) -> tuple[RunIdentity, dict[str, str] | None]:
    """Whose run a run.json names, and the files of a finished one with their hashes; refused where it is damaged."""
    try:
        if not is_regular_file(path):
            raise ValueError("it is no file")
        data: Any = parse_json(path.read_bytes())
        identity = RunIdentity.from_dict(data)
        files = data.get("files")
        if files is not None and not (isinstance(files, dict) and all(isinstance(v, str) for v in files.values())):
            raise ValueError("its list of files is no list of hashes")
    except (OSError, ValueError) as problem:
        raise InputError(
            f"{str(path)!r} is damaged ({problem}), so nobody knows whose run is in {str(path.parent)!r}: give "
            "another folder, or remove this one to run again."
        ) from problem
    return identity, files


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
