"""Shapes in `core`: every tensor that a public function takes or a public class holds says its shape.

The convention stands in `whence.core`: names that have one shape everywhere (attention, values, keys, outputs, visible,
row) need not repeat it; any other tensor is followed by its shape in the docstring, as in "row (n_key,)" or "gram: (u, k, k)".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

import whence.core

from .imports import SOURCE

TENSOR = re.compile(r"\b(Tensor|Array|Booleans|Integers|AnyArray)\b")
EVERYWHERE = {"attention", "values", "keys", "outputs", "visible", "row", "attention_row"}
CHECKS = {"shape", "check_finite"}  # of tensors of any shape
SHAPE = r"[^()\n]{0,70}(\n\s*[^()\n]{0,70})?[(][^()]*[)]"


def bare(text: str) -> Iterator[str]:
    """Tensors of public functions and classes without a shape."""
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_") or node.name in CHECKS:
            continue
        if isinstance(node, ast.FunctionDef):
            given = [(a.arg, a.annotation) for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        else:
            fields = [
                part for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
            ]
            given = [(ast.unparse(part.target), part.annotation) for part in fields]
        said = ast.get_docstring(node) or ""
        for name, annotation in given:
            tensor = annotation is not None and TENSOR.search(ast.unparse(annotation))
            if tensor and name not in EVERYWHERE and not re.search(rf"\b{name}\b{SHAPE}", said):
                yield f"{node.name}: {name}"


def test_every_tensor_of_core_says_its_shape() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)}, {one}"
        for path in (SOURCE / "core").rglob("*.py")
        for one in bare(path.read_text())
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_the_convention_is_written_down() -> None:
    said = whence.core.__doc__ or ""
    assert all(re.search(rf"\b{name}\b[^()]*\(", said) for name in EVERYWHERE - {"visible"})
    assert "visible boolean and\nbroadcastable to attention" in said


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('def f(x: Tensor) -> Tensor:\n    """Twice x."""', True),
        ('def f(x: Tensor) -> Tensor:\n    """Twice x (n, d)."""', False),
        ('def f(attention: Tensor) -> Tensor:\n    """Its rows."""', False),
        ('class A:\n    """A thing."""\n    y: Tensor', True),
        ('class A:\n    """y (n,): a thing."""\n    y: Tensor', False),
    ],
)
def test_a_tensor_without_a_shape_is_noticed(text: str, wrong: bool) -> None:
    assert bool(list(bare(text))) is wrong
