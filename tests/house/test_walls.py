"""The walls of the house: who may import whom, what may stand at the root, which names are taken."""

from __future__ import annotations

import ast
import importlib
import inspect
import re

import whence

from .imports import LEVELS, imports, modules, room

LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
ROOT = {"__init__", "__main__", "errors", "method_table", "rules", "bertviz"}

# Upward imports that stay, each with its reason.
ALLOWED = {
    ("whence.model.load", "whence.identifiable"): "loading must know the project's own architectures",
}


def test_imports_point_inward() -> None:
    wrong = []
    for module, imported in imports():
        here, there = room(module), room(imported)
        if "whence" in (here, there) or here == "__main__" or here == there or (module, imported) in ALLOWED:
            continue
        if here not in LEVEL or there not in LEVEL:
            wrong.append(f"{module} → {imported}: a room without a level")
        elif LEVEL[there] >= LEVEL[here]:
            wrong.append(f"{module} → {imported}")
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_the_core_knows_no_model_library() -> None:
    for name, path in modules().items():
        if room(name) == "core":
            text = path.read_text()
            assert not re.search(r"^\s*(import|from) transformers", text, re.MULTILINE), name


def test_nothing_else_stands_at_the_root() -> None:
    at_root = {
        name.split(".")[1] for name, path in modules().items() if name.count(".") == 1 and path.stem != "__init__"
    }
    assert at_root <= ROOT, sorted(at_root - ROOT)


def test_no_module_hides_a_public_name() -> None:
    """`import whence.report` would put the module where `whence.report`, the function, is expected."""
    functions = {n for n in whence.__all__ if callable(getattr(whence, n)) or inspect.isclass(getattr(whence, n))}
    children = {name.split(".")[1] for name in modules() if name.count(".") >= 1}
    assert not functions & children, sorted(functions & children)


def test_a_class_name_is_used_once() -> None:
    places: dict[str, list[str]] = {}
    for name in modules():
        if name.endswith("__main__"):
            continue
        module = importlib.import_module(name)
        for key, thing in vars(module).items():
            if inspect.isclass(thing) and thing.__module__ == name and not key.startswith("_"):
                places.setdefault(key, []).append(name)
    twice = {key: where for key, where in places.items() if len(where) > 1}
    assert not twice, twice


def test_a_type_is_declared_once() -> None:
    """`Progress`, `Step` and their like: an alias at the top of a module has a name that no other module gives."""
    places: dict[str, list[str]] = {}
    for name, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            value = getattr(node, "value", None)
            alias = value is not None and re.match(r"(bool \| )?Callable\[|Literal\[", ast.unparse(value))
            if alias and isinstance(target, ast.Name) and not target.id.startswith("_"):
                places.setdefault(target.id, []).append(name)
    twice = {key: where for key, where in places.items() if len(where) > 1}
    assert not twice, twice


def test_an_equation_has_one_owner() -> None:
    """A new kind of residual touches one file: nothing else of the package names the wiring's own factors."""
    for field in ("residual_scale", "branch_scale"):
        naming = [name for name, path in modules().items() if re.search(rf"\b{field}\b", path.read_text())]
        assert naming == ["whence.reading.wiring.equation"], (field, naming)
