"""Prompt and answer on the page: the numbers are Python's, in report, notebook and server; with keyboard, phone, dark."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

import whence
from tests.page.served import served
from tests.writers import decoder, translator

pytest.importorskip("captum", reason="gradients come with the extra 'explain'")

PROMPT = "Cats purr.\n\nDogs bark. They run <b>away</b>!"
ANSWER = " she is well. he is not"


@pytest.fixture(scope="module")
def answered() -> Any:
    return whence.trace(decoder(), PROMPT, continuation=ANSWER)


@pytest.fixture(scope="module")
def address(answered: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    report = whence.report(answered, budget=0)
    assert "<iframe" in report._repr_html_()  # the notebook shows the same page
    return report.save(tmp_path_factory.mktemp("answer") / "answer.html").as_uri()


def go(page: Any, **state: Any) -> None:
    page.evaluate(f"location.hash = {'#view=answer&' + '&'.join(f'{k}={v}' for k, v in state.items())!r}")
    page.wait_for_timeout(150)


def shown(page: Any) -> list[tuple[str, float]]:
    rows = page.eval_on_selector_all(
        "table.scores tbody tr", "trs => trs.map(r => [r.querySelector('th bdi').textContent, r.cells[2].textContent])"
    )
    return [(name, float(score.replace("−", "-"))) for name, score in rows]


@pytest.mark.parametrize("method", ["alti-logit", "alti", "input-x-gradient", "gradient"])
def test_the_scores_are_those_of_python(watched: Any, address: str, answered: Any, method: str) -> None:
    page = watched().open(address + "#view=answer")
    scores = whence.attribute(decoder(), answered, method)
    most = float(scores.values.abs().max())
    for at in (2, ""):
        one = scores.of(at) if isinstance(at, int) else scores.total()
        go(page, explain=method, answer=at)
        for (name, score), i in zip(shown(page), one.values.abs().argsort(descending=True).tolist(), strict=False):
            assert score == pytest.approx(float(one.values[i]), abs=5.1e-3 * most)
            assert one.tokens[i] in name
        for unit in ("sentence", "document"):
            go(page, explain=method, answer=at, unit=unit)
            by = scores.by(unit)
            units = by.of(at) if isinstance(at, int) else by.total()
            assert [name for name, _ in shown(page)] == [" ".join(t.split()) for t in by.inputs]
            assert [s for _, s in shown(page)] == pytest.approx(
                units.values.tolist(), abs=5.1e-3 * float(by.values.abs().max())
            )


def test_tokens_are_picked_with_the_keyboard_and_a_link_opens_the_same(watched: Any, address: str) -> None:
    view = watched()
    page = view.open(address + "#view=answer")
    assert "whole answer: the mean over its" in page.inner_text(".row-say")
    page.locator(".pick .token").first.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(150)
    assert "answer=1" in page.url
    assert "had probability" in page.inner_text(".row-say")
    page.locator(".matrix-frame").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_timeout(150)
    assert page.locator(".pick .token.chosen").count() == 1
    again = watched().open(page.url)
    assert again.inner_text(".row-say") == page.inner_text(".row-say")
    page.get_by_role("button", name="The whole answer", exact=True).click()
    assert "whole answer: the mean over its" in page.inner_text(".row-say")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
@pytest.mark.parametrize("unit", ["token", "sentence"])
def test_it_is_accessible_and_within_its_width(watched: Any, address: str, scheme: str, width: int, unit: str) -> None:
    view = watched(color_scheme=scheme)
    view.page.set_viewport_size({"width": width, "height": 900})
    page = view.open(f"{address}#view=answer&answer=1&unit={unit}")
    page.wait_for_selector("table.scores")
    assert page.inner_text("h1") == "What did the answer come from?"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert view.serious() == []
    assert "<b>away</b>" in page.inner_text("main").replace(" ", "")


def test_the_map_is_exported_with_its_labels(watched: Any, address: str, answered: Any, tmp_path: Path) -> None:
    page = watched().open(address + "#view=answer")
    page.wait_for_selector(".matrix-frame")
    with page.expect_download() as waiting:
        page.get_by_label("Save whence answer map as SVG").click()
    figure = Path(waiting.value.path()).read_text()
    assert "rows are the answer, columns what it comes from" in figure
    assert figure.count("<text") >= len(answered.tokens)
    with page.expect_download() as waiting:
        page.get_by_label("Save whence answer map as CSV").click()
    rows = list(csv.reader(Path(waiting.value.path()).read_text(encoding="utf-8-sig").splitlines()))
    assert len(rows) == 1 + len(answered.tokens) - answered.prompt_length


def test_a_server_explains_what_the_model_writes(watched: Any) -> None:
    pytest.importorskip("uvicorn", reason="the server comes with the extra 'web'")
    from whence.serving.app import create_app

    view = watched()
    with served(create_app([decoder()])) as where:
        page = view.open(where)
        page.fill("#text", PROMPT)
        page.get_by_text("An answer to explain").click()
        page.get_by_label("Or let the model write so many tokens").fill("3")
        page.get_by_role("button", name="Look", exact=True).click()
        page.wait_for_selector(".tab", timeout=60_000)
        page.get_by_role("button", name="Answer", exact=True).click()
        page.wait_for_selector("table.scores")
        assert page.locator(".pick .token").count() == 3
        page.get_by_label("Compute another").select_option("rollout")
        page.wait_for_selector("table.scores[data-method=rollout]", timeout=30_000)
        assert "write=3" in page.url
        assert view.serious() == []


def test_an_encoder_decoder_has_it_too(watched: Any, tmp_path: Path) -> None:
    report = whence.report(whence.trace(translator(), "Cats purr. Dogs bark.", target=" she is"), budget=0)
    page = watched().open(report.save(tmp_path / "t5.html").as_uri() + "#view=answer&explain=alti&answer=1")
    page.wait_for_selector("table.scores")
    assert page.locator(".answer h3").first.inner_text() == "Source"
    assert "ALTI-Logit" in page.inner_text("main")  # not available, and why
