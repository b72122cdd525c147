"""Measures of half-precision models against the same weights in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import whence
from tests.mixing.mixing_oracle import alti, head_expanded
from whence.reading.trace import Trace


def _traced(model: Any, inputs: Any) -> Trace:
    found = whence.trace(model, dict(inputs))
    return found if isinstance(found, Trace) else found[0]


def _model(family: str, dtype: torch.dtype, small: float = 1.0) -> tuple[Any, Any, Any]:
    """A model in half precision and the same weights in float64. small: factor on the embeddings."""
    from conformance.zoo import build

    half, fine = build(family), build(family)
    half.model.to(dtype)
    half.model.get_input_embeddings().weight.data.mul_(small)
    fine.model.to(dtype).to(torch.float64)
    fine.model.load_state_dict(half.model.state_dict())
    return half.model, fine.model, half.inputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_value_zeroing_and_attribution_equal_the_float64_model(family: str, dtype: torch.dtype) -> None:
    half, fine, inputs = _model(family, dtype)
    coarse, exact = _traced(half, inputs), _traced(fine, inputs)
    for measure in (
        lambda trace: whence.contributions(trace, "value-zeroing").values,
        lambda trace: whence.hidden_token_attribution(trace, "exact").values,
    ):
        assert float((measure(coarse).double() - measure(exact).double()).abs().max()) < 1e-4
    assert next(half.parameters()).dtype == dtype
    settings = whence.contributions(coarse, "value-zeroing").provenance.settings
    assert settings["arithmetic"] == "float32"
    assert "arithmetic" not in whence.contributions(exact, "value-zeroing").provenance.settings


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["gpt_neox", "gptj", "phi", "llama", "bert"])
def test_alti_equals_float64_on_the_recorded_tensors(family: str, dtype: torch.dtype) -> None:
    """The model's dtype says what the tensors are, not how they are measured; a side branch is added up finely, too."""
    half, _, inputs = _model(family, dtype)
    trace = _traced(half, inputs)
    made = whence.contributions(trace, "alti").values.double()
    for row, layer in zip(made, trace.of(), strict=True):
        assert (layer.wiring.kind == "parallel") == (family in ("gpt_neox", "gptj", "phi"))
        bias = layer.projection.bias
        fine = SimpleNamespace(
            attention=layer.attention.double(),
            values=layer.values.double(),
            projection=SimpleNamespace(
                weight=layer.projection.weight.detach().double(), bias=None if bias is None else bias.detach().double()
            ),
            wiring=layer.wiring,
            block_input=layer.block_input.double(),
            _side=None if layer._side is None else layer._side.double(),
        )
        parts, _, y = head_expanded(fine)
        assert float((row - alti(parts, y)).abs().max()) <= 1e-4
