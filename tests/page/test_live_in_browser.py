"""The served page in a browser: a text, its views, measures on demand, a link that opens the same again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the server comes with the extra 'web'")

from tests.page.served import served
from tests.serving.tiny import TEXT, tiny_model


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    from whence.serving import work
    from whence.serving.app import create_app

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(work, "BUDGET", 0.0)  # only the listed rows beforehand, so that others can be asked for
    with served(create_app([tiny_model(), tiny_model("other")])) as where:
        yield where
    monkeypatch.undo()


def test_text_box_views_and_measures(watched: Any, address: str) -> None:
    one = watched()
    page = one.open(address)
    assert page.locator("#model option").all_inner_texts() == ["tiny", "other"]
    assert one.serious() == []
    page.fill("#text", TEXT)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".findings", timeout=30_000)
    assert "text=the" in page.url
    page.get_by_role("button", name="Head", exact=True).click()
    page.wait_for_selector("table.bars")
    prove = page.get_by_role("button", name="Prove the exact intervals")
    for query in range(2, 8):  # the first row that was not certified beforehand
        page.evaluate(f"location.hash = '#view=head&layer=1&head=1&query={query}'")
        page.wait_for_timeout(150)
        if prove.count():
            break
    prove.click()
    page.wait_for_selector(".bar-picture.exact", timeout=30_000)
    page.get_by_role("button", name="Find another row").click()
    page.wait_for_selector(".slide input[type=range]", timeout=30_000)
    page.locator(".slide input[type=range]").focus()
    page.keyboard.press("End")
    assert page.inner_text(".slide-output .badge") == "not moving"
    assert one.serious() == []
    page.get_by_role("button", name="Provenance", exact=True).click()
    page.get_by_label("Compute another").select_option("globenc")
    page.wait_for_selector("table[data-method=globenc]", timeout=30_000)
    page.get_by_role("button", name="Prediction", exact=True).click()
    page.wait_for_selector(".attribution")
    before = page.locator(".attribution").count()
    page.get_by_label("Compute another").select_option("effective-rollout")
    page.wait_for_selector(
        f".attribution:nth-of-type({before + 2})", timeout=30_000
    )  # after the controls and the others


def test_link_asks_for_the_same_text(watched: Any, address: str) -> None:
    page = watched().open(address + "#view=identity&model=other&text=the+old+doctor+told+the+nurse")
    page.wait_for_selector(".view.identity", timeout=30_000)
    assert page.input_value("#text") == "the old doctor told the nurse"
    assert page.input_value("#model") == "other"


def test_a_refusal_is_shown(watched: Any, address: str) -> None:
    one = watched()
    page = one.open(address)
    page.fill("#text", "the " * 300)
    page.get_by_role("button", name="Look", exact=True).click()
    page.wait_for_selector(".problem", timeout=30_000)
    assert "tokens" in page.inner_text(".problem")
