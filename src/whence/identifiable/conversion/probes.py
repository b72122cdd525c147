"""A linear probe: logistic regression on frozen embeddings, the usual test of what an encoder still knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from whence.errors import InputError


@dataclass(frozen=True)
class Probe:
    """Labelled texts: fitted on `train`, scored on `test`, each a sequence of (text, label)."""

    name: str
    train: Sequence[tuple[str, str]]
    test: Sequence[tuple[str, str]]

    def __post_init__(self) -> None:
        known = {label for _, label in self.train}
        if len(known) < 2:
            raise InputError(
                f"the probe {self.name!r} has training labels {sorted(known)}: it needs at least two classes."
            )
        unseen = {label for _, label in self.test} - known
        if unseen or not self.test:
            what = f"has test labels {sorted(unseen)} that are not in training" if unseen else "has no test texts"
            raise InputError(f"the probe {self.name!r} {what}.")


def accuracy(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, ridge: float = 1e-4) -> float:
    """Share of `test` rows that multinomial logistic regression with an L2 penalty gets right.

    min over W, b of the mean cross-entropy of standardised x·W + b, plus ridge·‖W‖², by L-BFGS in float64.
    """
    mean, scale = train.double().mean(0), train.double().std(0).clamp_min(1e-12)
    x, y = (train.double() - mean) / scale, (test.double() - mean) / scale
    classes = int(max(train_labels.max(), test_labels.max())) + 1
    weight = torch.zeros(x.shape[1], classes, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        solver.zero_grad()
        loss = functional.cross_entropy(x @ weight + bias, train_labels) + ridge * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        return loss

    with torch.enable_grad():
        solver.step(objective)  # type: ignore[no-untyped-call, unused-ignore, arg-type]
    with torch.no_grad():
        return float(((y @ weight + bias).argmax(-1) == test_labels).double().mean())
