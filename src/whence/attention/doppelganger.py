"""Two models' worth of attention maps, the same computation: other attention for every row of every head at once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from whence.attention.heads import by_group, head_of, key_labels, row_of, sink_last
from whence.attention.witness import Verification, verification
from whence.core.attention.alternatives import alternative_attention
from whence.core.attention.witness import random_row_at, witness_row
from whence.reading.rerun.substitution import Replace, Substituted, substitute
from whence.reading.trace import Layer, Stack, Trace
from whence.results.declared import Array
from whence.results.result import Result

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Doppelganger(Result):
    """`values`: the other attention, [layer, head, query, key], float64.

    `extra`: total_variation, residual and searched [layer, head, query]; stopped; witness_layer, witness_total_variation
    and witness_here: for a sample of rows, the total variation of the single-row witness beside that of this map.
    """

    kind: ClassVar[str] = "doppelganger"
    arrays: ClassVar[Mapping[str, Array]] = {
        "values": Array("layer head query key"),
        **dict.fromkeys(("total_variation", "residual"), Array("layer head query")),
        "searched": Array("layer head query", "boolean"),
        "stopped": Array("", "boolean"),
        "witness_layer": Array("sample", "integer"),
        **dict.fromkeys(("witness_total_variation", "witness_here"), Array("sample")),
    }

    trace: Trace | None = field(default=None, repr=False, compare=False)
    attention: str | None = None

    @property
    def total_variation(self) -> float:
        """The mean over all rows."""
        return float(self.extra["total_variation"].mean())

    @property
    def stopped(self) -> bool:
        """Whether a limit in seconds ended the search early: another machine may then find another map."""
        return bool(self.extra["stopped"])

    def by_layer(self) -> pd.DataFrame:
        """Mean total variation by layer, and that of the witnesses on the sampled rows of that layer."""
        import pandas as pd

        rows = []
        for i, layer in enumerate(self.layers):
            sampled = self.extra["witness_layer"] == layer
            rows.append(
                {
                    "layer": layer,
                    "total_variation": float(self.extra["total_variation"][i].mean()),
                    "sampled_rows": int(sampled.sum()),
                    "sampled_total_variation": float(self.extra["witness_here"][sampled].mean()),
                    "witness_total_variation": float(self.extra["witness_total_variation"][sampled].mean()),
                }
            )
        return pd.DataFrame(rows)

    def verify(self, model: Any = None, *, seed: int = 0) -> Verification:
        """Put all of it into the model at once; the control moves every row as far, at random."""
        from whence.errors import InputError

        if self.trace is None:
            raise InputError("this doppelganger was loaded from a file and has no trace: make it again to verify it.")
        stack = self.trace.of(self.attention)
        original = [layer.attention.to(torch.float64) for layer in stack]
        control = [_random(layer, self.extra["total_variation"][i], seed) for i, layer in enumerate(stack)]
        baseline, changed, moved = (self._run(maps, model) for maps in (original, list(self.values), control))
        outputs = [
            torch.stack([la.outputs for la in run.trace.of(self.attention)]) for run in (baseline, changed, moved)
        ]
        return verification(self.total_variation, outputs, (baseline, changed, moved))

    def _run(self, maps: list[Tensor], model: Any) -> Substituted:
        assert self.trace is not None
        keys = len(self.trace.of(self.attention).key_tokens)  # a sink takes what the keys leave
        changes = [
            Replace(layer, weights[..., :keys], attention=self.attention)
            for layer, weights in zip(self.layers, maps, strict=True)
        ]
        return substitute(self.trace, changes, model=model)


def _random(layer: Layer, distances: Tensor, seed: int) -> Tensor:
    """Every row moved at random as far as the doppelganger moved it."""
    other = []
    for place in range(len(layer.heads)):
        weights, _, visible = head_of(layer, place)
        rows = []
        for q, row in enumerate(weights.to(torch.float64)):
            total, seen = row.sum(), None if visible is None else visible[q]
            rows.append(random_row_at(row / total, float(distances[place, q]), seed=seed + q, visible=seen) * total)
        other.append(torch.stack(rows))
    return torch.stack(other)


def doppelganger(
    trace: Trace,
    *,
    rounds: int = 2,
    budget: float | None = None,
    sample: int = 24,
    seed: int = 0,
    attention: str | None = None,
) -> Doppelganger:
    """Alternative attention for every row of every head that leaves the whole computation unchanged.

    As different from the original as `rounds` search directions a row find, which is the same on any machine. `budget`:
    seconds after which the search stops early; rows keep what was found, and the result says so (`stopped`, `searched`).
    `sample` rows are also given their own single-row witness (besides), to say how much of what is possible was reached.
    """
    stack = trace.of(attention)
    labels = key_labels(stack)
    begin = time.monotonic()
    maps, distances, residuals, searched, stopped = [], [], [], [], False
    for i, layer in enumerate(stack):
        weights, values, visible = by_group(layer)
        share = None
        if budget is not None:
            share = max((budget - (time.monotonic() - begin)) / (len(stack) - i), 1e-3)
        found = alternative_attention(weights, values, visible=visible, rounds=rounds, budget=share, seed=seed)
        maps.append(sink_last(layer, found.attention.flatten(0, 1), len(labels)))
        distances.append(found.total_variation.flatten(0, 1))
        residuals.append(found.residual.flatten(0, 1))
        searched.append(found.searched.flatten(0, 1))
        stopped = stopped or found.stopped
    moved = torch.stack(distances)
    extra = {
        "total_variation": moved,
        "residual": torch.stack(residuals),
        "searched": torch.stack(searched),
        "stopped": torch.tensor(stopped),
        **_sampled(stack, moved, sample, seed),
    }
    return Doppelganger.of_stack(
        stack,
        torch.stack(maps),
        trace.provenance.by("doppelganger", rounds=rounds, budget=budget, seed=seed, attention=stack.name),
        axes=("layer", "head", "query", "key"), key_tokens=labels, extra=extra, trace=trace, attention=attention,
    )  # fmt: skip


def _sampled(stack: Stack, moved: Tensor, sample: int, seed: int) -> dict[str, Tensor]:
    """Single-row witnesses on a random sample of rows, spread over the layers."""
    generator = torch.Generator().manual_seed(seed)
    layers, here, witnesses = [], [], []
    for k in range(sample):
        i = k % len(stack)
        layer = stack.layers[i]
        heads, n_query, _ = layer.shape
        h = int(torch.randint(heads, (1,), generator=generator))
        q = int(torch.randint(n_query, (1,), generator=generator))
        weights, values, visible = row_of(layer, h, q)
        weights = weights.to(torch.float64)
        best = witness_row(weights / weights.sum(), values, visible=visible, seed=seed)
        layers.append(layer.index)
        here.append(float(moved[i, h, q]))
        witnesses.append(best.total_variation)
    return {
        "witness_layer": torch.tensor(layers, dtype=torch.int64),
        "witness_here": torch.tensor(here, dtype=torch.float64),
        "witness_total_variation": torch.tensor(witnesses, dtype=torch.float64),
    }
