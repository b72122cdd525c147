"""Where a tensor can be picked up in any later pass: by a module's input or output, found on the graph of one pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.reading.wiring.dataflow import closure, origins
from whence.reading.wiring.equation import Factor, times
from whence.reading.wiring.op_graph import Node, OpGraph, Path


@dataclass(frozen=True)
class Handle:
    """Where a tensor can be picked up in any later pass: the `number`-th call of a module, in its input or output."""

    module: str
    number: int
    side: str  # "in" | "out"
    path: Path
    clone: bool  # the model overwrites it in place later on
    onward: bool = True  # what is put in its place goes on through the model, not into a side branch
    token_first: bool = False  # the model has it as (token, sequence, d)

    def sequence_first(self, tensor: Tensor) -> Tensor:
        """From the model's layout to (sequence, token, d), and back."""
        return tensor.transpose(0, 1) if self.token_first else tensor


@dataclass(frozen=True)
class Side:
    """A part that is added beside attention and residual: what a module shows, times a constant."""

    handle: Handle
    scale: Factor = None


@dataclass(frozen=True)
class StateHandles:
    """Where the states of the residual equation are picked up."""

    residual: Handle | None
    after: Handle | None  # the state after attention (and its norm), where a module shows it
    sides: tuple[Side, ...] = ()  # parallel: what else is added, made from the block's input

    @property
    def all(self) -> tuple[Handle, ...]:
        return tuple(h for h in (self.residual, self.after, *(side.handle for side in self.sides)) if h is not None)

    def side_part(self, states: Callable[[Handle], Tensor | None]) -> Tensor | None:
        """The sum of the side parts by what `states` shows at a handle; None where there is none or one is not shown."""
        parts = [times(part, side.scale) for side in self.sides if (part := states(side.handle)) is not None]
        return torch.stack(parts).sum(0) if parts and len(parts) == len(self.sides) else None


def find_block_input(graph: OpGraph, total: Node | None) -> Handle | None:
    """The first state that the innermost module around the sum of residual and attention is given."""
    region = () if total is None or total.producer is None else total.producer.region
    for path, entry in region[-1].inputs if region else ():
        assert total is not None
        if entry.value.shape == total.value.shape and entry.value.is_floating_point():
            first = entry.value.dim() == 3 and entry.value.shape[0] != graph.batch == entry.value.shape[1]
            return Handle(region[-1].name, region[-1].number, "in", path, False, True, first)
    return None


def find_handle(graph: OpGraph, node: Node, around: tuple[int, int] | None = None) -> Handle | None:
    """A module's input or output that is this very tensor (or the same numbers in the same layout).

    Without `around`, the place where it is seen first: later ones may come after something was put in its place.
    `around`: first and last of the operations that read it. The output of a module that has ended by then, or the input of
    a module that holds them all, is preferred to one that is only handed the tensor on the side (rotary positions are,
    to know its dtype) and to one that gives it out once more when all is done (an encoder, with its hidden states).
    """
    same = {id(n) for n in (*origins(node), *closure(node))}
    seen: list[tuple[tuple[int, int, int], Handle]] = []
    for order, call in enumerate(graph.calls):
        for side, entries in (("in", call.inputs), ("out", call.outputs)):
            for path, entry in entries:
                if id(entry) in same and entry.value.dim() >= 2 and entry.value.shape[-1] == node.value.shape[-1]:
                    holds = around is not None and call.begin <= around[0] and around[1] < call.end
                    onward = around is None or (call.end <= around[0] if side == "out" else holds)
                    first = entry.value.dim() == 3 and entry.value.shape[0] != graph.batch == entry.value.shape[1]
                    handle = Handle(call.name, call.number, side, path, entry.frozen is not None, onward, first)
                    if onward and around is not None:
                        return handle
                    # Of modules that end together the inner ones, which began last, end first.
                    when = (call.begin, 1, order) if side == "in" else (call.end, 0, -order)
                    seen.append((when, handle))
    if not seen:
        return None
    return seen[0][1] if around is not None else min(seen, key=lambda pair: pair[0])[1]
