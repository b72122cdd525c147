"""Small random models of many families, traced once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

import whence
from whence.reading.trace import Trace


@cache
def _traced(family: str, dtype: torch.dtype) -> Trace:
    from conformance.zoo import build

    specimen = build(family)
    specimen.model.to(dtype)
    found = whence.trace(specimen.model, dict(specimen.inputs))
    return found if isinstance(found, Trace) else found[0]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def zoo() -> Callable[..., Trace]:
    """zoo("bert") or zoo("llama", torch.float64): a trace of a tiny random model."""
    return lambda family, dtype=torch.float32: _traced(family, dtype)


@pytest.fixture(scope="session")
def minilm(minilm_path: object) -> whence.Model:
    return whence.load("minilm")
