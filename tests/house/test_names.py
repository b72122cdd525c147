"""Names are nouns: participles that say nothing of what a thing is are refused where others read them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from .imports import modules

NO_NAMES = {"found", "made", "seen", "chosen"}
NOR_THESE = {"plain", "kept", "wide", "some", "place", "cut", "turned", "look"}
OLD_NAMES = {
    "Tap", "Tape", "Site", "Found", "Unread", "Loose", "cut_loose", "twins", "leader", "settled", "fibre", "search_fibre", "wide",
}  # fmt: skip
"""Names that the project's vocabulary replaced, for anything at all."""
COMMANDS = {"whence.cli.look"}  # a command's own file keeps the command's name


def named(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names at the top of a module, parameters, and functions and classes wherever they are."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from ((t.id, t.lineno) for target in targets for t in ast.walk(target or ast.Pass()) if _stored(t))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def results(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names that are returned, and the fields of classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name):
            yield node.value.id, node.lineno
        elif isinstance(node, ast.ClassDef):
            fields = (part.target for part in node.body if isinstance(part, ast.AnnAssign))
            yield from ((field.id, field.lineno) for field in fields if isinstance(field, ast.Name))


def values(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name that is given to anything: variables, parameters, functions, classes."""
    yield from ((node.id, node.lineno) for node in ast.walk(tree) if _stored(node))
    yield from named(tree)


def _stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def problems(name: str, text: str) -> list[str]:
    tree = ast.parse(text)
    wrong = [one for one in named(tree) if one[0].strip("_").lower() in NO_NAMES | NOR_THESE]
    wrong += [one for one in results(tree) if one[0].strip("_").lower() in NO_NAMES]
    wrong += [one for one in values(tree) if one[0].strip("_") in OLD_NAMES]
    if name.rpartition(".")[2].strip("_") in NO_NAMES | NOR_THESE and name not in COMMANDS:
        wrong.append((name, 0))
    return [f"{name}, line {line}: {word}" for word, line in wrong]


def test_names_say_what_a_thing_is() -> None:
    wrong = [problem for name, path in modules().items() for problem in problems(name, path.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "found = 3",
        "_CHOSEN: int = 3",
        "def f(seen): ...",
        "def f():\n    made = 3\n    return made",
        "class A:\n    found: bool",
        "def turned(x): ...",
        "a = lambda place: place",
        "def f(x):\n    wide = x\n    return 3 * wide",
        "class Tape: ...",
    ],
)
def test_a_bad_name_is_noticed(text: str) -> None:
    assert problems("whence.core.x", text)
    assert problems("whence.core.found", "")
