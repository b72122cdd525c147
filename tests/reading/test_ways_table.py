"""The table of ways of use: it can say right, refused, not taken and wrong, and says each where it is so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance import ways
from conformance.zoo import build
from whence.model.load import Model
from whence.reading.tracing import trace


@pytest.mark.parametrize("way", ["4-D mask", "left-padded", "LoRA", "bf16"])
def test_right(way):
    if way == "LoRA":
        pytest.importorskip("peft")
    assert ways.judge("llama", way).result == ways.RIGHT


def test_what_a_model_does_not_take_is_not_called_right():
    assert ways.judge("bloom", "4-D mask").result == ways.NOT_TAKEN


def test_refused(monkeypatch):
    def training(specimen, _folder):
        specimen.model.train()
        return ways.Use(specimen.model, specimen.inputs)

    monkeypatch.setitem(ways.WAYS, "training", training)
    found = ways.judge("bert", "training")
    assert found.result == ways.REFUSED
    assert "model.eval()" in found.reason


def test_wrong_numbers_are_called_wrong():
    specimen = build("bert")
    found = trace(Model(specimen.model), specimen.inputs)
    expected = specimen.run()
    use = ways.Use(specimen.model, specimen.inputs, found)
    assert ways.compare(found, use, expected) == (ways.RIGHT, "")
    assert ways.compare(replace(found, logits=found.logits + 0.1), use, expected)[0] == ways.WRONG
    stack = found.stacks["encoder"]
    layer = replace(stack.layers[0], _attention=stack.layers[0].attention.flip(-1))
    other = replace(found, stacks={"encoder": replace(stack, layers=(layer, *stack.layers[1:]))})
    assert ways.compare(other, use, expected)[0] == ways.WRONG
    judged = ways.Use(specimen.model, specimen.inputs, judge=lambda _: {"null share": 1e-5, "rank": 1.0})
    assert ways.compare(found, judged, expected) == (ways.WRONG, "rank is 1.0e+00 from float64")


def test_the_section_is_put_in_its_place(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n## Ways of use\n\nan earlier table\n\n## After\n\nstays\n", encoding="utf-8")
    outcomes = [ways.Outcome("bert", "LoRA", ways.RIGHT), ways.Outcome("gpt2", "LoRA", ways.REFUSED, "for a reason")]
    for _ in range(2):
        ways.put(page, outcomes)
        text = page.read_text(encoding="utf-8")
        assert "an earlier table" not in text
        assert "| bert | ✓ |" in text
        assert "- LoRA, gpt2: for a reason" in text
        assert text.count("## Ways of use") == text.count("## After") == 1
        assert text.endswith("## After\n\nstays\n")
