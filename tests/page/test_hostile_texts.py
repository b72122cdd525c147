"""Whatever the text says, it is shown as text, and nothing in it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import whence
from tests.page.made_up import made_up

TEXTS = {
    "html": "<img src=x onerror=alert(1)> <b>bold</b> </p><script>window.hacked = 1</script> <!-- <script> -->",
    "script end": "</script><script>window.hacked = 1</script> ]]> </style> &lt;",
    "template": "${window.hacked=1} {{constructor.constructor('window.hacked=1')()}} javascript:alert(1)",
    "formula": "=cmd|' /C calc'!A0 +1 @x",
    "controls": "a\u202eb\u2066c\u0000d\u001b[31m\u200b\ufeff e\u2028f",
    "rtl": "هذا نص عربي قصير عن الطبيب والممرضة في القرية",
}


@pytest.mark.parametrize("name", TEXTS)
def test_shown_and_never_run(watched: Any, minilm: Any, tmp_path: Path, name: str) -> None:
    text = TEXTS[name]
    report = whence.report(whence.trace(minilm, text), budget=0.0)
    page = watched().open(report.save(tmp_path / "report.html").as_uri())
    for view in ("head", "provenance", "identity", "overview"):
        page.evaluate(f"location.hash = '#view={view}'")
        page.wait_for_timeout(150)
    assert page.evaluate("window.hacked") is None
    assert page.locator("#whence img, #whence script, #whence b b").count() == 0
    page.evaluate("location.hash = '#view=head'")
    page.wait_for_selector(".tokens.pick")
    shown = page.locator(".tokens.pick").inner_text()
    assert not any(c in shown for c in "\u202e\u2066\u0000\u001b\u2028")
    if name == "html":
        assert "onerror" in shown.replace(" ", "")
    if name == "rtl":
        assert page.locator(".tokens.pick").get_attribute("dir") == "rtl"


def test_ten_thousand_emoji(watched: Any, tmp_path: Path) -> None:
    """Longer than any model reads, so straight to the page: a document of 10,000 tokens with one small head."""
    from whence.reporting.html import standalone

    document = made_up(tokens=40, layers=1, heads=1)
    text = "😀" * 10_000
    document.manifest["text"] = text  # type: ignore[index]
    document.manifest["stacks"][0]["tokens"]["text"][3] = text
    file = tmp_path / "emoji.html"
    file.write_text(standalone(document), encoding="utf-8")
    page = watched().open(file.as_uri() + "#view=head")
    page.wait_for_selector(".tokens.pick")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    assert "😀😀😀" in page.locator(".tokens.pick").inner_text()
