"""A person's rationale for a text, as marks on its units."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from whence.errors import InputError
from whence.faithful.question import Units


def marks_of(rationale: Any, text: str, units: Units, number: int) -> tuple[int, ...]:
    """1 for every unit that a marked stretch of the text touches.

    `rationale`: character spans [(start, end), …]; or 0/1 marks, one for each white-space separated word of the text, or
    one for each unit.
    """
    given = list(rationale)
    words = [match.span() for match in re.finditer(r"\S+", text)]
    if given and all(isinstance(one, Sequence) and not isinstance(one, str) for one in given):
        spans = [_checked(one, text, number) for one in given]
    elif not all(one in (0, 1) for one in given):
        raise InputError(f"the rationale of text {number} holds {given[:6]!r}…: give 0/1 marks or (start, end) spans.")
    elif len(given) == len(words):
        spans = [span for span, mark in zip(words, given, strict=True) if mark]
    elif len(given) == len(units):
        return tuple(int(mark) for mark in given)
    else:
        raise InputError(
            f"the rationale of text {number} has {len(given)} marks; {text[:50]!r} has {len(words)} words between spaces "
            f"and {len(units)} units: give one mark for each, or character spans."
        )
    if any(span is None for span in units.spans):
        raise InputError(
            f"text {number}: this tokenizer does not say where its tokens stand; give a mark for each unit."
        )
    return tuple(int(any(a < end and start < b for a, b in spans)) for start, end in units.spans)  # type: ignore[misc]


def _checked(span: Any, text: str, number: int) -> tuple[int, int]:
    if len(span) != 2 or not all(isinstance(end, int) for end in span) or not 0 <= span[0] < span[1] <= len(text):
        raise InputError(
            f"the rationale of text {number} marks characters {list(span)!r}, and the text has {len(text)}: a span is "
            "(start, end) with 0 ≤ start < end ≤ length."
        )
    return span[0], span[1]
