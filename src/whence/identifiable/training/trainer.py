"""The Hugging Face Trainer, keeping two promises: a NaN loss stops it, a checkpoint is whole or not counted."""

# torch and transformers leave these functions without types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import ProgressCallback, Trainer

from whence.errors import ModelError, WhenceError

COMPLETE = "complete"  # an empty file, written into a checkpoint when everything else is


class CarefulTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """Stops at a NaN loss, naming the step; marks checkpoints that were written to their end."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        if not bool(torch.isfinite(loss)):
            raise ModelError(
                f"the loss is {float(loss)} at step {self.state.global_step + 1}: training was "
                f"stopped.{self._last_good()} Try a "
                "lower learning rate."
            )
        return loss

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        bad = next((name for name, p in self._weights() if not bool(torch.isfinite(p).all())), None)
        if bad is not None:
            raise ModelError(
                f"the weight {bad!r} is NaN or infinite after step {self.state.global_step}: training was stopped and "
                f"that state was not saved.{self._last_good()} Try a lower learning rate."
            )
        try:
            super()._save_checkpoint(*args, **kwargs)
            if self.args.should_save:
                folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
                (folder / COMPLETE).touch()
        except (OSError, RuntimeError) as problem:
            if isinstance(problem, RuntimeError) and "write" not in str(problem):
                raise  # torch reports a failed write as a RuntimeError; anything else is not about the disk
            raise WhenceError(
                f"the checkpoint of step {self.state.global_step} could not be written "
                f"({problem}).{self._last_good()} Free some "
                "space and run the same command again: it goes on from there."
            ) from problem

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


def discard_partial(folder: Path) -> None:
    """Remove checkpoints that a kill left unfinished: the Trainer counts them when it decides which ones to delete."""
    for path in folder.glob("checkpoint-*"):
        if path.is_dir() and not (path / COMPLETE).exists():
            shutil.rmtree(path, ignore_errors=True)
