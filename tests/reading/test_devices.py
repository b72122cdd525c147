"""Every measure of a trace runs where its tensors are; float64 steps go to the CPU on devices that have none."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import whence
from tests.other_device import Elsewhere, OtherDeviceError, other_device
from whence.reading.trace import Trace


@cache
def traced(family: str) -> Trace:
    from conformance.zoo import build

    ids = torch.randint(5, 100, (1, 24), generator=torch.Generator().manual_seed(0))
    found = whence.trace(build(family).model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return found if isinstance(found, Trace) else found[0]


MEASURES: dict[str, Callable[[Trace], Any]] = {
    "identifiability": lambda trace: whence.identifiability(trace, keys=True).values,
    "effective attention": lambda trace: whence.effective_attention(trace).values,
    "verdict": lambda trace: whence.verdict(trace, rows=2).values.nan_to_num(-1),
    "certificate": lambda trace: whence.certify(trace, 1, 0, 9).upper,
    "witness": lambda trace: whence.witness(trace, 1, 0, 9).alternative,
    "doppelganger": lambda trace: whence.doppelganger(trace, rounds=1).values,
    "own share": lambda trace: torch.tensor(whence.contributions(trace, "alti").rollout().own_share()["median"]),
    "rows": lambda trace: trace[1].rows(3, 5),
} | {
    name: lambda trace, name=name: whence.contributions(trace, name).values  # type: ignore[misc]
    for name in ("alti", "norms", "globenc", "rollout", "effective-rollout", "value-zeroing", "decompx", "flow")
}


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("name", list(MEASURES))
def test_every_measure_runs_where_its_tensors_are(family: str, name: str) -> None:
    trace = traced(family)
    expected = MEASURES[name](trace)
    with other_device(float64=False) as device:
        found = MEASURES[name](trace.to(device))
    found = found.held if isinstance(found, Elsewhere) else found
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_factory_without_a_device_is_found() -> None:
    with other_device() as device:
        there = torch.ones(3).to(device)
        assert (there + torch.ones(3, device=device)).device == device
        with pytest.raises(OtherDeviceError, match="two devices"):
            there + torch.ones(3)


def test_float64_is_refused_where_there_is_none() -> None:
    with other_device(float64=False) as device, pytest.raises(OtherDeviceError, match="does not have"):
        torch.ones(3).to(device).double()
