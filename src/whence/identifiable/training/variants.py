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


DECODER_VARIANTS: dict[str, dict[str, Any]] = {
    "rope": {"keys": "free"},
    "rope-rotary-values": {"keys": "free", "rotate_values": True},
    "rope-tied": {"keys": "shared"},
    "alibi": {"keys": "free", "position_embedding_type": "alibi"},
    "alibi-tied": {"keys": "shared", "position_embedding_type": "alibi"},
    "none-tied": {"keys": "shared", "position_embedding_type": "none"},
    "uniform": {"attention": "uniform", "position_embedding_type": "none"},
}
"""The standard decoder; the control that turns values and keeps free keys; the identifiable one (K = V, turned alike);
ALiBi and none with and without the tie; the uniform control."""


def decoder_overrides(variant: str, **given: Any) -> dict[str, Any]:
    """The configuration fields of a decoder's variant; what is given and not None takes precedence."""
    if variant not in DECODER_VARIANTS:
        raise InputError(
            f"no variant of a language model is called {variant!r}; there are: {', '.join(DECODER_VARIANTS)}."
        )
    return DECODER_VARIANTS[variant] | {name: value for name, value in given.items() if value is not None}
