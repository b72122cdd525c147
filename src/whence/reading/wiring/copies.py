"""Copies of a short sequence through the model at once, each with its own changes on the way: the passes of an intervention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from whence.reading.capture.attach import attached, picking_up
from whence.reading.capture.own_hooks import on_leave
from whence.reading.capture.recorder import AttentionRecorder, Edit
from whence.reading.rerun.touching import TensorChange, touching
from whence.reading.wiring.handles import Handle
from whence.reading.wiring.op_graph import walk


@dataclass(frozen=True)
class Copy:
    """One sequence of the batch: what it is given, and what is done to it on the way."""

    inputs: Mapping[str, Any]
    heads: Mapping[int, TensorChange] = field(default_factory=dict)  # by call number, on (head, query, d_v)
    states: Mapping[Handle, TensorChange] = field(default_factory=dict)  # on (token, d)


@dataclass(frozen=True)
class CopyStates:
    """What one copy showed: head outputs (head, query, d_v) of every call, and states (token, d)."""

    outputs: list[Tensor]
    states: dict[Handle | str, Tensor]


def run_copies(
    model: nn.Module, capture: str, copies: Sequence[Copy], handles: Sequence[Handle], *, together: bool
) -> list[CopyStates]:
    """What each copy showed: all in one batch, or one by one."""
    if not together:
        return [seen for copy in copies for seen in run_copies(model, capture, [copy], handles, together=True)]
    count = len(copies)
    batch: dict[str, Any] = dict(copies[0].inputs)
    rows = next(t.shape[0] for _, t in walk(batch))
    if count > 1:
        rows = count
        for name, value in copies[0].inputs.items():
            if isinstance(value, Tensor):
                batch[name] = torch.cat([c.inputs[name] for c in copies])
    recorder = AttentionRecorder(edits=_edits(copies), keep=lambda _: frozenset({"outputs"}))
    changes = {h: _spread([c.states.get(h) for c in copies]) for h in {h for c in copies for h in c.states}}
    finals: dict[str, Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(attached(model, capture, recorder, rows))
        stack.enter_context(touching(model, changes))
        states = stack.enter_context(picking_up(model, handles))
        for name, body in _bodies(model).items():
            stack.callback(on_leave(body, _final(name, finals)).remove)
        model(**batch)
    by_copy: list[CopyStates] = []
    for i in range(count):
        own: dict[Handle | str, Tensor] = {}
        places: list[tuple[Handle | str, Tensor]] = [*states.items(), *finals.items()]
        for place, tensor in places:
            row = _row(tensor, i, count)
            if row is not None:
                own[place] = row
        by_copy.append(CopyStates([call.output[i].detach() for call in recorder.calls], own))
    return by_copy


def _edits(copies: Sequence[Copy]) -> dict[int, list[Edit]]:
    calls = {number for copy in copies for number in copy.heads}
    return {n: [Edit(output=_spread([c.heads.get(n) for c in copies]))] for n in calls}


def _spread(changes: Sequence[TensorChange | None]) -> TensorChange:
    """One change for a batch: each sequence's own on its row."""

    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        rows = tensor if tensor.dim() > 2 else tensor.view(len(changes), -1, tensor.shape[-1])
        for i, own in enumerate(changes):
            if own is not None:
                rows[i] = own(rows[i])
        return tensor

    return change


def _row(tensor: Tensor, i: int, count: int) -> Tensor | None:
    """(token, d) of one sequence of the batch; None where the tensor is not one of states."""
    if tensor.dim() == 2 and tensor.shape[0] % count == 0:
        return tensor.view(count, -1, tensor.shape[-1])[i].detach()
    if tensor.dim() > 2 and tensor.shape[0] == count:
        return tensor[i].detach().flatten(0, -2)
    return None


def _bodies(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that end with the final states: encoder and decoder, or the model without its head."""
    parts = {}
    for name in ("encoder", "decoder"):
        try:
            part = getattr(model, f"get_{name}")()
        except (AttributeError, NotImplementedError, TypeError, ValueError):
            continue
        if isinstance(part, nn.Module) and part is not model:
            parts[name] = part
    if len({id(part) for part in parts.values()}) == 2:
        return parts
    base = getattr(model, "base_model", model)
    return {"decoder": base} if isinstance(base, nn.Module) else {}


def _final(name: str, into: dict[str, Tensor]) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        states = getattr(output, "last_hidden_state", output[0] if isinstance(output, tuple) and output else output)
        if isinstance(states, Tensor) and states.dim() == 3:
            into[name] = states

    return hook
