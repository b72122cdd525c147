"""Every public name is in the reference, and everything there exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import whence

DOCS = Path(__file__).resolve().parents[2] / "docs"
LISTED = set(
    re.findall(r"^::: (\S+)$", "\n".join(p.read_text() for p in (DOCS / "reference").glob("*.md")), re.MULTILINE)
)


def path_of(name: str) -> str:
    thing = getattr(whence, name)
    return f"{thing.__module__}.{thing.__qualname__}" if hasattr(thing, "__qualname__") else str(thing.__name__)


def test_every_public_name_is_in_the_reference() -> None:
    missing = [name for name in whence.__all__ if name != "__version__" and path_of(name) not in LISTED]
    assert missing == []


def test_what_the_reference_lists_exists_and_is_described() -> None:
    for path in LISTED:
        module, _, name = path.rpartition(".")
        thing = (
            importlib.import_module(path)
            if name in ("errors", "rules", "plots", "quantise")
            else getattr(importlib.import_module(module), name)
        )
        assert (thing.__doc__ or "").strip(), path


def test_every_page_is_in_the_navigation() -> None:
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    listed = set(re.findall(r"(\S+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(), re.MULTILINE))
    assert pages == listed
