from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from whence.errors import InputError
from whence.tokens.closed_form import moments, ridge
from whence.tokens.training import TrainedMap, Training, mean_distance, train


def problem(seed: int = 0) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """States that are a bent image of the embeddings: a linear map cannot undo it wholly, a perceptron can do better."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randn(3000, 8, generator=g) + 1
    turn = torch.randn(8, 8, generator=g)
    x = torch.tanh(y @ turn / 3) * 4 + 0.05 * torch.randn(3000, 8, generator=g)
    return (x[:2400], y[:2400]), (x[2400:], y[2400:])


def fitted(kind: str, distance: str, seed: int = 0, **settings: float) -> tuple[TrainedMap, float]:
    fit, held = problem()
    found = moments(*fit)
    start = ridge(found, (1e-3,))[0]
    made = train(kind, fit, held, distance, start, 1e-3, found, Training(**settings), seed)  # type: ignore[arg-type]
    return made, mean_distance(start, *held, distance)


@pytest.mark.parametrize("distance", ["cosine", "l2"])
def test_training_improves_on_its_start_and_the_perceptron_on_the_line(distance: str) -> None:
    linear, start = fitted("linear", distance)
    bent, _ = fitted("mlp", distance, epochs=40, hidden=64)
    _, held = problem()
    assert linear.map is not None
    assert bent.map is not None
    losses = [mean_distance(made.map, *held, distance) for made in (linear, bent) if made.map is not None]
    assert losses[0] <= start * (1 + 1e-6)
    assert losses[1] < 0.9 * losses[0]


def test_a_rerun_gives_the_same_map() -> None:
    one, two = fitted("mlp", "cosine")[0], fitted("mlp", "cosine")[0]
    other = fitted("mlp", "cosine", seed=1)[0]
    x = problem()[1][0]
    assert one.map is not None
    assert two.map is not None
    assert other.map is not None
    assert torch.equal(one.map(x), two.map(x))
    assert not torch.equal(one.map(x), other.map(x))


@pytest.mark.parametrize("distance", ["cosine", "l2"])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_divergence_is_reported(kind: str, distance: str) -> None:
    made, _ = fitted(kind, distance, learning_rate=1e6)
    assert made.map is None
    assert made.diverged is not None


def test_a_loss_that_is_no_number_is_divergence() -> None:
    fit, held = problem()
    found = moments(*fit)
    start = ridge(found, (1e-3,))[0]
    fit[1][5, 0] = math.inf
    made = train("linear", fit, held, "l2", start, 1e-3, found, Training(), 0)
    assert made.map is None
    assert "not finite" in str(made.diverged)


def test_it_stops_early() -> None:
    fit, _ = problem()
    noise = torch.randn(2400, 8, generator=torch.Generator().manual_seed(3))  # nothing to learn from
    held = (torch.randn(600, 8, generator=torch.Generator().manual_seed(4)), torch.randn(600, 8))
    found = moments(fit[0], noise)
    made = train("mlp", (fit[0], noise), held, "l2", ridge(found, (1.0,))[0], 1.0, found, Training(epochs=50), 0)
    assert made.epochs < 50


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"learning_rate": -1.0}, {"hidden": 0}, {"penalties": ()}])
def test_wrong_settings(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match="training"):
        Training(**wrong)  # type: ignore[arg-type]
