"""The pictures of the page in docs/, taken in a headless browser: `python docs/make_page_pictures.py` (extra `dev`)."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from make_attention_figures import SENTENCE
from playwright.sync_api import sync_playwright

import whence

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
]
VIEWS = (
    "overview",
    "head&layer=1&head=5&query=30",
    "provenance&hidden=30",
    "identity",
)  # token 30 is the tutorial's ‘noon’
PICTURES = [(view, scheme) for view in VIEWS for scheme in ("light", "dark")]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "pictures")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    report = whence.report(whence.trace(whence.load(), SENTENCE))
    browser = shutil.which("chromium")
    if browser is None:
        sys.exit("There is no Chromium here: scripts/system-packages browser installs one.")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        address = report.save(Path(folder) / "report.html").as_uri()
        chromium = driver.chromium.launch(executable_path=browser, args=FLAGS)
        for view, scheme in PICTURES:
            page = chromium.new_page(viewport={"width": 1280, "height": 1000}, color_scheme=scheme)
            page.add_init_script(
                "localStorage.setItem('whence-guide', 'seen')"
            )  # the first look is not part of the picture
            page.goto(f"{address}#view={view}")
            page.wait_for_selector("#whence[data-ready]")
            page.wait_for_timeout(800)
            path = options.folder / f"{view.partition('&')[0]}-{scheme}.png"
            page.screenshot(path=path)
            page.close()
            print(path)
        chromium.close()


if __name__ == "__main__":
    main(sys.argv[1:])
