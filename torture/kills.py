"""kill -9 at random moments, until the run is through: the result is bit for bit that of a run nobody disturbed.

    python -m torture.kills [train|convert|tokens …] [--kills 30] [--seed 0]

Each run is a process of its own, started again with the same command after every kill. Kills are spread over the time
an undisturbed run takes, in and between checkpoints.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

MODULES = (
    "transformers.models.bert.modeling_bert",
    "whence.identifiable.conversion.convert",
    "whence.identifiable.training.trainer",
    "whence.tokens.token_identifiability",
)

TRAIN = """
from whence.identifiable.training.demo import demo_data
from whence.identifiable.training.fit import Settings, train
size = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
train(demo_data(320), demo_data(40, seed=1), out=folder,
      settings=Settings(epochs=6, batch_size=16, patience=0, checkpoint_steps=3, model=size))
"""
CONVERT = """
from pathlib import Path
from transformers import BertConfig, BertModel
import whence
from whence.identifiable.conversion import distillation
from whence.identifiable.conversion.convert import tie_keys
from whence.identifiable.training.demo import demo_data
from whence.identifiable.training.vocabulary import train_tokenizer
distillation.distil.__kwdefaults__["every"] = 3
texts = list(demo_data(80).texts)
tokenizer = train_tokenizer(texts, 80, 48)
torch.manual_seed(0)
config = BertConfig(vocab_size=len(tokenizer), hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
                    intermediate_size=32, max_position_embeddings=48)
model = whence.Model(BertModel(config).eval(), tokenizer, name="tiny")
Path(folder).mkdir(exist_ok=True)
tie_keys(model, texts, 150, tokens=64, lengths=(16,), texts_per_length=4,
         checkpoint=Path(folder) / "distillation.safetensors").save(folder)
"""
TOKENS = """
from pathlib import Path
from transformers import BertConfig, BertModel
import whence
from whence.identifiable.training.demo import demo_data
from whence.identifiable.training.vocabulary import train_tokenizer
from whence.tokens.training import Training
texts = list(demo_data(120).texts)
tokenizer = train_tokenizer(texts, 80, 48)
torch.manual_seed(0)
config = BertConfig(vocab_size=len(tokenizer), hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
                    intermediate_size=32, max_position_embeddings=48)
model = whence.Model(BertModel(config).eval(), tokenizer, name="tiny")
Path(folder).mkdir(exist_ok=True)
whence.token_identifiability(model, texts, maps=("naive", "linear"), bootstrap=50, training=Training(epochs=10),
                             memory=0, folder=folder).save(Path(folder) / "tokens.safetensors")
"""
RUNS = {"train": TRAIN, "convert": CONVERT, "tokens": TOKENS}
TIMES = {"seconds", "cpu_seconds"}  # of the clock, and so not the same twice


@dataclass(frozen=True)
class Outcome:
    """One kind of run after `kills` kills; `differences` are the files that are not those of an undisturbed run."""

    run: str
    kills: int
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
        if not path.is_file():
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
    from safetensors.torch import load_file

    return b"".join(
        f"{name}{t.dtype}{t.shape}".encode() + t.numpy().tobytes() for name, t in sorted(load_file(path).items())
    )


def torment(run: str, kills: int, seed: int, root: Path) -> Outcome:
    """Do the run once undisturbed, then killed `kills` times on the way; compare what the two leave."""
    draw = random.Random(f"{run}/{seed}")
    for module in MODULES:
        importlib.import_module(module)
    begun = time.monotonic()
    _finished(start(run, root / "whole"), run, root)
    length = time.monotonic() - begun
    done, attempts, folders = 0, 0, [root / "killed-0"]
    deadline = time.monotonic() + 60 + 4 * length * (kills + 2)
    while done < kills and time.monotonic() < deadline:
        attempts += 1
        process = start(run, folders[-1])
        process.join(length * draw.uniform(0.05, 1.0))
        if process.exitcode is None:
            process.kill()
            process.join()
            done += 1
        else:  # it came through before it was killed: the next one begins anew, and this one is compared, too
            _finished(process, run, root)
            folders.append(root / f"killed-{attempts}")
    _finished(start(run, folders[-1]), run, root)
    whole = contents(root / "whole")
    differences = set()
    for folder in folders:
        here = contents(folder)
        differences |= {name for name in whole.keys() | here.keys() if whole.get(name) != here.get(name)}
    return Outcome(run, done, attempts + 1, tuple(sorted(differences)))


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
        print(f"{run}: {outcome.kills} kills in {outcome.attempts} attempts, {verdict}", flush=True)
        bad += bool(outcome.differences) or outcome.kills < asked.kills
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
