"""Another attention row that the model cannot tell from this one, verified in the model itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whence.attention.heads import find_row, key_labels, row_of
from whence.core.attention.aimed import aimed_row
from whence.core.attention.witness import random_row_at, witness_row
from whence.core.numerics.tolerances import BATCH_MATES, SAME_ROW, output_rounding
from whence.errors import InputError
from whence.reading.rerun.substitution import Replace, Substituted, substitute, substitute_each
from whence.reading.trace import Trace
from whence.results.provenance import Provenance
from whence.results.short_repr import short_repr


@dataclass(frozen=True)
class Verification:
    """What changed in the model when other attention was put in its place; each change relative to the original.

    `control_*`: the same with a random row at the same distance, which the model does notice. `rounding`: what the
    model's own arithmetic can change, 1e-6 in float32 and eight eps in half precision (the other row is rounded too).
    """

    __repr__ = short_repr

    total_variation: float
    head_output: float
    final_states: float | None
    logits: float | None
    control_head_output: float
    control_final_states: float | None
    control_logits: float | None
    rounding: float = 1e-6

    @property
    def same(self) -> bool:
        """Whether the model could not tell: every change is at most `rounding` of the original."""
        found = (self.head_output, self.final_states, self.logits)
        return all(change is None or change <= self.rounding for change in found)

    def plot(self, *, ax: Any = None) -> Any:
        """What changed, beside the control. See `whence.attention.plots`; returns the Axes."""
        from whence.attention.plots import plot_verification

        return plot_verification(self, ax)

    def sentence(self) -> str:
        what, change, control = ("logits", self.logits, self.control_logits)
        if change is None:
            what, change, control = ("final states", self.final_states, self.control_final_states)
        return (
            f"{self.total_variation:.2f} of the attention was moved; the {what} changed by {change:.1e}. "
            f"A random row as far away changes them by {control:.1e}."
        )

    def to_dict(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in self.__dataclass_fields__}, "same": self.same}


@dataclass(frozen=True)
class RowWitness:
    """An alternative attention row with the same head output.

    `alternative` [key]: ≥ 0, same sum, zero at hidden keys; `exists`: False where the search found none (which, for
    key-constrained rows, never means that none exists); `residual`: relative change of the head output.
    """

    __repr__ = short_repr

    trace: Trace
    layer: int
    head: int
    query: int
    row: Tensor
    alternative: Tensor
    total_variation: float
    residual: float
    exists: bool
    statement: str
    provenance: Provenance
    attention: str | None = None

    def verify(self, model: Any = None, *, seed: int = 0) -> Verification:
        """Put the row into the model, run it, and compare; beside it a random row at the same distance."""
        layer = self.trace.of(self.attention)[self.layer]
        visible = row_of(layer, layer.heads.index(self.head), self.query)[2]
        total = self.row.sum()
        control = random_row_at(self.row / total, self.total_variation, seed=seed, visible=visible) * total
        # The unchanged row goes through the same path, so that only the row differs between the runs.
        baseline, changed, moved = self.in_model((self.row, self.alternative, control), model)
        return compare(self.attention, self.layer, self.head, self.total_variation, baseline, changed, moved)

    def in_model(self, rows: Sequence[Tensor], model: Any = None) -> list[Substituted]:
        """What the model gives with each of `rows` [key] in the place of the row; the first of them is the row itself."""
        keys = len(self.trace.of(self.attention).key_tokens)  # a sink takes what the keys leave
        changes = [
            Replace(self.layer, row[:keys].to(torch.float64), self.head, self.query, self.attention) for row in rows
        ]
        together = substitute_each(self.trace, changes, model=model)
        own = relative(together[0].final_states, self.trace.final_states)
        if own is not None and own > BATCH_MATES:  # a model in which the texts of a batch are not independent
            return [substitute(self.trace, change, model=model) for change in changes]
        return together

    def plot(self, *, ax: Any = None) -> Any:
        """The row beside the other. See `whence.attention.plots`; returns the Axes."""
        from whence.attention.plots import plot_witness

        return plot_witness(self, ax)

    def to_dict(self) -> dict[str, Any]:
        stack = self.trace.of(self.attention)
        return {
            "layer": self.layer,
            "head": self.head,
            "query": self.query,
            "query_token": stack.tokens[self.query],
            "tokens": list(key_labels(stack)),
            "row": self.row.tolist(),
            "alternative": self.alternative.tolist(),
            "total_variation": self.total_variation,
            "residual": self.residual,
            "exists": self.exists,
            "statement": self.statement,
            "provenance": self.provenance.to_dict(),
        }


def relative(changed: Tensor | None, original: Tensor | None) -> float | None:
    """‖changed − original‖ / ‖original‖, in float64."""
    if changed is None or original is None:
        return None
    a, b = changed.to("cpu", torch.float64), original.to("cpu", torch.float64)
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))


def rounding_of(outputs: Tensor) -> float:
    """The relative change of a model's outputs that its dtype alone can make."""
    return output_rounding(outputs.dtype)


