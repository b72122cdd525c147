"""Training a map with the distance itself as the loss, stopped when the validation sentences no longer gain.

    min_g  mean_i δ(g(e_i), x_i)  over the training tokens, δ the cosine or the Euclidean distance.

The map starts from the ridge solution (`closed_form`), so that training only has to improve on it; its outputs are
counted in units of the embeddings' spread, which makes one learning rate fit every model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.errors import InputError
from whence.tokens.closed_form import Moments
from whence.tokens.maps import Affine, Perceptron
from whence.tokens.nearest import distances

WORSE = 1.1  # a map whose training loss is this many times that of always answering the mean has diverged


@dataclass(frozen=True)
class Training:
    """How maps are trained (Adam)."""

    learning_rate: float = 1e-3
    batch: int = 512  # tokens
    epochs: int = 30  # at most
    patience: int = 3  # epochs without a better validation loss before it stops
    gain: float = 1e-3  # a validation loss is better when it is smaller by this share
    hidden: int | None = None  # width of the perceptron's hidden layer; None: that of the model
    penalties: tuple[float, ...] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # of the ridge; the validation chooses

    def __post_init__(self) -> None:
        for name in ("learning_rate", "batch", "epochs", "patience"):
            if not getattr(self, name) > 0:
                raise InputError(f"training: {name}={getattr(self, name)!r} must be more than 0.")
        if self.hidden is not None and self.hidden < 1:
            raise InputError(f"training: hidden={self.hidden!r} must be at least 1, or None for the model's width.")
        if not self.penalties or min(self.penalties) <= 0:
            raise InputError(f"training: penalties={self.penalties!r} must be positive numbers, at least one.")


@dataclass(frozen=True)
class Trained:
    """A trained map, or why there is none."""

    map: Affine | Perceptron | None
    epochs: int
    validation_loss: float
    diverged: str | None = None


def mean_distance(g: Affine | Perceptron, states: Tensor, embeddings: Tensor, distance: str) -> float:
    """mean_i δ(g(e_i), x_i), in blocks of rows."""
    total = 0.0
    for x, y in zip(states.split(8192), embeddings.split(8192), strict=True):
        total += float(distances(g(x), y, distance).double().sum())
    return total / len(states)


def train(
    kind: str,
    pairs: tuple[Tensor, Tensor],
    held_out: tuple[Tensor, Tensor],
    distance: str,
    start: Affine,
    found: Moments,
    settings: Training,
    seed: int,
) -> Trained:
    """A "linear" or "mlp" map fitted to `pairs` (states (N, d), embeddings (N, d_x)), stopped by `held_out`.

    The best map by validation loss is kept, the start included. Divergence (a loss that is not finite, or a training
    loss above that of always answering the mean) is reported instead of a map.
    """
    states, embeddings = pairs
    generator = torch.Generator().manual_seed(seed)
    unit = found.target_spread or 1.0
    middle = found.target_mean.float()
    width = settings.hidden or embeddings.shape[1]
    d = states.shape[1]
    # The linear part and the way into the hidden layer are one matrix, so that one product serves both.
    weight = start.weight / unit
    bias = torch.zeros_like(middle)
    out = torch.zeros(0, len(middle))
    if kind == "mlp":
        into = torch.randn(d, width, generator=generator) / math.sqrt(d)
        weight, bias = torch.cat([weight, into], 1), torch.cat([bias, torch.zeros(width)])
        out = torch.zeros(width, len(middle))
    weights = [weight.requires_grad_(), bias.requires_grad_()] + ([out.requires_grad_()] if kind == "mlp" else [])
    optimiser = torch.optim.Adam(weights, lr=settings.learning_rate, fused=True)
    k = len(middle)

    def standard(x: Tensor) -> Tensor:
        return (x - start.mean) / start.spread

    def loss_of(z: Tensor, y: Tensor) -> Tensor:
        both = torch.addmm(bias, z, weight)
        guess = both[:, :k]
        if kind == "mlp":
            guess = guess + torch.nn.functional.gelu(both[:, k:]) @ out
        if distance == "cosine":
            return distances(guess * unit + middle, y, distance).mean()
        return distances(guess, (y - middle) / unit, distance).mean()

    def current() -> Affine | Perceptron:
        w, b = weight.detach().clone(), bias.detach().clone()
        linear = Affine(start.mean, start.spread, (w[:, :k] * unit).contiguous(), b[:k] * unit + middle)
        if kind == "linear":
            return linear
        return Perceptron(linear, w[:, k:].contiguous(), b[k:].clone(), out.detach() * unit)

    def validation() -> float:
        with torch.no_grad():
            total = 0.0
            for x, y in zip(held_out[0].split(8192), held_out[1].split(8192), strict=True):
                total += float(loss_of(standard(x), y)) * len(x)
            return total / len(held_out[0])

    limit = WORSE * _loss_of_the_mean(embeddings, middle, unit, distance)
    best, best_epoch, best_map = validation(), 0, current()
    epoch = 0
    for epoch in range(1, settings.epochs + 1):
        order = torch.randperm(len(states), generator=generator)
        running = 0.0
        for rows in order.split(settings.batch):
            optimiser.zero_grad()
            loss = loss_of(standard(states[rows]), embeddings[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            running += float(loss.detach()) * len(rows)
        running /= len(states)
        held = validation()
        if not math.isfinite(running) or not math.isfinite(held):
            return Trained(None, epoch, held, f"its loss was {running} after {epoch} epoch{'s' * (epoch != 1)}")
        if running > limit:
            said = f"after {epoch} epoch{'s' * (epoch != 1)} its training loss was {running:.3g}, {limit:.3g} or less is sane"
            return Trained(None, epoch, held, said)
        if held < best * (1 - settings.gain):
            best, best_epoch, best_map = held, epoch, current()
        elif epoch - best_epoch >= settings.patience:
            break
    return Trained(best_map, epoch, best)


def _loss_of_the_mean(embeddings: Tensor, middle: Tensor, unit: float, distance: str) -> float:
    """The training loss of the map that always answers the mean embedding, in the units of the training."""
    total = 0.0
    for y in embeddings.split(8192):
        apart = distances(middle.expand_as(y), y, distance)
        total += float(apart.double().sum()) / (1.0 if distance == "cosine" else unit)
    return total / len(embeddings)
