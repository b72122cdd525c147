"""The decisions part of the page's data: what was decided from attention, and whether the computation fixes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from whence.attention.decide import Decisions
from whence.errors import InputError
from whence.reporting.attention import json_value


def decisions_data(decisions: Iterable[Decisions]) -> list[dict[str, Any]]:
    """Each rule with its heads, its counts and a line for every query."""
    return [_rule(one) for one in decisions]


def _rule(decisions: Decisions) -> dict[str, Any]:
    if not isinstance(decisions, Decisions):
        raise InputError(f"decisions takes what whence.decide gives for a rule, not a {type(decisions).__name__}.")
    numbers = zip(*(getattr(decisions, name).tolist() for name in ("value", "lower", "upper", "margin")), strict=True)
    return {
        "rule": decisions.rule,
        "stack": decisions.attention,
        "heads": [list(pair) for pair in decisions.heads],
        "combine": decisions.combine,
        "summary": decisions.summary(),
        "checked": decisions.check(),
        "lines": [
            {
                "query": query,
                "name": name,
                "answer": answer,
                "verdict": verdict,
                "sentence": sentence,
                **dict(zip(("value", "lower", "upper", "margin"), map(json_value, line), strict=True)),
            }
            for query, name, answer, verdict, sentence, line in zip(
                decisions.queries,
                decisions.query_names,
                decisions.answers,
                decisions.verdicts,
                decisions.sentences(),
                numbers,
                strict=True,
            )
        ],
    }
