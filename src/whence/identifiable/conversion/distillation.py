"""Distillation: bring a tied model's hidden states back to the original's, on texts of all lengths.

    loss = Σ_l  Σ_i ‖e_i^l − ê_i^l‖² / Σ_i ‖e_i^l‖²   +   w · (1 − cos(mean_i e_i^L, mean_i ê_i^L))

over the real tokens i of a batch; e of the original, ê of the tied model, w the weight of the text embedding. No labels
are used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from whence.errors import ModelError
from whence.identifiable.conversion.checkpoint import Checkpoint, History
from whence.identifiable.conversion.windows import WindowedTexts, batch
from whence.model.identity import hash_configuration
from whence.model.load import hash_weights
from whence.results.progress import Progress, shown
from whence.results.run_identity import RunIdentity

Objective = Callable[[nn.Module, nn.Module, dict[str, Tensor], float], Tensor]
"""(original, tied model, batch, weight of what is not the chief term) → loss."""


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


def states(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """e^1 … e^L of a batch, each (batch, n, d)."""
    output = model(**inputs, output_hidden_states=True)
    states: tuple[Tensor, ...] = output.hidden_states[1:]
    return states


def loss_of(original: tuple[Tensor, ...], tied: tuple[Tensor, ...], mask: Tensor, weight: float = 1.0) -> Tensor:
    """The loss above, for one batch; `mask` (batch, n) is 1 at real tokens."""
    real = mask[..., None].to(original[0])
    total = original[0].new_zeros(())
    for ours, theirs in zip(tied, original, strict=True):
        total = total + ((ours - theirs).square() * real).sum() / (theirs.square() * real).sum()
    ours, theirs = pool(tied[-1], mask), pool(original[-1], mask)
    return total + weight * (1 - torch.cosine_similarity(ours, theirs, dim=-1).mean())


def state_loss(original: nn.Module, tied: nn.Module, inputs: dict[str, Tensor], weight: float) -> Tensor:
    """`loss_of` both models on one batch."""
    with torch.no_grad():
        wanted = states(original, inputs)
    return loss_of(wanted, states(tied, inputs), inputs["attention_mask"], weight)


def pool(final: Tensor, mask: Tensor) -> Tensor:
    """The mean over real tokens: (batch, n, d) → (batch, d)."""
    real = mask[..., None].to(final)
    return (final * real).sum(1) / real.sum(1)


def distil(
    tied: nn.Module,
    original: nn.Module,
    corpus: WindowedTexts,
    schedule: Schedule,
    *,
    checkpoint: Path | None = None,
    start: str | None = None,
    every: int = 100,
    objective: Objective | None = None,
    progress: Progress = False,
) -> History:
    """Train `tied` in place on `objective`, the hidden states' where none is given.

    With `checkpoint`, a file written every so many steps from which a stopped run goes on.

    The checkpoint of another original, other texts, another `start` (the hash of the weights that `tied` began with,
    where they are not the closed form of the original's) or another schedule is refused.
    """
    parameters = [p for p in tied.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(
        parameters, lr=schedule.learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    state = None
    if checkpoint is not None:
        hashes = {"weights": hash_weights(original), "texts": corpus.digest}
        if (configuration := hash_configuration(original)) is not None:
            hashes["configuration"] = configuration
        identity = RunIdentity("distillation", hashes if start is None else {**hashes, "start": start}, vars(schedule))
        state = Checkpoint(checkpoint, identity, tied, optimiser)
    first, history = (0, History()) if state is None else state.resume()
    tied.eval()  # no dropout: the original's states are exact targets
    original.eval()
    device = parameters[0].device
    begun = time.process_time() - history.cpu_seconds
    with shown(progress) as tell:
        for step in range(first, schedule.steps):
            inputs = {k: t.to(device) for k, t in batch(corpus, schedule.tokens, schedule.seed, step).items()}
            loss = (objective or state_loss)(original, tied, inputs, schedule.embedding_weight)
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
            tell(f"Distilling, loss {value:.3f}", step + 1, schedule.steps)
            if state is not None and ((step + 1) % every == 0 or step + 1 == schedule.steps):
                state.save(step + 1, history)
    return history
