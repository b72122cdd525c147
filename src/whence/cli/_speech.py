"""Messages of the library as the command line says them: options with dashes, not Python's keyword arguments."""

from __future__ import annotations

import re
from collections.abc import Collection

BOTH = re.compile(r"\b\w+=(?:'[^']*'|\"[^\"]*\"|[\w.]*) \((--[a-z][\w-]*(?: [\w-]+)?)\)")
KEYWORD = re.compile(r"(?<![\w.'\"(])([a-z][a-z_]*)=('[^']*'|\"[^\"]*\"|[\w.+…-]*\w|)(?=[\s,.:;)]|$)")
RENAMED = {"text_pair": "pair", "attentions": "attention"}


def in_options(message: str, options: Collection[str]) -> str:
    """The message with its keyword arguments written as those `options` (names with dashes) that the command has.

    >>> in_options("pass truncate=True (--truncate) to use its first part.", ["--truncate"])
    'pass --truncate to use its first part.'
    >>> in_options("foil='good' is the target itself (1): nothing to explain.", ["--foil"])
    '--foil good is the target itself (1): nothing to explain.'
    """

    def spoken(match: re.Match[str]) -> str:
        name, value = match[1], match[2].strip("'\"")
        option = "--" + RENAMED.get(name, name).replace("_", "-")
        if option not in options:
            return match[0]
        return option if value in ("", "True", "False") else f"{option} {value}"

    return KEYWORD.sub(spoken, BOTH.sub(r"\1", message))
