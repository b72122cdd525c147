"""Explanations put to the test on one text: the numbers of `whence.faithfulness`, and a reason where there are none."""

from __future__ import annotations

import pytest

import whence
from tests.faithful.faithful_models import tiny_classifier
from tests.surveys.survey_models import some_texts
from whence.reading.rerun.substitution import Replace
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


def test_each_contribution_of_the_row_read_out_has_its_proved_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shares are those of one layer's ALTI and norms, inside the bounds; another attention with the same outputs too."""
    trace = whence.trace(tiny_classifier(), TEXT)
    card = (removal_data(trace, ["rollout"]) or {})["certain"]
    rows = {int(row[0].split()[0]): row for row in card["rows"]}
    other = whence.doppelganger(trace, rounds=1, sample=1)
    changed = whence.substitute(
        trace, [Replace(layer, w) for layer, w in zip(other.layers, other.values, strict=True)]
    ).trace
    assert other.total_variation > 0.01
    for name, at in (("alti", 1), ("norms", 4)):
        for one in (trace, changed):
            shares = whence.contributions(one, name).values[-1, 0]
            for j, row in rows.items():
                assert row[at + 1] - 1e-4 <= float(shares[j]) <= row[at + 2] + 1e-4
        assert [rows[j][at] for j in range(len(rows))] == pytest.approx(
            whence.contributions(trace, name).values[-1, 0].tolist(), abs=1e-4
        )
    assert {row[7] for row in card["rows"]} == {"no"}
    assert "is not certain" in card["note"]
    monkeypatch.setattr(removal, "FIXED", 1.0)
    assert {row[7] for row in removal.certain_data(trace)["rows"]} == {"yes"}
    monkeypatch.setattr(removal, "MOST_WEIGHTS", 1)
    assert "removal=True" in removal.certain_data(trace)["reason"]


def test_what_takes_long_or_has_no_text_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_classifier()
    trace = whence.trace(model, TEXT)
    assert removal_data(trace, METHODS, asked=False) is None
    monkeypatch.setattr(removal, "SECONDS", 0.0)
    assert "removal=True" in (removal_data(trace, METHODS) or {})["reason"]
    assert "cards" in (removal_data(trace, ["rollout"], asked=True) or {})
    ids = whence.trace(model, dict(trace.inputs))
    assert "removed from a text" in (removal_data(ids, METHODS) or {})["reason"]
