"""The tests mirror the tree: a folder of tests is a folder of the package, a test at the root is of a module at the root."""

from __future__ import annotations

import ast
from pathlib import Path

from .imports import SOURCE

TESTS = Path(__file__).resolve().parents[1]

# Folders that test something else than one room of the package.
ELSEWHERE = {"house", "docs", "notebooks", "conformance", "torture", "page"}


def test_every_folder_of_tests_is_a_folder_of_the_package() -> None:
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    strange = [f for f in folders if f.parts and f.parts[0] not in ELSEWHERE and not (SOURCE / f).is_dir()]
    assert not strange, strange


def test_every_room_has_tests() -> None:
    rooms = {path.parent.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if path.stem != "__init__"}
    bare = [str(room) for room in rooms if room.parts and not list((TESTS / room).glob("test_*.py"))]
    assert not bare, f"no test in tests/{', tests/'.join(sorted(bare))}"


def test_a_test_at_the_root_is_of_a_module_at_the_root() -> None:
    modules = {path.stem for path in SOURCE.glob("*.py")}
    strange = [path.name for path in TESTS.glob("test_*.py") if path.stem.removeprefix("test_") not in modules]
    assert not strange, strange


def imported_from_the_package(text: str) -> list[str]:
    """The modules of whence that a file imports, at its top or later."""
    nodes = list(ast.walk(ast.parse(text)))
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return [name for name in names if name.split(".")[0] == "whence"]


def test_an_oracle_imports_nothing_of_what_it_judges() -> None:
    oracles = list(TESTS.rglob("*_oracle.py"))
    assert len(oracles) >= 4
    wrong = {path.name: names for path in oracles if (names := imported_from_the_package(path.read_text()))}
    assert not wrong, wrong
    assert imported_from_the_package("def f():\n    from whence.core import numerics")
