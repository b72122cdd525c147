"""Explanations put to the test on one text: the numbers of `whence.faithfulness`, and a reason where there are none."""

from __future__ import annotations

import pytest

import whence
from tests.faithful.faithful_models import tiny_classifier
from tests.surveys.survey_models import some_texts
from whence.reporting import removal
from whence.reporting.removal import removal_data

METHODS = ["alti", "rollout", "occlusion"]
TEXT = some_texts(9)[8]


def test_deltas_and_curves_are_those_of_faithfulness() -> None:
    model = tiny_classifier()
    found = removal_data(whence.trace(model, TEXT), METHODS)
    assert found is not None
    result = whence.faithfulness(model, [TEXT], METHODS, random=4, ceiling="none")
    table = result.table().set_index(["method", "operator"])["delta"]
    card, *curves = found["cards"]
    titles = {method.title: method.name for method in whence.methods() if method.name in METHODS}
    assert {row[0] for row in card["rows"]} == set(titles)
    for row in card["rows"]:
        assert row[2:4] == pytest.approx([table[titles[row[0]], operator] for operator in result.operators], abs=1e-8)
        assert row[4].startswith("yes") == (titles[row[0]] == "occlusion")
    frame = result.curves().query("method == 'rollout' and operator == 'drop' and removed == 'least important first'")
    [line] = [one for one in curves[0]["lines"] if titles.get(one["name"]) == "rollout" and one["second"]]
    assert line["values"] == pytest.approx(frame["output"].tolist(), abs=1e-8)
    assert found["sentences"]


def test_what_takes_long_or_has_no_text_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_classifier()
    trace = whence.trace(model, TEXT)
    assert removal_data(trace, METHODS, asked=False) is None
    monkeypatch.setattr(removal, "SECONDS", 0.0)
    assert "removal=True" in (removal_data(trace, METHODS) or {})["reason"]
    assert "cards" in (removal_data(trace, ["rollout"], asked=True) or {})
    ids = whence.trace(model, dict(trace.inputs))
    assert "removed from a text" in (removal_data(ids, METHODS) or {})["reason"]
