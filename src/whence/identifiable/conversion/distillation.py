"""Distillation: bring a tied model's hidden states back to the original's, on texts of all lengths.

    loss = Σ_l  Σ_i ‖e_i^l − ê_i^l‖² / Σ_i ‖e_i^l‖²   +   w · (1 − cos(mean_i e_i^L, mean_i ê_i^L))

over the real tokens i of a batch; e of the original, ê of the tied model, w the weight of the text embedding. No labels
are used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence.errors import ModelError
from whence.identifiable.conversion.windows import Corpus, batch

Progress = Callable[[int, float], None]


@dataclass(frozen=True)
class Schedule:
    """How long and how fast. The learning rate rises for `warmup` of the steps and then falls to 0 as a cosine."""

    steps: int
    learning_rate: float = 1e-3
    tokens: int = 1024  # in a batch
    warmup: float = 0.05
    seed: int = 0
    clip: float = 1.0
    embedding_weight: float = 1.0  # w

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return self.learning_rate * (step + 1) / rise
        done = (step - rise) / max(1, self.steps - rise)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


@dataclass
class History:
    """What distillation went through."""

    losses: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0


def states(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """e^1 … e^L of a batch, each (batch, n, d)."""
    output = model(**inputs, output_hidden_states=True)
    found: tuple[Tensor, ...] = output.hidden_states[1:]
    return found


def loss_of(original: tuple[Tensor, ...], tied: tuple[Tensor, ...], mask: Tensor, weight: float = 1.0) -> Tensor:
    """The loss above, for one batch; `mask` (batch, n) is 1 at real tokens."""
    real = mask[..., None].to(original[0])
    total = original[0].new_zeros(())
    for ours, theirs in zip(tied, original, strict=True):
        total = total + ((ours - theirs).square() * real).sum() / (theirs.square() * real).sum()
    ours, theirs = pool(tied[-1], mask), pool(original[-1], mask)
    return total + weight * (1 - torch.cosine_similarity(ours, theirs, dim=-1).mean())


def pool(final: Tensor, mask: Tensor) -> Tensor:
    """The mean over real tokens: (batch, n, d) → (batch, d)."""
    real = mask[..., None].to(final)
    return (final * real).sum(1) / real.sum(1)


def distil(
    tied: nn.Module,
    original: nn.Module,
    corpus: Corpus,
    schedule: Schedule,
    *,
    checkpoint: Path | None = None,
    every: int = 100,
    progress: Progress | None = None,
) -> History:
    """Train `tied` in place. With `checkpoint`, a file written every so many steps from which a stopped run goes on."""
    parameters = [p for p in tied.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(
        parameters, lr=schedule.learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    history = History()
    start = _resume(checkpoint, tied, optimiser, history, schedule)
    tied.eval()  # no dropout: the original's states are exact targets
    original.eval()
    device = parameters[0].device
    begun = time.process_time() - history.cpu_seconds
    for step in range(start, schedule.steps):
        inputs = {k: t.to(device) for k, t in batch(corpus, schedule.tokens, schedule.seed, step).items()}
        with torch.no_grad():
            wanted = states(original, inputs)
        loss = loss_of(wanted, states(tied, inputs), inputs["attention_mask"], schedule.embedding_weight)
        value = float(loss.detach())
        if not math.isfinite(value):
            kept = f" The last good state is in {str(checkpoint)!r}." if checkpoint and checkpoint.exists() else ""
            raise ModelError(
                f"the distillation loss is {value} at step {step} (learning rate {schedule.rate(step):.1e}): it was "
                f"stopped.{kept} Try a lower learning rate."
            )
        for group in optimiser.param_groups:
            group["lr"] = schedule.rate(step)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, schedule.clip)
        optimiser.step()
        history.losses.append(value)
        history.cpu_seconds = time.process_time() - begun
        if progress is not None:
            progress(step + 1, value)
        if checkpoint is not None and (step + 1) % every == 0:
            _save(checkpoint, tied, optimiser, history, schedule, step + 1)
    if checkpoint is not None and schedule.steps > start:
        _save(checkpoint, tied, optimiser, history, schedule, schedule.steps)
    return history


def _save(
    path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, history: History, schedule: Schedule, step: int
) -> None:
    part = path.with_suffix(".part")
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    torch.save(
        {
            "schedule": vars(schedule),
            "step": step,
            "model": trained,
            "optimiser": optimiser.state_dict(),
            "losses": history.losses,
            "cpu_seconds": history.cpu_seconds,
        },
        part,
    )
    part.replace(path)


def _resume(
    path: Path | None, model: nn.Module, optimiser: torch.optim.Optimizer, history: History, schedule: Schedule
) -> int:
    if path is None or not path.exists():
        return 0
    saved: dict[str, Any] = torch.load(path, weights_only=True)
    if saved["schedule"] != vars(schedule):
        raise ModelError(
            f"{str(path)!r} is the checkpoint of a run with other settings ({saved['schedule']}); this one has "
            f"{vars(schedule)}. Give the same settings, or another place."
        )
    with torch.no_grad():
        own = dict(model.named_parameters())
        for name, value in saved["model"].items():
            own[name].copy_(value)
    optimiser.load_state_dict(saved["optimiser"])
    history.losses = list(saved["losses"])
    history.cpu_seconds = saved["cpu_seconds"]
    return int(saved["step"])
