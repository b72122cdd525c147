"""bertviz's views in a browser: the lines are the attention, fainter where a weight is not certain; keyboard, axe-core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import whence
import whence.bertviz as views
from tests.page.conftest import AXE
from tests.serving.tiny import TEXT, tiny_model


def opened(watched: Any, path: Path) -> Any:
    view = watched()
    view.page.goto(path.as_uri())
    view.page.wait_for_selector("#lines svg, #lines canvas")
    return view.page


def test_lines_are_the_weights_and_fade_where_uncertain(watched: Any, tmp_path: Path) -> None:
    trace = whence.trace(tiny_model(), TEXT)
    page = opened(
        watched, views.head_view(trace, layer=1, heads=[0], html_action="return").save(tmp_path / "head.html")
    )
    lines = page.eval_on_selector_all(
        "line",
        "ls => ls.map(l => ['data-weight', 'data-certain', 'stroke-opacity'].map(a => Number(l.getAttribute(a))))",
    )
    weights = trace[1].attention[0].flatten()
    drawn = sorted(float(w) for w in weights if round(float(w) * 255) / 255 >= 0.02)
    assert sorted(line[0] for line in lines) == pytest.approx(drawn, abs=0.003)
    assert all(seen <= weight + 1e-3 and sure <= weight + 1e-3 for weight, sure, seen in lines)
    assert any(seen < weight - 0.01 for weight, _, seen in lines)  # 18 tokens, heads of 8: not all is certain
    page.locator("svg text").first.focus()
    page.keyboard.press("Enter")
    assert 0 < page.locator("line").count() < len(lines)  # the lines of one token
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    assert [v["id"] for v in found if v["impact"] in ("serious", "critical")] == []


def test_the_model_view_leads_to_a_head_and_bare_weights_say_so(watched: Any, tmp_path: Path) -> None:
    trace = whence.trace(tiny_model(), TEXT)
    attention = [layer.attention[None] for layer in trace.of()]
    page = opened(
        watched, views.model_view(attention, list(trace.tokens), html_action="return").save(tmp_path / "model.html")
    )
    assert "certified" in page.inner_text(".note")
    page.get_by_label("layer 1, head 1").click()
    assert page.locator("line").count() > 0
