"""Rows with a witness, followed from the original to the alternative, with the model run at every stop on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whence.attention.heads import row_of
from whence.attention.witness import RowWitness, relative
from whence.core.attention.row_intervals import row_intervals
from whence.core.attention.witness import random_row_at
from whence.reading.rerun.substitution import Substituted
from whence.reading.trace import Trace
from whence.reporting.outputs import describe_output

STOPS = (0.0, 0.25, 0.5, 0.75, 1.0)
KEYS = 14


def counter_example(
    trace: Trace, witness: RowWitness, *, stops: tuple[float, ...] = STOPS, seed: int = 0
) -> dict[str, Any] | None:
    """A row's witness and the model's output at `stops` from the row to it; None where the row is the only one.

    `keys`, `lower`, `upper`: the weights to draw and their exact intervals. `path` and `control` (a random row at the
    same distance): a, the share of the way; output; change of the final states and of the logits, relative to the
    unchanged row put in by the same path.
    """
    if not witness.exists:
        return None
    plain = {
        **_intervals(trace, witness),
        "layer": witness.layer, "head": witness.head, "query": witness.query,
        "row": _short(witness.row), "alternative": _short(witness.alternative),
        "total_variation": witness.total_variation, "residual": witness.residual, "statement": witness.statement,
    }  # fmt: skip
    if trace.model is None:
        return {**plain, "path": None, "reason": "the trace came without its model, so it was not put into it"}
    other = _control(trace, witness, seed)
    ways = [(end, a) for end in (witness.alternative, other) for a in stops if a > 0]
    # The first is the unchanged row, by the same path.
    baseline, *found = witness.in_model([witness.row, *(witness.row + a * (end - witness.row) for end, a in ways)])
    half = len(found) // 2
    path, control = (
        [_stop(trace, a, baseline if a == 0 else next(runs), baseline) for a in stops]
        for runs in (iter(found[:half]), iter(found[half:]))
    )
    return {**plain, "control_row": _short(other), "path": path, "control": control}


def _intervals(trace: Trace, witness: RowWitness) -> dict[str, Any]:
    """The keys that either row gives most to, and the exact interval of the weight of each."""
    layer = trace.of(witness.attention)[witness.layer]
    row, values, visible = row_of(layer, layer.heads.index(witness.head), witness.query)
    keys = torch.maximum(witness.row, witness.alternative).to(torch.float64).topk(min(KEYS, len(row))).indices
    total = float(witness.row.sum())
    for solved in row_intervals(row[None], values, keys[None], visible=None if visible is None else visible[None]):
        lower, upper = (solved.lower * total).tolist(), (solved.upper * total).tolist()
        return {"keys": keys.tolist(), "lower": lower, "upper": upper}
    return {"keys": keys.tolist(), "lower": None, "upper": None}


def _control(trace: Trace, witness: RowWitness, seed: int) -> Tensor:
    layer = trace.of(witness.attention)[witness.layer]
    visible = row_of(layer, layer.heads.index(witness.head), witness.query)[2]
    total = witness.row.sum()
    return random_row_at(witness.row / total, witness.total_variation, seed=seed, visible=visible) * total


def _stop(trace: Trace, a: float, result: Substituted, baseline: Substituted) -> dict[str, Any]:
    return {
        "a": a,
        "output": describe_output(result.logits, result.final_states, trace.model, trace.inputs.get("input_ids")),
        "final_states": relative(result.final_states, baseline.final_states),
        "logits": relative(result.logits, baseline.logits),
    }


def _short(row: Tensor) -> list[float]:
    return [round(v, 7) for v in row.tolist()]
