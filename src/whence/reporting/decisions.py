"""The decisions part of the page's data: what was decided from attention, and whether the computation fixes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from whence.attention.decide import Decisions
from whence.errors import InputError
from whence.reporting.attention import plain


def decisions_data(found: Iterable[Decisions]) -> list[dict[str, Any]]:
    """Each rule with its heads, its counts and a line for every query."""
    return [_rule(one) for one in found]


def _rule(found: Decisions) -> dict[str, Any]:
    if not isinstance(found, Decisions):
        raise InputError(f"decisions takes what whence.decide gives for a rule, not a {type(found).__name__}.")
    numbers = zip(*(getattr(found, name).tolist() for name in ("value", "lower", "upper", "margin")), strict=True)
    return {
        "rule": found.rule,
        "stack": found.attention,
        "heads": [list(pair) for pair in found.heads],
        "combine": found.combine,
        "summary": found.summary(),
        "checked": found.check(),
        "lines": [
            {
                "query": query,
                "name": name,
                "answer": answer,
                "verdict": verdict,
                "sentence": sentence,
                **dict(zip(("value", "lower", "upper", "margin"), map(plain, line), strict=True)),
            }
            for query, name, answer, verdict, sentence, line in zip(
                found.queries, found.query_names, found.answers, found.verdicts, found.sentences(), numbers, strict=True
            )
        ],
    }
