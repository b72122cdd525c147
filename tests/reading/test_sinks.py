"""Learned sinks: the column that a softmax gives to no key is kept, and rows with it sum to one."""

from __future__ import annotations

import pytest
import torch

from conformance.zoo import build
from whence.model.load import Model
from whence.reading.capture import attach
from whence.reading.capture.recorder import AttentionRecorder
from whence.reading.trace import Trace
from whence.reading.tracing import trace

# Granite leaves the sink out of its softmax and scales the head outputs instead.
FAMILIES = ["gpt_oss", "openai_privacy_filter", "mimo_v2_flash", "flint", "granite_swa", "granitemoe_swa"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sink_is_the_column_of_the_models_own_softmax(family):
    """The sink's weight from the parameter itself: exp(s) / (exp(s) + Σ exp(scores))."""
    specimen = build(family)
    found = trace(Model(specimen.model), specimen.inputs)
    sinks = [m.sinks for m in specimen.model.modules() if getattr(m, "sinks", None) is not None]
    with_sink = [layer for layer in found if layer.sink is not None]
    assert len(sinks) == len(with_sink) > 0
    for layer, parameter in zip(with_sink, sinks, strict=True):
        scores = (layer.queries.double() @ layer.keys.double().mT) * layer.scale
        if layer.visible is not None:
            scores = scores.masked_fill(~layer.visible, -torch.inf)
        score = parameter.detach().double().reshape(-1, 1)
        expected = 1 / (1 + (torch.logsumexp(scores, -1) - score).exp())
        assert torch.allclose(layer.sink.double(), expected, atol=1e-5)
        assert torch.allclose(layer.attention_and_sink.double().sum(-1), torch.ones(()).double(), atol=1e-6)


def test_models_without_sinks_have_none():
    for family in ("bert", "llama", "bloom"):
        specimen = build(family)
        for layer in trace(Model(specimen.model), specimen.inputs):
            assert layer.sink is None
            assert layer.attention_and_sink is layer.attention


def test_the_sink_is_seen_in_plain_code_too():
    """The function mode finds the column in a softmax that is cut before the product with the values."""
    specimen = build("gpt_oss")
    inputs = {**specimen.inputs, "use_cache": False}
    recorders = [AttentionRecorder(), AttentionRecorder()]
    for capture, recorder in zip((attach.INTERFACE, attach.FUNCTION_MODE), recorders, strict=True):
        with attach.attached(specimen.model, capture, recorder, 1):
            specimen.model(**inputs)
    assert len(recorders[0].calls) == len(recorders[1].calls) > 0
    for ours, theirs in zip(recorders[0].calls, recorders[1].calls, strict=True):
        assert torch.equal(ours.sink, theirs.sink)


def test_a_sink_survives_saving_and_choosing_heads(tmp_path):
    specimen = build("gpt_oss")
    found = trace(Model(specimen.model), specimen.inputs)
    again = Trace.load(found.save(tmp_path / "sink.safetensors"))
    assert torch.equal(again[0].sink, found[0].sink)
    assert torch.equal(found[0].select([1]).sink, found[0].sink[1:2])
    tokens = found.of().key_tokens.with_sink()
    assert tokens[-1] == "sink"
    assert len(tokens) == found[0].attention_and_sink.shape[-1]
