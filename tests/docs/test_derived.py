"""What the documentation derives from the code is current: methods, papers, citations, the picture, the paths of the map."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from whence.cli import main
from whence.method_table import QUESTIONS, methods

ROOT = Path(__file__).resolve().parents[2]


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


METHOD_DOCS = script("scripts/method_docs.py")


@pytest.mark.parametrize("page", METHOD_DOCS.PAGES)
def test_a_page_says_what_the_table_says(page: str) -> None:
    before, after = METHOD_DOCS.made(page)
    assert before == after, f"{page} differs from the method table: run python scripts/method_docs.py"


def test_a_change_of_the_table_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = [m for m in METHOD_DOCS.own() if m.name != "alti"]
    monkeypatch.setattr(METHOD_DOCS, "own", lambda: fewer)
    for page in METHOD_DOCS.PAGES:
        before, after = METHOD_DOCS.made(page)
        assert (before != after) == (page != "CITATION.cff"), page  # its references are papers, not methods


def test_every_paper_of_the_table_is_known_and_none_is_idle() -> None:
    cited = {name for m in methods() if m.location.startswith("whence.") for name in m.papers}
    assert cited == set(METHOD_DOCS.PAPERS)


CITED = re.compile(r"\bmethods (\d+(?:\.\d+)?)")


def test_the_sections_that_the_code_cites_are_there() -> None:
    sections = set(re.findall(r"^#+ (\d+(?:\.\d+)?)\.? ", (ROOT / "docs" / "methods.md").read_text(), re.MULTILINE))
    assert {"1", "1.1", "9"} <= sections
    cited = {
        number: path
        for path in (ROOT / "src" / "whence").rglob("*.py")
        for number in CITED.findall(path.read_text())
        if not path.name.startswith("_")
    }
    assert len(cited) > 5
    assert set(cited) <= sections, {number: cited[number] for number in set(cited) - sections}
    assert CITED.findall("as in methods 7.9.") == ["7.9"]


def test_every_question_has_a_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert {m.question for m in methods()} == set(QUESTIONS)
    assert main(["methods"]) == 0
    out = capsys.readouterr().out
    assert all(m.name in out for m in methods())


def test_the_picture_shows_the_imports_as_they_are() -> None:
    text = (ROOT / "docs" / "figures" / "architecture.svg").read_text()
    shown = re.search(r"<dc:description>(.*?)</dc:description>", text, re.DOTALL)
    assert shown is not None
    arrows = script("docs/make_architecture_picture.py").arrows()
    assert shown[1].replace("&#8594;", "→").split("; ") == arrows, "run python docs/make_architecture_picture.py"


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_paths_that_people_are_sent_to_are_there(page: str) -> None:
    paths = re.findall(r"`((?:[\w.-]+/)*[\w.-]+(?:\.py|\.js|\.md|\.lock|\.toml|/))`", (ROOT / page).read_text())
    assert len(paths) > 3
    within = (
        ROOT,
        ROOT / "src" / "whence",
        *(ROOT / "src" / "whence" / room for room in ("reading", "reading/wiring", "core/attention")),
    )
    missing = [path for path in paths if not any((folder / path).exists() for folder in within)]
    assert not missing, missing