def compare(
    attention: str | None, layer: int, head: int, distance: float,
    baseline: Substituted, changed: Substituted, control: Substituted,
) -> Verification:  # fmt: skip
    """The changes of a substitution and of its control, against the baseline."""
    runs = (baseline, changed, control)
    return verification(distance, [run.trace.of(attention)[layer].outputs[head] for run in runs], runs)


def verification(distance: float, outputs: Sequence[Tensor], runs: Sequence[Substituted]) -> Verification:
    """What changed from the first run, the baseline, to the second and the third, its control; outputs of the heads moved."""
    baseline = runs[0]
    changes = [
        (
            relative(o, outputs[0]),
            relative(run.final_states, baseline.final_states),
            relative(run.logits, baseline.logits),
        )
        for o, run in zip(outputs[1:], runs[1:], strict=True)
    ]
    return Verification(
        distance, changes[0][0] or 0.0, *changes[0][1:], changes[1][0] or 0.0, *changes[1][1:], rounding_of(outputs[0])
    )


def witness(
    trace: Trace,
    layer: int,
    head: int,
    query: int | str,
    *,
    aim: str | Tensor = "far",
    key_constrained: bool = False,
    starts: int = 4,
    seed: int = 0,
    attention: str | None = None,
) -> RowWitness:
    """Another attention row with the same head output: by default the one of largest total variation found.

    `aim`: "far", that; "sparse", a row on at most d_v + 1 keys; "spread", the row of largest entropy; or costs [key], the row
    that minimises Σ costs · weights.

    `key_constrained=True`: only rows that some query could have produced with this head's keys, by a search from
    many `starts`; finding none is reported as such, except where the keys are tied to the values, and then the row
    is unique by theorem.

    >>> import whence
    >>> text = "The bank raised its rates again , and again , and " * 5
    >>> found = whence.witness(whence.trace(whence.load(), text), layer=2, head=3, query=1)
    >>> found.total_variation > 0.01, found.residual < 1e-6
    (True, True)
    """
    stack, at, place, row = find_row(trace, layer, head, query, attention)
    if key_constrained and not (isinstance(aim, str) and aim == "far"):
        raise InputError(f"aim={aim!r} and key_constrained=True: key-constrained rows are searched for, not aimed.")
    settings = {"layer": layer, "head": head, "query": row, "key_constrained": key_constrained, "seed": seed}
    origin = trace.provenance.by("witness", **settings, attention=stack.name)
    if key_constrained:
        from whence.attention.key_constraint import key_constrained_witness

        other, distance, residual, exists, said = key_constrained_witness(at, place, row, max(starts, 16), seed)
        original = row_of(at, place, row)[0].to(torch.float64)
        return RowWitness(trace, layer, head, row, original, other, distance, residual, exists, said, origin, attention)
    weights, values, visible = row_of(at, place, row)
    total = weights.to(torch.float64).sum()
    if isinstance(aim, str) and aim == "far":
        best = witness_row(weights.to(torch.float64) / total, values, starts=starts, seed=seed, visible=visible)
    else:
        best = aimed_row(weights.to(torch.float64) / total, values, aim, visible=visible)
    exists = best.total_variation > SAME_ROW
    keys = int((best.alternative > 0).sum())
    said = (
        f"another row, {best.total_variation:.3f} away and on {keys} keys, gives the same head output"
        if exists
        else "this row is the only one with this head output"
    )
    return RowWitness(
        trace, layer, head, row, best.row * total, best.alternative * total, best.total_variation, best.residual, exists,
        said, origin, attention,
    )  # fmt: skip
