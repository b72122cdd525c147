"""The page in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
AXE = Path(__file__).parent / "vendor" / "axe.min.js"
TEXT = (
    "The old doctor told the nurse that she would not leave the ward before the storm was over, because the roads to the "
    "village had been closed since noon and nobody knew when they would open again."
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium; without one, or without Playwright, these tests are skipped."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the tests of the page need: pip install playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("there is no Chromium on this machine: scripts/system-packages browser installs one")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found, args=FLAGS)
        yield chromium
        chromium.close()


class Watched:
    """A page whose errors and requests are kept."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True, **options)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.page.on("request", lambda r: self.requests.append(r.url))
        self.page.on("dialog", lambda d: (self.errors.append(f"dialog: {d.message}"), d.dismiss()))

    def open(self, address: str) -> Any:
        self.page.goto("about:blank")
        self.page.goto(address)
        self.page.wait_for_selector("#whence[data-ready]", timeout=60_000)
        return self.page

    def serious(self) -> list[str]:
        """Serious and critical findings of axe-core."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE.read_text(encoding="utf-8"))  # not a script element: the page's policy refuses those
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{v['id']}: {n['html'][:160]} {n['failureSummary'][:200]}"
            for v in found["violations"]
            if v["impact"] in ("serious", "critical")
            for n in v["nodes"][:3]
        ]


@pytest.fixture
def watched(browser: Any) -> Iterator[Any]:
    """Opens pages; at the end of the test there must have been no error on them and no request off the machine."""
    made: list[Watched] = []

    def make(**options: Any) -> Watched:
        made.append(Watched(browser, **options))
        return made[-1]

    yield make
    for one in made:
        errors, requests = one.errors, one.requests
        one.context.close()
        assert errors == []
        outside = [
            r
            for r in requests
            if not r.startswith(("file:", "data:", "blob:", "about:", "http://localhost:", "http://127.0.0.1:"))
        ]
        assert outside == []


@pytest.fixture(scope="session")
def minilm(minilm_path: Path) -> Any:
    import whence

    return whence.load()


@pytest.fixture(scope="session")
def traced(minilm: Any) -> Any:
    import torch

    import whence

    torch.set_num_threads(1)
    return whence.trace(minilm, TEXT)


@pytest.fixture(scope="session")
def saved(traced: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """A report and the address of its file."""
    import whence

    report = whence.report(traced)
    return report, report.save(tmp_path_factory.mktemp("report") / "report.html").as_uri()
