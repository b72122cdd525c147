"""Small models for the tests of `whence.identifiable`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from whence.identifiable import IdentifiableConfig, IdentifiableForSequenceClassification

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make() -> Any:
    """A random classifier with weights large enough that its attention is not flat."""

    def build(scale: float = 1.0, seed: int = 0, **fields: Any) -> IdentifiableForSequenceClassification:
        base: dict[str, Any] = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_labels": 3}
        torch.manual_seed(seed)
        model = IdentifiableForSequenceClassification(IdentifiableConfig(**(base | fields))).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0.0, scale * parameter.shape[-1] ** -0.5)
        return model

    return build


@pytest.fixture(scope="session")
def ids() -> Any:
    """Random token ids of one length, without repeats while the vocabulary lasts."""

    def draw(n: int, seed: int = 0) -> torch.Tensor:
        order = torch.randperm(395, generator=torch.Generator().manual_seed(seed)) + 5
        return order[:n][None]

    return draw
