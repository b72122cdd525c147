"""The imports of src/whence, read from the source: eager, lazy and for type checkers alike."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "whence"

# From the inside out. A room may import rooms of lower levels only; rooms of one level do not know each other.
LEVELS = (
    ("errors",),
    ("results",),
    ("method_table", "core"),
    ("rules", "model"),
    ("reading",),
    ("attention", "tokens", "identifiable"),
    ("mixing",),
    ("faithful", "surveys"),
    ("reporting",),
    ("serving", "bertviz"),
    ("cli",),
)


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports() -> Iterator[tuple[str, str]]:
    """(module, module it imports), for imports within the package."""
    known = modules()
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "whence":
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    yield name, full if full in known else node.module
            elif isinstance(node, ast.Import):
                yield from ((name, alias.name) for alias in node.names if alias.name.split(".")[0] == "whence")


def room(module: str) -> str:
    """The folder at the root that a module is in, or its own name."""
    return module.split(".")[1] if "." in module else module
