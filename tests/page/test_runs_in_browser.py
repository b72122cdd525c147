"""Surveys and comparisons of explanations have the same page: their numbers are the Python ones, in every host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import whence
from tests.faithful.faithful_models import tiny_classifier
from tests.page.served import served
from tests.surveys.survey_models import save_tiny, some_texts
from whence.errors import InputError
from whence.surveys.figures import available

HOSTILE = "good <img src=x onerror=alert(1)> bad"


@pytest.fixture(scope="module")
def compared() -> Any:
    texts = [*some_texts(8)[2:], HOSTILE]
    return whence.faithfulness(tiny_classifier(), texts, "alti,rollout,occlusion", random=4, ceiling="none")


@pytest.fixture(scope="module")
def surveyed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("survey")
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(some_texts(12)) + "\n")
    return whence.survey(str(save_tiny(folder / "tiny")), corpus, folder / "out")


def rows_of(page: Any, card: str) -> list[list[str]]:
    rows: list[list[str]] = page.eval_on_selector_all(
        f'.card[data-name="{card}"] tbody tr', "els => els.map(e => [...e.children].map(c => c.textContent))"
    )
    return rows


def test_methods_and_curves_are_those_of_python(watched: Any, compared: Any, tmp_path: Path) -> None:
    report = whence.report(compared)
    view = watched()
    page = view.open(report.save(tmp_path / "run.html").as_uri())
    assert page.inner_text("h1") == "Which explanation is faithful?"
    shown = page.inner_text(".findings")
    assert all(sentence in shown for sentence in compared.verdict())
    table = compared.table()
    rows = rows_of(page, "methods")
    assert [row[0] for row in rows] == table["method"].tolist()
    assert [row[3] for row in rows] == [f"{delta:.3f}".replace("-", "−") for delta in table["delta"]]
    curve = compared.curves().query("method == 'alti' and operator == 'drop' and removed == 'most important first'")
    found = page.eval_on_selector_all(
        '.card[data-name="curves-drop"] table', "([t]) => [...t.rows].map(r => [...r.cells].map(c => c.textContent))"
    )
    column = found[0].index("alti")
    assert [row[column] for row in found[1:]] == [f"{v:.3f}".replace("-", "−") for v in curve["output"]]
    assert HOSTILE in page.inner_text('.card[data-name="worst"]')
    assert not view.errors
    assert all(url.startswith("file:") for url in view.requests)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_a_survey_is_accessible_and_within_its_width(
    watched: Any, surveyed: Any, tmp_path: Path, scheme: str, width: int
) -> None:
    view = watched(color_scheme=scheme)
    view.page.set_viewport_size({"width": width, "height": 900})
    page = view.open(whence.report(surveyed).save(tmp_path / "survey.html").as_uri())
    assert page.inner_text("h1") == "What holds on this corpus?"
    assert page.locator(".chart").count() == len(available(surveyed))
    verdicts = [row[2] for row in rows_of(page, "heads")]
    assert verdicts == surveyed.verdict()["verdict"].tolist()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert view.serious() == []
    assert not view.errors


def test_layers_are_counted_alike_on_the_page_of_a_survey(watched: Any, surveyed: Any, tmp_path: Path) -> None:
    page = watched().open(whence.report(surveyed).save(tmp_path / "survey.html").as_uri())
    for name in ("certain-by-layer", "own-share", "tokens", "distance"):
        first = page.eval_on_selector_all(f'.card[data-name="{name}"] tbody th', "els => els[0].textContent")
        assert first == "0"


def test_a_run_stands_beside_the_views_of_a_text(watched: Any, compared: Any, surveyed: Any, tmp_path: Path) -> None:
    model = tiny_classifier()
    report = whence.report(whence.trace(model, some_texts(3)[2]), runs=[compared, surveyed], budget=0)
    page = watched().open(report.save(tmp_path / "both.html").as_uri())
    tabs = page.eval_on_selector_all(".tab", "els => els.map(e => e.textContent)")
    assert tabs[0] == "Overview"
    assert tabs[-2:] == ["Faithfulness", "Survey"]
    page.keyboard.press(str(len(tabs)))
    assert page.inner_text("h1") == "What holds on this corpus?"
    assert "<iframe" in whence.report(surveyed)._repr_html_()


def test_the_prediction_shows_methods_side_by_side(watched: Any, tmp_path: Path) -> None:
    pytest.importorskip("captum", reason="gradients come with the extra 'explain'")
    report = whence.report(whence.trace(tiny_classifier(), some_texts(9)[8]), budget=0, removal=True)
    view = watched()
    page = view.open(report.save(tmp_path / "one.html").as_uri() + "#view=prediction")
    card, *_ = report.document.manifest["prediction"]["removal"]["cards"]
    shown = [[row[0], row[2], row[3], row[4]] for row in rows_of(page, "removal")]
    assert shown == [
        [r[0], *(f"{v:.3f}".replace("-", "−").replace("−0.000", "0.000") for v in r[2:4]), r[4]] for r in card["rows"]
    ]
    assert page.locator('.card[data-name^="curves-"] .chart').count() == 2
    certain = report.document.manifest["prediction"]["removal"]["certain"]
    assert [row[0] for row in rows_of(page, "certain")] == [row[0] for row in certain["rows"]]
    assert view.serious() == []
    assert not view.errors


def test_a_server_shows_runs_before_and_beside_a_text(watched: Any, compared: Any, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="the server comes with the extra 'web'")
    from tests.serving.tiny import TEXT, tiny_model
    from whence.reporting.runs import read_run
    from whence.serving.app import create_app

    kept = read_run(compared.save(tmp_path / "run.jsonl"))
    view = watched()
    with served(create_app([tiny_model()], runs=[kept])) as address:
        page = view.open(address)
        assert page.inner_text("h1") == "Which explanation is faithful?"
        assert [row[0] for row in rows_of(page, "methods")] == compared.table()["method"].tolist()
        page.fill("#text", TEXT)
        page.keyboard.press("Control+Enter")
        page.wait_for_selector(".overview", timeout=30_000)
        tabs = page.eval_on_selector_all(".tab", "els => els.map(e => e.textContent)")
        assert (tabs[0], tabs[-1]) == ("Overview", "Faithfulness")
    with pytest.raises(InputError, match="no such path"):
        read_run(tmp_path / "nothing")
