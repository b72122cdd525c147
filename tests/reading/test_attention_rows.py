"""Fused passes: the model's own fused attention runs, and rows of attention are made again, checked, when they are asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conformance.zoo import build
from tests.versions import older_than_locked
from whence.errors import ModelError, WiringError
from whence.model.load import Model
from whence.reading import attention_rows as module
from whence.reading import layer as layer_module
from whence.reading.capture import fused
from whence.reading.tracing import trace
from whence.reading.wiring import on_text

# Grouped heads, a sliding window, soft caps, a bias and cross-attention, learned sinks, padding-free encoders.
SDPA = ["bert", "llama", "qwen2", "mistral", "t5", "bart", "modernbert", "gpt2"]
T5_IS_EAGER = older_than_locked("transformers")  # it came to the attention interface after the lowest transformers
if T5_IS_EAGER:
    SDPA.remove("t5")
EAGER = ["gemma2", "gpt_oss", "granite_swa"]


def specimen_of(family):
    specimen = build(family)
    if family in SDPA:
        specimen.model.set_attn_implementation("sdpa")
    return specimen


def eager(model, inputs):
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(**inputs, output_attentions=True)
    model.set_attn_implementation(before)
    return found


def stacks_of(found, theirs):
    if len(found.stacks) == 1:
        return [(found.of(), theirs.attentions)]
    names = ("encoder", "decoder", "cross")
    return [(found.of(name), getattr(theirs, f"{name}_attentions")) for name in names]


@pytest.mark.parametrize("family", SDPA + EAGER)
def test_rows_made_in_blocks_are_the_weights_of_eager_attention(family, monkeypatch):
    """Small blocks, so that a short text has many: eager attention runs in blocks, too."""
    for place in (module, fused):
        monkeypatch.setattr(place, "BLOCK", 64)
    monkeypatch.setattr(
        layer_module, "rows_at_a_time", lambda heads, keys, block=64: module.rows_at_a_time(heads, keys, 64)
    )
    specimen = specimen_of(family)
    theirs = eager(specimen.model, specimen.inputs)
    found = trace(Model(specimen.model), specimen.inputs)
    for stack, attentions in stacks_of(found, theirs):
        for layer, attention in zip(stack, attentions, strict=True):
            assert layer.rebuilt
            assert layer._attention is None
            expected = attention[0][..., : layer.shape[-1]]
            if family == "granite_swa" and layer.sink is not None:  # reports its weights without the sink's share
                expected = expected * (1 - layer.sink[..., None])
            assert float((layer.attention - expected).abs().max()) <= 1e-5
            assert float((layer.rows(1, 3) - layer.attention[:, 1:3]).abs().max()) <= 1e-6
            assert float((layer.weights_of(1, 2) - layer.attention[1, 2]).abs().max()) <= 1e-6
            chosen = layer.select([1])
            assert float((chosen.attention[0] - layer.attention[1]).abs().max()) <= 1e-6


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_the_model_runs_its_own_fused_attention(family, monkeypatch):
    specimen = specimen_of(family)
    model = Model(specimen.model)
    trace(model, specimen.inputs)  # proved
    calls, sdpa = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or sdpa(*a, **k)
    )
    monkeypatch.setattr(module, "attention_rows", None)
    found = trace(model, specimen.inputs)
    assert len(calls) == len(found)
    with torch.no_grad():
        plain = specimen.model(**specimen.inputs)
    theirs = plain.logits if found.logits is not None else plain.last_hidden_state
    assert torch.equal(found.logits if found.logits is not None else found.final_states, theirs[0])


def test_where_keys_are_not_proved_attention_is_recorded_as_it_is():
    for family in ("deberta-v2", "bloom"):
        specimen = build(family)
        found = trace(Model(specimen.model), specimen.inputs)
        assert all(layer._attention is not None and not layer.rebuilt for layer in found)


def test_a_padded_batch_is_the_same_as_one_by_one():
    specimen = specimen_of("llama")
    model, ids = Model(specimen.model), specimen.inputs["input_ids"][:1]
    texts = {"input_ids": torch.cat([ids, ids]), "attention_mask": torch.ones(2, ids.shape[1], dtype=torch.long)}
    texts["attention_mask"][1, 5:] = 0
    both = trace(model, texts)
    alone = trace(model, ids[:, :5])
    assert all(layer.rebuilt for layer in both[1])
    assert both[1].attention.shape == alone.attention.shape
    assert float((both[1].attention - alone.attention).abs().max()) <= 1e-5


@pytest.mark.parametrize("part", ["_queries", "grouped_keys", "grouped_values", "_outputs"])
def test_a_broken_block_is_refused(part):
    specimen = specimen_of("llama")
    layer = trace(Model(specimen.model), specimen.inputs)[1]
    broken = getattr(layer, part).clone()
    broken[1, 3] *= 1.05
    bad = replace(layer, **{part: broken})
    with pytest.raises(WiringError, match="does not give the head outputs"):
        _ = bad.attention
    row = 3
    with pytest.raises(WiringError, match=f"rows {row} … {row}"):
        bad.rows(row, row + 1)
    if part in ("_queries", "_outputs"):
        bad.rows(0, 3)  # its other rows are right, and given out


def test_a_mask_that_the_model_does_not_use_is_refused():
    specimen = specimen_of("llama")
    layer = trace(Model(specimen.model), specimen.inputs)[0]
    with pytest.raises(WiringError):
        _ = replace(layer, visible=None, causal=False).attention


def test_every_text_is_checked_on_a_sample_of_rows(monkeypatch):
    """The law holds when the model is proved and breaks on a text: the trace itself is refused."""
    specimen = specimen_of("llama")
    model = Model(specimen.model)
    trace(model, specimen.inputs)
    made = fused._call
    monkeypatch.setattr(fused, "_call", lambda *a: replace(made(*a), scale=made(*a).scale * 1.01))
    with pytest.raises(ModelError, match="made from queries and keys does not give its head output"):
        trace(model, specimen.inputs)
    monkeypatch.setattr(on_text, "_sampled_rows", lambda *a: None)
    found = trace(model, specimen.inputs)
    with pytest.raises(WiringError):
        _ = found[0].attention


@pytest.mark.skipif(T5_IS_EAGER, reason="this T5 has no fused pass")
def test_a_saved_fused_trace_makes_its_rows_again(tmp_path):
    specimen = specimen_of("t5")
    found = trace(Model(specimen.model), specimen.inputs)
    again = type(found).load(found.save(tmp_path / "trace.safetensors"))
    for name in found.stacks:
        assert again.of(name)[0].rebuilt
        assert float((again.of(name).attention - found.of(name).attention).abs().max()) <= 1e-6
