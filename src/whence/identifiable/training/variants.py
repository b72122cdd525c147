"""The variants of the identifiable transformer, by the names used in the papers and on the command line."""

from __future__ import annotations

from typing import Any

from whence.errors import InputError

VARIANTS: dict[str, dict[str, Any]] = {
    "concat": {},
    "small-key": {"key_size": 16},
    "add": {"heads": "add"},
    "tied": {"keys": "tied"},
    "shared": {"keys": "shared"},
    "uniform": {"attention": "uniform"},
}
"""Con, the standard one; small keys; added heads (Bhardwaj et al. 2021); tied and shared keys; the uniform control."""


def overrides(variant: str, **given: Any) -> dict[str, Any]:
    """The configuration fields of a variant; what is given and not None takes precedence."""
    if variant not in VARIANTS:
        raise InputError(f"no variant is called {variant!r}; there are: {', '.join(VARIANTS)}.")
    return VARIANTS[variant] | {name: value for name, value in given.items() if value is not None}
