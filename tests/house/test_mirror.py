"""The tests mirror the tree: a folder of tests is a folder of the package, a test at the root is of a module at the root."""

from __future__ import annotations

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
