"""Methods that read one layer at a time: several of them, on several traces, in one go.

Layer by layer, so that what the methods share (the decomposition, the attention laid out by key) is made once and
dropped before the next layer; and traces of about one length together (`whence.mixing.batch`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from whence.errors import InputError
from whence.mixing.batch import cut, groups, stacked
from whence.mixing.contributions import LAYER, Contributions
from whence.mixing.decomposition import sharing
from whence.mixing.encoder_decoder import together
from whence.mixing.mixture import check_rows
from whence.reading.trace import Layer, Stack, Trace

Matrix = Callable[[Layer, bool], tuple[Tensor, Tensor | None]]
"""One layer (and whether its keys are other tokens than its queries) → (query, source), and which rows are degenerate
(query; None: no row can be). A layer of several sequences gives both with the sequence first."""


@dataclass(frozen=True)
class Plan:
    """How a method reads one layer, and what it reads."""

    name: str
    matrix: Matrix
    settings: Mapping[str, Any]
    attention: str | None = None
    both: bool = True  # an encoder and its decoder can be read together (ALTI+)
    batched: bool = True  # the matrix may be asked for several sequences at once

    def whole(self, trace: Trace) -> bool:
        """Whether every stack of an encoder–decoder is read."""
        return self.both and self.attention is None and len(trace.stacks) > 1

    def stacks(self, trace: Trace) -> list[str]:
        return list(trace.stacks) if self.whole(trace) else [single(trace, self.attention, self.name).name]


def layerwise(plan: Callable[..., Plan]) -> Callable[..., Contributions]:
    """The method that a plan describes: what is decorated makes the plan for a trace and its options."""

    @wraps(plan)
    def method(trace: Trace, **options: Any) -> Contributions:
        return evaluate([trace], [plan], options)[0][0]

    PLANS[method] = plan
    return method


PLANS: dict[Callable[..., Contributions], Callable[..., Plan]] = {}
"""By method, what makes its plan."""


def evaluate(
    traces: Sequence[Trace], makers: Sequence[Callable[..., Plan]], options: Mapping[str, Any]
) -> list[list[Contributions]]:
    """[method][trace], from what makes each method's plan for a trace."""
    made: list[list[Contributions]] = [[None] * len(traces) for _ in makers]  # type: ignore[list-item]
    for batch in groups(traces):
        some = [traces[i] for i in batch]
        plans = [maker(some[0], **options) for maker in makers]  # one model's traces: one plan does for all
        for number, (plan, found) in enumerate(zip(plans, _matrices(some, plans), strict=True)):
            for i, trace in zip(batch, some, strict=True):
                made[number][i] = _result(trace, plan, found)
    return made


Found = dict[int, tuple[Tensor, Tensor]]
"""By the id of a layer: its matrix, and how many of its rows are degenerate."""


def _matrices(traces: Sequence[Trace], plans: Sequence[Plan]) -> list[Found]:
    if len(traces) > 1 and not all(plan.batched for plan in plans):
        alone = [_matrices([trace], plans) for trace in traces]
        return [{id_: pair for found in alone for id_, pair in found[i].items()} for i in range(len(plans))]
    found: list[Found] = [{} for _ in plans]
    reading = [plan.stacks(traces[0]) for plan in plans]
    with sharing():
        for name in traces[0].stacks:
            wanted = [i for i, stacks in enumerate(reading) if name in stacks]
            for layers in zip(*(trace.stacks[name] for trace in traces), strict=True) if wanted else ():
                layer, crossed = stacked(layers), name == "cross"
                for i in wanted:
                    matrix, empty = plans[i].matrix(layer, crossed)
                    for row, own in enumerate(layers):
                        mine = matrix if len(layers) == 1 else cut(matrix, row, own, crossed)
                        lost = None if empty is None else empty if len(layers) == 1 else empty[row]
                        count = torch.tensor(0) if lost is None else lost[: mine.shape[0]].sum()
                        found[i][id(own)] = (mine, count)
    return found


def _result(trace: Trace, plan: Plan, found: Found) -> Contributions:
    settings = {"origin": LAYER, **plan.settings}
    if trace.mixes is not None:  # these are shares of the attention block, and must not be multiplied
        settings["mixes"] = trace.mixes
    if plan.whole(trace):
        return together(trace, plan.name, lambda layer, _: found[id(layer)], settings)
    stack = single(trace, plan.attention, plan.name)
    values = check_rows(torch.stack([found[id(layer)][0] for layer in stack]), plan.name)
    degenerate = torch.stack([found[id(layer)][1] for layer in stack])
    return of_stack(trace, plan.name, stack, values, settings, degenerate=degenerate)


def single(trace: Trace, attention: str | None, name: str) -> Stack:
    """The one stack that a method of a single stack reads."""
    if attention is None and len(trace.stacks) > 1:
        raise InputError(
            f"{name} reads one stack, and this trace has {', '.join(trace.stacks)}: choose attention='encoder' or 'decoder'."
        )
    stack = trace.of(attention)
    if stack.name == "cross":
        raise InputError(
            "cross-attention is read together with its decoder: leave attention= out (alti, norms, rollout)."
        )
    return stack


def of_stack(
    trace: Trace,
    name: str,
    stack: Stack,
    values: Tensor,
    settings: Mapping[str, Any],
    *,
    layers: tuple[int, ...] | None = None,
    degenerate: Tensor | None = None,
) -> Contributions:
    """The result of one stack."""
    return Contributions(
        values=values,
        axes=("layer", "hidden", "input"),
        tokens=stack.tokens,
        provenance=trace.provenance.by(name, attention=stack.name, **settings),
        layers=layers if layers is not None else tuple(layer.index for layer in stack),
        extra={} if degenerate is None else {"degenerate": degenerate},
    )
