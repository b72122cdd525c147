"""(b): the output projection, the linear map that mixes the head outputs into the model's width."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from whence.core.numerics.tolerances import weight_rank_tolerance
from whence.reading.wiring.affine import affine, constant
from whence.reading.wiring.dataflow import ADD, MUL, PASSIVE, NotRecognised, closure, consumers, origins
from whence.reading.wiring.linear_ops import as_linear
from whence.reading.wiring.op_graph import Node, Op, deviation, flat
from whence.reading.wiring.row_map import find_row_map, turn


@dataclass(frozen=True)
class Projection:
    """The output projection: head h adds z_h · weight[h] to the block's output, and bias is added once.

    rows: where the head outputs go through a map that differs from row to row first (rotary values are turned back),
    row i adds z_hi · rows[i] · weight[h]. It belongs to the rows of one pass.
    """

    weight: Tensor  # (head, d_v, d)
    bias: Tensor | None  # (d,)
    rows: Tensor | None = None  # (query, d_v, d_v)

    @cached_property
    def full_rank(self) -> bool:
        """Whether every head's slice has full row rank, so that T = V W has the column space of V. Measured once."""
        if self.weight.shape[-2] > self.weight.shape[-1]:
            return False
        return self.condition * weight_rank_tolerance(self.weight.dtype) < 1

    @cached_property
    def condition(self) -> float:
        """σ_max / σ_min of the worst head's slice, in float64 whatever the model's dtype; infinite below full rank.

        The dtype decides what the weights are, not how they are measured: a real projection has σ_min/σ_max of 1e-5 to
        5e-5, far below the eps of bfloat16 (8e-3), and no rank is lost by it.
        """
        singular = torch.linalg.svdvals(self.weight.detach().to("cpu", torch.float64))
        least, most = singular[..., -1], singular[..., 0]
        return float(torch.where(least > 0, most / least, torch.inf).max())

    def __call__(self, heads: Tensor) -> Tensor:
        """(head, query, d_v) → (query, d)"""
        heads = heads if self.rows is None else turn(heads, self.rows)
        out = torch.einsum("hqv,hvd->qd", heads, self.weight.to(heads))
        return out if self.bias is None else out + self.bias.to(out)


def find_projection(start: Node, heads: Tensor, tolerance: float) -> tuple[Projection, Node, float]:
    """From the head outputs (head, query, d_v) to the linear map that mixes them into the model's width.

    What comes from the head outputs is followed, in the order in which it was computed, to the first tensor that all of
    it goes through. That tensor is affine in the head outputs, or there is no projection.
    """
    tried: list[str] = []
    sources = {id(n) for n in closure(start)}
    shape = (heads.shape[0], heads.shape[2])
    best: tuple[Projection, Node, float] | None = None
    grouped = False
    for node in _narrows(start):
        op = node.producer
        assert op is not None
        grouped = op.name == "bmm" or (grouped and op.name in PASSIVE)
        if grouped:  # groups of heads are still side by side: the matrix that mixes them follows
            continue
        if best is not None and not (op.name in ADD and any(map(constant, op.inputs))):
            return best  # a bias of its own, added after the matrix, belongs to the projection; nothing else does
        summed = _as_added(op, node, heads.shape[0], heads.shape[2])
        made = affine(node, sources, shape[0] * shape[1])
        if made is not None and made.weight is None:
            continue
        projection, out = summed if made is None else (None, node)
        if made is not None and made.weight is not None and made.weight.shape[0] == shape[0] * shape[1]:
            projection = Projection(made.weight.detach().unflatten(0, shape), made.bias)
        if projection is None or out is None:
            tried = tried or [use.name for use, _ in consumers(closure(start))]
            break
        made_here = projection(heads.to(torch.float64))
        if flat(out.value).shape != made_here.shape:
            tried.append(f"{op.name}, whose output {tuple(out.value.shape)} does not have one row for each position")
            break
        error = deviation(flat(out.value), made_here)
        if error <= tolerance:
            best = projection, out, error
            continue
        tried.append(f"{op.name} (its output differs by {error:.1e} from Σ heads · weight + bias)")
        break
    if best is not None:
        return best
    if not tried:
        tried = [use.name for use, _ in consumers(closure(start))]
    if not tried:
        raise NotRecognised("nothing was computed from the head outputs")
    gates = sum(name in MUL or "sigmoid" in name for name in tried)
    hint = (
        "; the head outputs are multiplied by something (a gate or a scale) before they are projected" if gates else ""
    )
    if not gates and tried.count("linear") > 1:
        hint = "; something that is not linear (an adapter) reads them beside the projection"
    raise NotRecognised(
        f"no linear map of the head outputs alone was found; they go into: {', '.join(dict.fromkeys(tried))}{hint}"
    )


def find_turned_projection(start: Node, heads: Tensor, batch: int, tolerance: float) -> tuple[Projection, Node, float]:
    """The same where the head outputs are turned, row by row, before they are projected."""
    row_map = find_row_map(start, batch, heads.shape[0], tolerance)
    projection, out, error = find_projection(row_map.node, row_map(heads), tolerance)
    return replace(projection, rows=row_map.rows.flatten(0, 1)), out, error


def _narrows(start: Node, most: int = 200) -> Iterator[Node]:
    """The tensors through which everything that was computed from `start` goes, in the order of computation."""
    known = {id(start)}
    pending: dict[int, Op] = {op.index: op for op in start.consumers}
    for _ in range(most):
        if not pending:
            return
        op = pending.pop(min(pending))
        for out in op.outputs:
            if id(out) not in known:
                known.add(id(out))
                pending |= {use.index: use for use in out.consumers if use.index > op.index}
        if len(op.outputs) != 1:
            continue
        same = {id(n) for n in (*origins(op.outputs[0]), *closure(op.outputs[0]))}
        onward = [
            use for use in pending.values() if use.name not in PASSIVE or any(out.consumers for out in use.outputs)
        ]
        if all(id(n) in same for use in onward for n in use.inputs if id(n) in known):
            yield op.outputs[0]


def _as_added(op: Op, summed: Node, heads: int, size: int) -> tuple[Projection | None, Node | None]:
    """Heads added first and then projected, (Σ_h z_h) W: every head is given the same W. With the projected tensor.

    That the sum runs over the heads, and over nothing else, is left to the caller's check by value.
    """
    if op.name != "sum" or not op.inputs or summed.value.numel() * heads != op.inputs[0].value.numel():
        return None, None
    for after, used in consumers(closure(summed)):
        one = as_linear(after, used, size)
        if one is not None:
            return Projection(one.weight.expand(heads, -1, -1), one.bias), after.outputs[0]
    return None, None
