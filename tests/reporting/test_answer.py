"""The answer part of the page's data is what whence.attribute gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import whence
from tests.writers import decoder, translator
from whence.reporting import answer
from whence.reporting.analysis import Analysis
from whence.reporting.answer import answer_data
from whence.reporting.quantise import unpack

PROMPT = "Cats purr.\n\nDogs bark. They run!"


def _traced() -> whence.Trace:
    found: whence.Trace = whence.trace(decoder(), PROMPT, continuation=" she is well. he is not")
    return found


@pytest.mark.parametrize("method", ["alti-logit", "alti", "input-x-gradient", "gradient"])
def test_scores_and_units_are_those_of_attribute(method: str) -> None:
    if "gradient" in method:
        pytest.importorskip("captum", reason="gradients come with the extra 'explain'")
    trace = _traced()
    data, blocks = answer_data(Analysis(trace), [method])
    assert data is not None
    scores = whence.attribute(decoder(), trace, method)
    arrays, _ = unpack(blocks[f"answer/{method}"])
    for unit, found in (("values", scores), ("sentence", scores.by("sentence")), ("document", scores.by("document"))):
        step = float(found.values.abs().max()) / 32767
        torch.testing.assert_close(torch.tensor(arrays[unit]), found.values.double(), rtol=0, atol=step)
    for unit in ("sentence", "document"):
        assert [u["name"] for u in data["units"][unit]] == list(scores.by(unit).inputs)
    assert data["prompt"] == trace.prompt_length
    assert [c["probability"] for c in data["choices"]] == pytest.approx(scores.extra["probability"].tolist(), rel=1e-8)


def test_the_first_choice_is_the_models() -> None:
    written, _ = answer_data(Analysis(whence.trace(decoder(), PROMPT, max_new_tokens=3)), ["alti"])
    assert written is not None
    assert {c["rank"] for c in written["choices"]} == {1}
    given, _ = answer_data(Analysis(_traced()), ["alti"])
    assert given is not None
    logits = _traced().logits
    assert logits is not None
    start, ids = _traced().prompt_length or 0, _traced().tokens.ids or ()
    for i, choice in enumerate(given["choices"]):
        row = logits[start - 1 + i]
        assert choice["rank"] == sorted(row.tolist(), reverse=True).index(float(row[ids[start + i]])) + 1


def test_a_method_that_would_take_long_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "one_pass", lambda *_: 60.0)
    data, blocks = answer_data(Analysis(_traced()))
    assert data is not None
    assert set(blocks) == {"answer/alti-logit", "answer/alti"}
    assert "attributions=['gradient']" in data["methods"][-1]["reason"]


def test_encoder_decoders_have_source_and_answer_and_a_text_alone_has_none() -> None:
    model = translator()
    data, blocks = answer_data(Analysis(whence.trace(model, "Cats purr. Dogs bark.", target=" she is")), ["alti"])
    assert data is not None
    assert len(data["methods"][0]["inputs"]["text"]) == data["prompt"] + len(data["tokens"]["text"]) + 1
    assert list(blocks) == ["answer/alti"]
    assert answer_data(Analysis(whence.trace(decoder(), PROMPT))) == (None, {})


def test_a_report_of_an_answer_explains_it_and_not_the_token_after_it() -> None:
    report: Any = whence.report(_traced(), budget=0, attributions=["alti"])
    assert report.document.manifest["prediction"] is None
    assert report.document.manifest["answer"]["methods"][0]["name"] == "alti"
