"""A repr for people: what the thing is and how large its parts are, never the tensors themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any

LONGEST = 240  # characters of one repr
TEXT = 48  # characters of one text in it


def short_repr(thing: Any) -> str:
    """`Name(field=…, …)` of a dataclass, cut where it gets long. Put into a class as `__repr__ = short_repr`.

    >>> from dataclasses import dataclass
    >>> import torch
    >>> @dataclass
    ... class Pair:
    ...     name: str
    ...     values: torch.Tensor
    ...     __repr__ = short_repr
    >>> Pair("a", torch.zeros(2, 3))
    Pair(name='a', values=2×3)
    """
    name = type(thing).__name__
    parts: list[str] = []
    left = LONGEST - len(name) - 4
    for field in fields(thing):
        value = getattr(thing, field.name)
        if not field.repr or field.name.startswith("_") or value is None:
            continue
        part = f"{field.name}={brief(value)}"
        left -= len(part) + 2
        if left < 0:
            parts.append("…")
            break
        parts.append(part)
    return f"{name}({', '.join(parts)})"


def brief(value: Any) -> str:
    """One value in a few characters: a tensor by its shape, a long list by its length."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return repr(value if len(value) <= TEXT else value[: TEXT - 1] + "…")
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return "×".join(map(str, shape)) if shape else f"{float(value):.4g}"
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}(…)"
    if isinstance(value, Sequence | Mapping | Set):
        plain = isinstance(value, Sequence) and len(value) <= 4 and all(isinstance(v, int | float) for v in value)
        return f"({', '.join(map(brief, value))})" if plain else f"({len(value)} entries)"
    said = repr(value)
    return said if len(said) <= TEXT else f"{type(value).__name__}(…)"
