"""kill -9 at random moments, until the run is through: the result is bit for bit that of a run nobody disturbed.

    python -m torture.kills [train|language|convert|tokens|survey|faithful …] [--kills 30] [--seed 0]

Each run (`torture/runs.py`) is a process of its own, started again with the same command after every kill. Kills are
spread over the time that an undisturbed run takes; every second one waits for the next change in the run's folder and
strikes right then, in the middle of a checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from torture.runs import MODULES, RUNS

TIMES = {"seconds", "cpu_seconds", "processor_seconds"}  # of the clock, and so not the same twice


@dataclass(frozen=True)
class Outcome:
    """One kind of run after `kills` kills; `differences` are the files that are not those of an undisturbed run."""

    run: str
    kills: int
    in_writes: int
    """How many of the kills struck while the run was writing in its folder."""
    attempts: int
    differences: tuple[str, ...]


def start(run: str, folder: Path) -> BaseProcess:
    """A process that does the run in `folder`, from where it stands. Forked: what takes long to import is there."""
    process = get_context("fork").Process(target=_child, args=(run, folder))
    process.start()
    return process


def _child(run: str, folder: Path) -> None:
    with (folder.parent / "said").open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        exec(RUNS[run], {"torch": torch, "folder": str(folder)})


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a finished run, times of the clock taken out of JSON and of model cards."""
    found = {}
    for path in sorted(folder.rglob("*")):
        # What a killed `save` left beside its target poses as nothing; run folders remove it when the run starts again.
        if not path.is_file() or (path.name.startswith(".whence-") and path.suffix == ".part"):
            continue
        data = path.read_bytes()
        if path.suffix == ".json":
            data = json.dumps(_without_times(json.loads(data))).encode()
        elif path.suffix == ".md":
            data = b"\n".join(line for line in data.split(b"\n") if b" s." not in line and b"minutes" not in line)
        elif path.suffix == ".safetensors":
            data = _tensors(path)
        found[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return found


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        # `files` holds hashes of the very files that are compared here one by one, times and all.
        return {k: _without_times(v) for k, v in value.items() if k not in TIMES and k != "files"}
    return [_without_times(v) for v in value] if isinstance(value, list) else value


def _tensors(path: Path) -> bytes:
    """Every tensor, and what the header says of them without the times."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        about = json.loads((file.metadata() or {}).get("whence", "null"))
        tensors = [(name, file.get_tensor(name)) for name in sorted(file.keys())]
    return json.dumps(_without_times(about)).encode() + b"".join(
        f"{name}{t.dtype}{t.shape}".encode() + t.numpy().tobytes() for name, t in tensors
    )


def torment(run: str, kills: int, seed: int, root: Path) -> Outcome:
    """Do the run once undisturbed, then killed `kills` times on the way; compare what the two leave."""
    draw = random.Random(f"{run}/{seed}")
    for module in MODULES:
        importlib.import_module(module)
    begun = time.monotonic()
    _finished(start(run, root / "whole"), run, root)
    length = time.monotonic() - begun
    done, in_writes, attempts, folders = 0, 0, 0, [root / "killed-0"]
    deadline = time.monotonic() + 60 + 4 * length * (kills + 2)
    while done < kills and time.monotonic() < deadline:
        attempts += 1
        process = start(run, folders[-1])
        process.join(length * draw.uniform(0.05, 1.0))
        writing = attempts % 2 == 0 and _changes(folders[-1], process)
        process.kill()
        process.join()
        if process.exitcode == -signal.SIGKILL:
            done += 1
            in_writes += writing
        else:  # it came through before it was killed: the next one begins anew, and this one is compared, too
            _finished(process, run, root)
            folders.append(root / f"killed-{attempts}")
    _finished(start(run, folders[-1]), run, root)
    whole = contents(root / "whole")
    differences = set()
    for folder in folders:
        here = contents(folder)
        differences |= {name for name in whole.keys() | here.keys() if whole.get(name) != here.get(name)}
    return Outcome(run, done, in_writes, attempts + 1, tuple(sorted(differences)))


def _changes(folder: Path, process: BaseProcess) -> bool:
    """Wait until something in the folder changes (True) or the process ends (False)."""
    before = _listing(folder)
    while process.is_alive():
        if _listing(folder) != before:
            return True
        time.sleep(0.0005)
    return False


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    found = []
    for top, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # gone since it was listed
                about = Path(top, name).stat()
                found.append((f"{top}/{name}", about.st_size, about.st_mtime_ns))
    return sorted(found)


def _finished(process: BaseProcess, run: str, root: Path) -> None:
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{run} failed where nobody killed it: {(root / 'said').read_text()[-2000:]}")


def main(given: list[str] | None = None) -> int:
    """Run the kills that the command line asks for; 1 if anything differed."""
    parser = argparse.ArgumentParser(prog="python -m torture.kills", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", choices=[[], *RUNS], default=[])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(given)
    torch.set_num_threads(1)  # a forked child has no other threads
    bad = 0
    for run in asked.runs or RUNS:
        with tempfile.TemporaryDirectory(prefix="whence-kills-") as root:
            outcome = torment(run, asked.kills, asked.seed, Path(root))
        verdict = "bit-identical" if not outcome.differences else f"DIFFERS in {', '.join(outcome.differences)}"
        print(
            f"{run}: {outcome.kills} kills ({outcome.in_writes} in a write) in {outcome.attempts} attempts, {verdict}",
            flush=True,
        )
        bad += bool(outcome.differences) or outcome.kills < asked.kills
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
