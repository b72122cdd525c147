"""DecompX against its definition written out slowly, on random and on real weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import whence
from tests.mixing.decompx_oracle import bert, gpt2, lengths
from whence.mixing.decompx import share_bias_, slope


def _random(family: str) -> Any:
    """A random model with biases and norms that are not 0 and 1, as a fresh one's would be."""
    from conformance.zoo import build

    specimen = build(family)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in specimen.model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return specimen.model.to(torch.float64)


def _compare(model: Any, inputs: Any, blocks: Any, *, causal: bool) -> None:
    trace = whence.trace(model, inputs)
    trace = trace[0] if isinstance(trace, list) else trace
    expected = lengths(trace[0].block_input, blocks, causal)
    found = whence.contributions(trace, "decompx").values
    assert found.dtype == torch.float64
    assert torch.allclose(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("seed", [0, 1])
def test_random_post_norm(seed: int) -> None:
    model = _random("bert")
    ids = torch.randint(5, 50, (1, 5), generator=torch.Generator().manual_seed(seed))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    _compare(model, inputs, bert(model.base_model), causal=False)


def test_random_pre_norm() -> None:
    model = _random("gpt2")
    ids = torch.randint(5, 50, (1, 5), generator=torch.Generator().manual_seed(0))
    _compare(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, gpt2(model.base_model), causal=True)


def test_a_real_classifier(shared_models: Path) -> None:
    model = whence.load(shared_models / "bert-tiny-sst2", dtype=torch.float64)
    _compare(model, "A dull, lifeless film.", bert(model.model.base_model), causal=False)


def test_a_bias_is_shared_out_by_absolute_dot_products() -> None:
    parts = torch.tensor([[[1.0, 0.0], [0.0, -3.0]]])
    assert torch.equal(share_bias_(parts.clone(), torch.tensor([4.0, 4.0])), torch.tensor([[[2.0, 1.0], [3.0, 0.0]]]))
    # Nothing along the bias: by length instead, and the sum still holds.
    across = share_bias_(parts[:, :1].clone(), torch.tensor([0.0, 5.0]))
    assert torch.equal(across, torch.tensor([[[1.0, 5.0]]]))


def test_the_activation_is_a_line_through_the_origin() -> None:
    before = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    active = torch.nn.functional.gelu(before)
    assert torch.allclose(slope(active, before) * before, active)
    assert bool(torch.isfinite(slope(active, before)).all())


@pytest.mark.parametrize("family", ["gemma", "gemma2"])
def test_norms_that_work_in_float32_inside_a_float64_model(family: str) -> None:
    from conformance.zoo import build

    specimen = build(family)
    coarse, fine = (
        whence.contributions(whence.trace(specimen.model.to(dtype), dict(specimen.inputs)), "decompx").values
        for dtype in (torch.float32, torch.float64)
    )
    assert torch.allclose(coarse.double(), fine, atol=1e-4)
