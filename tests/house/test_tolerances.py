"""Every tolerance stands in core/numerics/tolerances.py, with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from .imports import SOURCE, modules

HOME = "whence.core.numerics.tolerances"
SMALL = 2e-3
"""Numbers up to this size that something is compared with, or that a module gives a name, are tolerances."""
NO_TOLERANCES = {
    "whence.reading.wiring.norms": "the eps values that norms are built with",
    "whence.cli.train": "learning rates",
    "whence.identifiable.conversion.rotary": "how much a least-squares fit is damped",
    "whence.results.plotting": "below core: whether a picture needs a second colour for numbers under zero",
}


def small(node: ast.AST) -> Iterator[ast.Constant]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, float) and 0 < abs(inner.value) <= SMALL:
            yield inner


def tolerances(text: str) -> list[tuple[int, float]]:
    """Small numbers in comparisons and in the values of a module's own names."""
    tree = ast.parse(text)
    places: list[ast.AST] = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    places += [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    return sorted({(one.lineno, float(one.value)) for node in places for one in small(node)})


def test_a_tolerance_has_one_home() -> None:
    wrong = [
        f"{name}, line {line}: {number:g}"
        for name, path in modules().items()
        if name != HOME and name not in NO_TOLERANCES
        for line, number in tolerances(path.read_text())
    ]
    assert not wrong, "\n".join(wrong)


def test_every_tolerance_has_its_reason() -> None:
    body = ast.parse((SOURCE / "core/numerics/tolerances.py").read_text()).body
    named = [(node, after) for node, after in zip(body, [*body[1:], None], strict=True) if isinstance(node, ast.Assign)]
    assert len(named) > 20
    bare = [
        ast.unparse(node.targets[0])
        for node, after in named
        if not (
            isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and len(str(after.value.value)) > 30
        )
        and "finfo" not in ast.unparse(node)
    ]
    assert not bare, bare


@pytest.mark.parametrize("text", ["x = y < 1e-6", "NEAR = 1e-9", "NEAR: float = 1e-9", "if a > b + 1e-12: pass"])
def test_a_tolerance_elsewhere_is_noticed(text: str) -> None:
    assert tolerances(text)
    assert not tolerances("def f(): return x.clamp(min=1e-12)")
