"""Other attention rows for several queries and heads, put into the model together, beside random rows as far away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whence.attention.witness import Verification, relative
from whence.core.attention.witness import random_row_at
from whence.errors import InputError
from whence.reading.rerun.substitution import Replace, Substituted, substitute
from whence.reading.trace import Trace

RowChange = tuple[Sequence[tuple[int, int]], int, Tensor, Tensor]
"""(layer, head) pairs, the query, its rows [head, key] and the others [head, key]; shares of the row's sum."""

# The other row is rounded to the model's dtype before it is used: so many units of it may show in the outputs.
_UNITS = 32


def verify_rows(
    trace: Trace, attention: str | None, places: Sequence[RowChange], *, model: Any = None, seed: int = 0
) -> tuple[list[bool], Verification]:
    """Whether the model took each of the other rows for its own, and what changed when all were put in.

    A place is accepted when its head outputs changed by rounding of the model's dtype only; all of them together when
    the final outputs did, and changed at least ten times less than with random rows at the same distances.
    """
    if not places:
        raise InputError("there is no other row to put into the model.")
    stack = trace.of(attention)
    n = len(stack.key_tokens)
    own: list[Replace] = []
    other: list[Replace] = []
    control: list[Replace] = []
    moved = []
    for k, (heads, query, rows, others) in enumerate(places):
        for (layer, head), row, instead in zip(heads, rows, others, strict=True):
            found = stack[layer]
            total = float(found.weights_of(found.heads.index(head), query).to(torch.float64).sum()) / float(
                row[:n].sum()
            )
            far = 0.5 * float((instead - row).abs().sum())
            moved.append(far)
            mask = found.visible
            seen = None if mask is None else mask[query] if mask.dim() == 2 else mask[found.heads.index(head), query]
            if seen is not None and len(row) > n:
                seen = torch.cat([seen, torch.ones(1, dtype=torch.bool)])
            random = random_row_at(row, min(far, 1.0 - float(row[row > 0].min())), seed=seed + k, visible=seen)
            for changed, new in ((own, row), (other, instead), (control, random)):
                changed.append(Replace(layer, new[:n] * total, head, query, attention))
    runs = [substitute(trace, changes, model=model) for changes in (own, other, control)]
    eps = torch.finfo(stack.layers[0].dtype).eps
    outputs = [[_outputs(run, attention, place) for place in places] for run in runs]
    good = [(relative(b, a) or 0.0) <= _UNITS * eps for a, b in zip(outputs[0], outputs[1], strict=True)]
    heads_changed = [relative(torch.cat(out), torch.cat(outputs[0])) or 0.0 for out in outputs[1:]]
    final = [relative(run.final_states, runs[0].final_states) for run in runs[1:]]
    logits = [relative(run.logits, runs[0].logits) for run in runs[1:]]
    outcome = Verification(
        total_variation=sum(moved) / len(moved),
        head_output=heads_changed[0],
        final_states=final[0],
        logits=logits[0],
        control_head_output=heads_changed[1],
        control_final_states=final[1],
        control_logits=logits[1],
        rounding=_UNITS * eps,
    )
    if not unnoticed(outcome, eps):
        good = [False] * len(good)
    return good, outcome


def unnoticed(outcome: Verification, eps: float) -> bool:
    """Whether the outputs changed by rounding only, and far less than with random rows."""
    pairs = (
        (outcome.final_states, outcome.control_final_states),
        (outcome.logits, outcome.control_logits),
    )
    return all(
        change is None or control is None or change <= _UNITS * eps or change <= 0.1 * min(control, 1e-2)
        for change, control in pairs
    )


def _outputs(run: Substituted, attention: str | None, row: RowChange) -> Tensor:
    heads, query, _, _ = row
    stack = run.trace.of(attention)
    return torch.cat([stack[la].outputs[stack[la].heads.index(h), query] for la, h in heads])
