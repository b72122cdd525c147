"""Value zeroing from the blocks' proved parts: the model's own numbers, and refused where they are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import whence
from whence.mixing import value_zeroing
from whence.reading.trace import Trace

Zoo = Callable[..., Trace]


@pytest.mark.parametrize(
    ("family", "tolerance"),
    [
        ("bert", 1e-11),
        ("gpt2", 1e-11),
        ("llama", 1e-6),
        ("qwen2", 1e-6),
    ],  # whose norms work in float32 whatever they get
)
def test_written_down_is_what_the_model_does(
    zoo: Zoo, family: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = zoo(family, torch.float64)
    found = whence.contributions(trace, "value-zeroing")
    assert found.provenance.settings["blocks"] == "written down"
    monkeypatch.setattr(value_zeroing, "written_down", lambda *_: False)
    own = whence.contributions(trace, "value-zeroing")
    assert own.provenance.settings["blocks"] == "the model's own"
    assert torch.allclose(found.extra["change"], own.extra["change"], atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", ["gemma2", "gpt_neox"])
def test_other_blocks_are_run_in_the_model(zoo: Zoo, family: str) -> None:
    found = whence.contributions(zoo(family), "value-zeroing")
    assert found.provenance.settings["blocks"] == "the model's own"


def test_parts_that_the_model_contradicts_are_not_used(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = zoo("bert", torch.float64)
    right = whence.contributions(trace, "value-zeroing")
    true = value_zeroing.zeroed_outputs

    def wrong(*arguments: object) -> Iterator[tuple[int, int, int, Tensor]]:
        for first, last, row, out in true(*arguments):  # type: ignore[arg-type]
            yield first, last, row, out + 0.01 * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)

    monkeypatch.setattr(value_zeroing, "zeroed_outputs", wrong)
    found = whence.contributions(trace, "value-zeroing")
    assert found.provenance.settings["blocks"] == "the model's own"
    assert torch.allclose(found.values, right.values, atol=1e-8)
