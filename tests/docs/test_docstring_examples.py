"""Every example of every docstring of src/whence runs and prints what it shows; slow ones are marked, none is left out."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from tests.house.imports import modules

OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
MODELS = ("whence.load(", "load(")  # what reads a model takes seconds


def examples() -> list[doctest.DocTest]:
    """All of them, module by module, in the order of their lines."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = []
    for name in modules():
        if not name.endswith("__main__"):
            found += [test for test in finder.find(importlib.import_module(name), name) if test.examples]
    return found


def _marked(test: doctest.DocTest) -> object:
    slow = any(word in example.source for example in test.examples for word in MODELS)
    return pytest.param(test, id=test.name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("test", [_marked(test) for test in examples()])
def test_example(
    test: doctest.DocTest, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if any(word in example.source for example in test.examples for word in MODELS):
        request.getfixturevalue("minilm_path")
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False)
    runner.run(test, out=said.append, clear_globs=False)
    assert runner.failures == 0, "".join(said)


def test_every_docstring_with_an_example_is_collected() -> None:
    """As many prompts are run as are written in the source."""
    written = sum(
        line.lstrip().startswith(">>> ") for path in modules().values() for line in path.read_text().splitlines()
    )
    assert sum(len(test.examples) for test in examples()) == written
