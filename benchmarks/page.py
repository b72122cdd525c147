"""The page: what a report costs, how large it is, and how it moves in a real browser.

    python benchmarks/page.py [--tokens 128 512 2000] [--details standard light full] [--skip-browser]

Reports: wall and processor time of `whence.report` with its defaults, size of the file, and how many rows of the listed
heads are exact. Browser (Chromium, headless, without a GPU): seconds until the page can be used, and the processor time
that the page's main thread spends on one frame, script, style, layout and paint together, while the pointer moves over an
attention map and while the page scrolls. Processor time, so that a busy machine does not count. JavaScript memory after the
head was opened. A text of more tokens than MiniLM reads is stood in for by random maps of its size (12 heads): the page's
speed does not depend on what the numbers are.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from bisect import bisect_right
from pathlib import Path
from typing import Any

import torch
from _real import TEXT

import whence
from whence.reporting.report import Report

LONGEST = 512  # tokens that MiniLM reads
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
HOVER = """async () => {
    const frame = document.querySelector('[data-map=raw]'), box = frame.getBoundingClientRect();
    for (let i = 0; i < 120; i++) {
        const at = {clientX: box.left + 3 + (i * 37) % (box.width - 8), clientY: box.top + 3 + (i * 53) % (box.height - 8)};
        await new Promise(requestAnimationFrame);
        frame.dispatchEvent(new PointerEvent('pointermove', {...at, bubbles: true}));
    }
}"""
SCROLL = """async () => {
    for (let i = 0; i < 120; i++) { scrollBy(0, i < 60 ? 24 : -24); await new Promise(requestAnimationFrame); }
}"""


def prose(model: whence.Model, tokens: int) -> str:
    """So many words that the model makes `tokens` tokens of them, or a few less."""
    words = (TEXT * 3).split()
    last = bisect_right(range(len(words)), tokens, key=lambda k: len(model.tokenizer(" ".join(words[:k]))["input_ids"]))
    return " ".join(words[: last - 1])


def reports(tokens: int, details: list[str], folder: Path) -> Path:
    model = whence.load()
    trace = whence.trace(model, prose(model, tokens))
    saved = folder / "none"
    for detail in details:
        begin, spent = time.monotonic(), time.process_time()
        report = whence.report(trace, detail=detail, progress=False)
        wall, cpu = time.monotonic() - begin, time.process_time() - spent
        path = report.save(folder / f"{tokens}-{detail}.html")
        heads = report.document.manifest["stacks"][0]["exact_heads"]
        done, of = sum(h["rows"] for h in heads), sum(h["of"] for h in heads)
        print(
            f"report  n={len(trace.tokens):4d}  {detail:8s}  wall {wall:5.1f} s  processor {cpu:5.1f} s  "
            f"{path.stat().st_size / 1e6:5.1f} MB  exact rows {done} of {of}"
        )
        if detail == details[0]:
            saved = path
    return saved


def stand_in(tokens: int, folder: Path) -> Path:
    """A page of random maps, as large as a text of so many tokens would make it."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.page.made_up import made_up

    path = Report(made_up(tokens=tokens, layers=2, heads=6)).save(folder / f"{tokens}.html")
    print(f"report  n={tokens:4d}  random maps of 12 heads  {path.stat().st_size / 1e6:5.1f} MB")
    return path


def frames(browser: Any, page: Any, script: str, folder: Path) -> list[float]:
    """Milliseconds of the main thread's processor time, for every task longer than one."""
    record = folder / "trace.json"
    browser.start_tracing(page=page, path=str(record), categories=["toplevel"])
    page.evaluate(script)
    browser.stop_tracing()
    events = json.loads(record.read_text(encoding="utf-8"))["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = [
        e["tdur"] / 1000
        for e in events
        if e.get("ph") == "X"
        and e["name"] == "ThreadControllerImpl::RunTask"
        and threads.get((e["pid"], e["tid"])) == "CrRendererMain"
        and e.get("tdur", 0) > 1000
    ]
    return sorted(found) or [0.0]


def browse(file: Path, tokens: int, folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=os.environ.get("CHROMIUM") or shutil.which("chromium"), args=FLAGS
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        begin = time.monotonic()
        page.goto(file.as_uri())
        page.wait_for_selector(".grid-cell")
        opened = time.monotonic() - begin
        page.evaluate("location.hash = '#view=head'")
        page.wait_for_selector("table.bars tbody tr")
        page.wait_for_selector("[aria-busy]", state="detached")
        page.wait_for_timeout(300)
        for name, script in (("hover", HOVER), ("scroll", SCROLL)):
            spent = frames(browser, page, script, folder)
            middle, most = spent[len(spent) // 2], spent[int(0.9 * len(spent))]
            print(
                f"{name:7s} n={tokens:4d}  a frame: median {middle:4.1f} ms  p90 {most:4.1f} ms  worst {spent[-1]:5.1f} ms"
            )
        session = page.context.new_cdp_session(page)
        session.send("HeapProfiler.collectGarbage")
        used = session.send("Runtime.getHeapUsage")
        memory = used["usedSize"] + used.get("backingStorageSize", 0)
        print(f"open    n={tokens:4d}  {opened:.2f} s  JavaScript memory {memory / 1e6:.0f} MB")
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 2000])
    parser.add_argument("--details", nargs="+", default=["standard", "light"])
    parser.add_argument("--skip-browser", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for tokens in given.tokens:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            file = reports(tokens, given.details, folder) if tokens <= LONGEST else stand_in(tokens, folder)
            if not given.skip_browser:
                browse(file, tokens, folder)


if __name__ == "__main__":
    main()
