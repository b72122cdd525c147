"""The norm that ends a post-norm block, and where the sum it reads can be picked up.

Its scale is all that GlobEnc needs of the feed-forward layer. Kept in the trace, nothing has to be run again for it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from whence.reading.wiring.dataflow import ADD, closure, consumers, origins
from whence.reading.wiring.equation import POST
from whence.reading.wiring.handles import Handle, find_handle
from whence.reading.wiring.norm_search import norm_of
from whence.reading.wiring.norms import Norm
from whence.reading.wiring.op_graph import Op, OpGraph, deviation
from whence.reading.wiring.residual import WiringEvidence, block_output


@dataclass(frozen=True)
class SecondNorm:
    """block output = norm(state after attention + feed-forward part); `before`: where that sum is seen."""

    norm: Norm
    before: Handle


def find_second_norm(
    graph: OpGraph, op: Op | None, evidence: WiringEvidence, tolerance: float, others: Collection[int] = ()
) -> SecondNorm | None:
    """From the state after attention, plainly added to something, through a norm, to the block's output."""
    state, wiring = evidence.state, evidence.wiring
    if op is None or state is None or wiring is None or evidence.reason_c is not None or wiring.kind != POST:
        return None
    out = block_output(op, evidence, others)
    if out is None or id(out) in {id(n) for n in (*origins(state), *closure(state))}:
        return None
    last = {id(n) for n in origins(out)}
    for add, _ in consumers(closure(state)):
        if add.name not in ADD:
            continue
        total = add.outputs[0]
        if len(add.inputs) != 2 or deviation(add.inputs[0].value + add.inputs[1].value, total.value) > tolerance:
            continue  # not the plain sum
        after = norm_of(total, consumers(closure(total)), tolerance)
        if after is None or not last & {id(n) for n in (*closure(after[1]), *origins(after[1]))}:
            continue
        handle = find_handle(graph, total)
        return None if handle is None else SecondNorm(after[0], handle)
    return None
