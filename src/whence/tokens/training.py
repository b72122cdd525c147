"""Training a map with the distance itself as the loss, stopped when the validation sentences no longer gain.

    min_g  mean_i δ(g(e_i), x_i)  over the training tokens, δ the cosine or the Euclidean distance.

The map starts from the ridge solution (`closed_form`), so that training only has to improve on it; its outputs are
counted in units of the embeddings' spread, which makes one learning rate fit every model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.errors import InputError
from whence.tokens.closed_form import ROWS, Moments, even_basis
from whence.tokens.maps import Affine, Perceptron
from whence.tokens.nearest import distances

SLOWER = 0.3  # the learning rate is multiplied by this when the validation loss no longer falls
WORSE = 1.1  # a map whose training loss is this many times that of always answering the mean has diverged


@dataclass(frozen=True)
class Training:
    """How maps are trained (Adam)."""

    learning_rate: float = 1e-3
    batch: int = 512  # tokens
    epochs: int = 20  # at most
    patience: int = 4  # epochs without a better validation loss, each with smaller steps, before it stops
    gain: float = 1e-3  # a validation loss is better when it is smaller by this share
    hidden: int | None = None  # width of the perceptron's hidden layer; None: that of the model
    penalties: tuple[float, ...] = (
        1e-6,
        1e-5,
        1e-4,
        1e-3,
        1e-2,
        1e-1,
        1.0,
        10.0,
    )  # of the ridge; the validation chooses

    def __post_init__(self) -> None:
        for name in ("learning_rate", "batch", "epochs", "patience"):
            if not getattr(self, name) > 0:
                raise InputError(f"training: {name}={getattr(self, name)!r} must be more than 0.")
        if self.hidden is not None and self.hidden < 1:
            raise InputError(f"training: hidden={self.hidden!r} must be at least 1, or None for the model's width.")
        if not self.penalties or min(self.penalties) <= 0:
            raise InputError(f"training: penalties={self.penalties!r} must be positive numbers, at least one.")


@dataclass(frozen=True)
class TrainedMap:
    """A trained map, or why there is none."""

    map: Affine | Perceptron | None
    epochs: int
    validation_loss: float
    diverged: str | None = None


def mean_distance(g: Affine | Perceptron, states: Tensor, embeddings: Tensor, distance: str) -> float:
    """mean_i δ(g(e_i), x_i), in blocks of rows."""
    total = 0.0
    for x, y in zip(torch.split(states, ROWS), torch.split(embeddings, ROWS), strict=True):
        total += float(distances(g(x), y, distance).double().sum())
    return total / len(states)


@torch.inference_mode(False)
@torch.enable_grad()
def train(
    kind: str,
    pairs: tuple[Tensor, Tensor],
    held_out: tuple[Tensor, Tensor],
    distance: str,
    start: Affine,
    penalty: float,
    moments: Moments,
    settings: Training,
    seed: int,
) -> TrainedMap:
    """A "linear" or "mlp" map fitted to `pairs` (states (N, d), embeddings (N, d_x)), stopped by `held_out`.

    `start` is the ridge map of that `penalty`; the steps are taken in its `even_basis`, u = Bᵀ(e − μ)/σ.

    The best map by validation loss is kept, the start included. Divergence (a loss that is not finite, or a training
    loss above that of always answering the mean) is reported instead of a map.
    """
    generator = torch.Generator().manual_seed(seed)
    unit = moments.target_spread or 1.0
    k, d = len(start.bias), pairs[0].shape[1]
    order = torch.randperm(len(pairs[0]), generator=generator)
    basis, back = (t.float() for t in even_basis(moments, penalty))
    # Turned and shuffled once: an epoch then reads slices, from a random place on.
    fit = _ready(pairs[0][order], pairs[1][order], start, basis, unit, distance)
    held = _ready(held_out[0], held_out[1], start, basis, unit, distance)
    # The linear part and the way into the hidden layer are one matrix, so that one product serves both.
    weight, bias, out = back @ start.weight / unit, start.bias / unit, None
    if kind == "mlp":
        width = settings.hidden or k
        into = torch.randn(d, width, generator=generator) / math.sqrt(d)
        weight, bias = torch.cat([weight, into], 1), torch.cat([bias, torch.zeros(width)])
        out = torch.zeros(width, k).requires_grad_()
    weights = [weight.requires_grad_(), bias.requires_grad_(), *([] if out is None else [out])]
    optimiser = torch.optim.Adam(weights, lr=settings.learning_rate, fused=True)

    def loss_of(z: Tensor, y: Tensor) -> Tensor:
        both = torch.addmm(bias, z, weight)
        guess = both
        if out is not None:
            straight, hidden = torch.split(both, [k, len(out)], dim=1)  # one copy in the backward pass, slices take two
            guess = torch.addmm(straight, torch.nn.functional.gelu(hidden), out)
        if distance == "cosine":  # y has length 1
            lengths: Tensor = torch.linalg.vector_norm(guess, dim=-1).clamp_min(1e-30)
            return 1 - ((guess * y).sum(-1) / lengths).mean()
        apart: Tensor = torch.linalg.vector_norm(guess - y, dim=-1)
        return apart.mean()

    def validation() -> float:
        with torch.no_grad():
            blocks = zip(*(torch.split(side, ROWS) for side in held), strict=True)
            return sum(float(loss_of(z, y)) * len(z) for z, y in blocks) / len(held[0])

    limit = WORSE * _loss_of_the_mean(fit[1], moments.target_mean.float() / unit, distance)
    best, best_weights, kept_for = validation(), [w.detach().clone() for w in weights], 0
    epoch = 0
    for epoch in range(1, settings.epochs + 1):
        begin = int(torch.randint(len(order), (), generator=generator))
        running = 0.0
        for z, y in _batches(*fit, begin, settings.batch):
            optimiser.zero_grad()
            loss = loss_of(z, y)
            loss.backward()
            optimiser.step()
            running += float(loss.detach()) * len(z) / len(order)
        loss_held = validation()
        wrong = not math.isfinite(running + loss_held)
        if wrong or running > limit:
            what = "its loss was not finite" if wrong else f"its training loss was {running:.3g}, above {limit:.3g}"
            return TrainedMap(None, epoch, loss_held, f"{what}, after {epoch} epoch{'s' * (epoch != 1)}")
        if loss_held < best * (1 - settings.gain):
            best, best_weights, kept_for = loss_held, [w.detach().clone() for w in weights], 0
            continue
        kept_for += 1
        if kept_for >= settings.patience:
            break
        with torch.no_grad():  # back to the best, in smaller steps
            for w, kept in zip(weights, best_weights, strict=True):
                w.copy_(kept)
        for group in optimiser.param_groups:
            group["lr"] *= SLOWER
    w, b = best_weights[:2]
    linear = Affine(start.mean, start.spread, basis @ w[:, :k] * unit, b[:k] * unit)
    if kind == "linear":
        return TrainedMap(linear, epoch, best)
    return TrainedMap(Perceptron(linear, basis @ w[:, k:], b[k:].clone(), best_weights[2] * unit), epoch, best)


def _ready(
    states: Tensor, embeddings: Tensor, start: Affine, basis: Tensor, unit: float, distance: str
) -> tuple[Tensor, Tensor]:
    """States in the basis of the steps, and embeddings as the loss wants them: of length 1, or in units of their spread."""
    y = torch.nn.functional.normalize(embeddings, dim=-1) if distance == "cosine" else embeddings / unit
    return (states - start.mean) / start.spread @ basis, y


def _batches(z: Tensor, y: Tensor, begin: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Every row once, in slices, from row `begin` on."""
    for first, last in ((begin, len(z)), (0, begin)):
        for at in range(first, last, size):
            yield z[at : min(at + size, last)], y[at : min(at + size, last)]


def _loss_of_the_mean(y: Tensor, middle: Tensor, distance: str) -> float:
    """The training loss of the map that always answers the mean embedding, in the units of the training."""
    if distance == "cosine":
        return 1 - float((y @ torch.nn.functional.normalize(middle, dim=0)).mean())
    return float(torch.linalg.vector_norm(y - middle, dim=-1).mean())
