"""Substituted attention and zeroed values are on the path that the model takes: an independent forward agrees."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import whence
from conformance.zoo import build
from whence.errors import InputError
from whence.model.load import Model
from whence.reading.rerun import substitution
from whence.reading.rerun.substitution import Replace, ZeroValues, substitute_each
from whence.reading.tracing import trace


@pytest.mark.parametrize("family", ["bert", "llama", "gptj", "xlnet", "bart", "gpt_oss", "deberta-v2"])
def test_the_same_attention_gives_the_same_outputs(family):
    specimen = build(family)
    found = trace(Model(specimen.model), specimen.inputs)
    for name, stack in found.stacks.items():
        changes = [Replace(layer.index, layer.attention, attention=name) for layer in stack]
        again = whence.substitute(found, changes)
        torch.testing.assert_close(again.final_states, found.final_states, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["bert", "llama", "gptj"])
def test_a_replaced_row_changes_that_row_of_that_head_and_nothing_before_it(family):
    specimen = build(family)
    found = trace(Model(specimen.model), specimen.inputs)
    n = found[1].attention.shape[-1]
    row = torch.zeros(n)
    row[:3] = 1 / 3
    changed = whence.substitute(found, Replace(1, row, head=2, query=5)).trace
    torch.testing.assert_close(changed[1].attention[2, 5], row)
    torch.testing.assert_close(changed[1].outputs[2, 5], row @ found[1].values[2], atol=1e-5, rtol=1e-4)
    others = torch.ones(len(found[1].heads), n, dtype=torch.bool)
    others[2, 5] = False
    assert torch.equal(changed[1].attention[others], found[1].attention[others])
    assert torch.equal(changed[0].outputs, found[0].outputs)
    before, after = found[1].after_attention, changed[1].after_attention
    moved = (before - after).abs().amax(-1) > 1e-6
    assert moved.tolist() == [i == 5 for i in range(n)]


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_zeroed_values_agree_with_a_hook_on_the_models_own_value_projection(family):
    """The oracle zeroes the value projection's output with a hook: another route to the same computation."""
    specimen = build(family)
    model = specimen.model
    found = trace(Model(model), specimen.inputs)
    ours = whence.substitute(found, ZeroValues(1, [4]))
    name = {"bert": "bert.encoder.layer.1.attention.self.value", "llama": "model.layers.1.self_attn.v_proj"}[family]

    def zero(_module, _args, output):
        output = output.clone()
        output[:, 4] = 0
        return output

    handle = model.get_submodule(name).register_forward_hook(zero)
    with torch.no_grad():
        theirs = model(**specimen.inputs)
    handle.remove()
    torch.testing.assert_close(ours.logits, theirs.logits[0], atol=1e-5, rtol=1e-4)
    assert (ours.logits - found.logits).abs().max() > 1e-4


def test_zeroing_one_head_of_a_group_leaves_its_neighbour_alone():
    specimen = build("llama")
    found = trace(Model(specimen.model), specimen.inputs)
    changed = whence.substitute(found, ZeroValues(0, [0], head=1)).trace
    assert torch.equal(changed[0].outputs[0], found[0].outputs[0])
    assert not torch.equal(changed[0].outputs[1], found[0].outputs[1])


def test_uniform_attention_everywhere_agrees_with_a_model_without_scores():
    """Zeroing the query projection makes the scores equal, so attention is uniform: a second route."""
    specimen = build("bert")
    found = trace(Model(specimen.model), specimen.inputs)
    uniform = torch.full_like(found[0].attention, 1 / found[0].attention.shape[-1])
    ours = whence.substitute(found, [Replace(layer.index, uniform) for layer in found])
    for layer in specimen.model.bert.encoder.layer:
        nn.init.zeros_(layer.attention.self.query.weight)
        nn.init.zeros_(layer.attention.self.query.bias)
    theirs = trace(Model(specimen.model), specimen.inputs)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Replace(9, torch.ones(1)), "no layer 9"),
        (Replace(0, torch.ones(12), head=7, query=0), "no head 7"),
        (Replace(0, torch.ones(12), head=0, query=99), "query 99 is out of range"),
        (Replace(0, torch.ones(5), head=0, query=0), r"attention of shape \(5,\).*expected \(12,\)"),
        (ZeroValues(0, [50]), "key 50 is out of range"),
    ],
)
def test_a_change_that_does_not_fit_is_refused(change, message):
    specimen = build("bert")
    found = trace(Model(specimen.model), specimen.inputs)
    with pytest.raises(InputError, match=message):
        whence.substitute(found, change)


@pytest.mark.parametrize("family", ["bert", "llama", "xlnet", "bart", "gpt_oss", "deberta-v2"])
def test_changes_side_by_side_are_each_what_they_are_alone(family):
    specimen = build(family)
    found = trace(Model(specimen.model), specimen.inputs)
    name, stack = list(found.stacks.items())[-1]
    n = stack[0].attention.shape[-1]
    one, other = torch.zeros(n), torch.zeros(n)
    one[:2], other[0] = 0.5, 1.0
    changes = [
        Replace(stack[0].index, one, 0, 3, name),
        Replace(stack[0].index, other, 1, 3, name),
        Replace(stack[1].index, one, 1, 2, name),
    ]
    together = substitute_each(found, changes)
    assert len(together) == len(changes)
    for mine, change in zip(together, changes, strict=True):
        alone = whence.substitute(found, change)
        torch.testing.assert_close(mine.final_states, alone.final_states, atol=1e-5, rtol=1e-4)
        for layer, expected in zip(mine.trace.of(name), alone.trace.of(name), strict=True):
            torch.testing.assert_close(layer.outputs, expected.outputs, atol=1e-5, rtol=1e-4)
    changed = [float((m.final_states - found.final_states).abs().max()) for m in together]
    assert min(changed) > 1e-5, "a change that nobody would notice shows nothing"


def test_long_texts_go_one_by_one(monkeypatch):
    specimen = build("bert")
    found = trace(Model(specimen.model), specimen.inputs)
    row = torch.zeros(found[0].attention.shape[-1])
    row[0] = 1.0
    changes = [Replace(0, row, head, 1) for head in (0, 1)]
    together = substitute_each(found, changes)
    monkeypatch.setattr(substitution, "TOGETHER", 1)
    for a, b in zip(together, substitute_each(found, changes), strict=True):
        torch.testing.assert_close(a.final_states, b.final_states, atol=1e-5, rtol=1e-4)
