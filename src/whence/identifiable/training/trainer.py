"""The Hugging Face Trainer, keeping two promises: a NaN loss stops it, a checkpoint is whole or not counted."""

# torch and transformers leave these functions without types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import ProgressCallback, Trainer

from whence.errors import InputError, ModelError, UnavailableError
from whence.results.files import disk_is_full, parse_json, write_atomically

LOSS = "total_loss.json"
COMPLETE = "complete"  # a list of hashes, written into a checkpoint when everything else is


class CarefulTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """Stops at a NaN loss, naming the step; marks checkpoints that were written to their end.

    `total_loss`: the sum of the losses of all steps, kept in checkpoints. (transformers' own mean forgets what came
    before a resumption.)
    """

    total_loss = 0.0

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint:
            self.total_loss = float(parse_json((Path(resume_from_checkpoint) / LOSS).read_bytes()))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        if not bool(torch.isfinite(loss)):
            raise ModelError(
                f"the loss is {float(loss)} at step {self.state.global_step + 1}: training was "
                f"stopped.{self._last_good()} Try a "
                "lower learning rate."
            )
        everywhere = self.accelerator.gather(loss.detach()) if self.args.world_size > 1 else loss.detach()
        self.total_loss += float(everywhere.mean())
        return loss

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        bad = next((name for name, p in self._weights() if not bool(torch.isfinite(p).all())), None)
        if bad is not None:
            raise ModelError(
                f"the weight {bad!r} is NaN or infinite after step {self.state.global_step}: training was stopped and "
                f"that state was not saved.{self._last_good()} Try a lower learning rate."
            )
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(*args, **kwargs)
            if self.args.should_save:
                (folder / LOSS).write_text(json.dumps(self.total_loss), encoding="utf-8")
                hashes = {str(path.relative_to(folder)): _sha256(path) for path in folder.rglob("*") if path.is_file()}
                write_atomically(folder / COMPLETE, json.dumps(hashes).encode())
                self._remove_older(folder)
        except Exception as problem:
            full = disk_is_full(problem) or isinstance(problem, UnavailableError)
            if not full and not isinstance(problem, OSError):
                raise
            shutil.rmtree(folder, ignore_errors=True)  # it frees the space that the next try needs
            why = "the disk is full" if full else str(problem)
            raise UnavailableError(
                f"the checkpoint of step {self.state.global_step} could not be written: {why}.{self._last_good()} Free "
                "some space and run the same command again: it goes on from there."
            ) from problem

    def _remove_older(self, newest: Path) -> None:
        """Keep the newest and the best checkpoint. The mark goes first: a kill leaves nothing that looks whole.

        transformers would remove older ones before this one is marked, and a kill in between would cost both.
        """
        kept = {newest.name, Path(str(self.state.best_model_checkpoint or newest)).name}
        for path in newest.parent.glob("checkpoint-*"):
            if path.name not in kept:
                (path / COMPLETE).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)

    def _weights(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        assert self.model is not None
        return self.model.named_parameters()

    def _last_good(self) -> str:
        found = last_checkpoint(Path(str(self.args.output_dir)))
        return f" The last good checkpoint is {str(found)!r}." if found else " No checkpoint had been written yet."


class Bar(ProgressCallback):  # type: ignore[misc, unused-ignore]
    """A progress bar on standard error and nothing else: transformers' own prints its logs on standard output."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """Say nothing."""


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end."""
    steps = {}
    for path in folder.glob("checkpoint-*"):
        number = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if number and (path / COMPLETE).exists():
            steps[int(number.group(1))] = path
    return steps[max(steps)] if steps else None


def resume_point(folder: Path) -> Path | None:
    """Where to go on: the newest whole checkpoint. Unfinished ones are removed, damaged ones refused by name."""
    for path in folder.glob("checkpoint-*"):
        if path.is_dir() and not (path / COMPLETE).exists():
            shutil.rmtree(path, ignore_errors=True)
    for path in sorted(folder.glob("checkpoint-*")):
        if problem := _integrity_problem(path):
            raise InputError(
                f"the checkpoint {str(path)!r} is damaged ({problem}). Remove that folder and run the same command "
                "again: it goes on from an earlier checkpoint, or begins anew where there is none."
            )
    return last_checkpoint(folder)


def _integrity_problem(checkpoint: Path) -> str | None:
    try:
        hashes = parse_json((checkpoint / COMPLETE).read_bytes())
        for name, digest in hashes.items():
            if _sha256(checkpoint / name) != digest:
                return f"{name} is not what was written"
    except FileNotFoundError as problem:
        return f"{Path(str(problem.filename)).name} is missing"
    except (OSError, ValueError, AttributeError) as problem:
        return f"its list of files cannot be read: {problem}"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
