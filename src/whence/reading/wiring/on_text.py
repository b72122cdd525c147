"""(a) to (c) once more, on every text that is traced: a proof holds for what it was made on, and texts differ.

Random projections tell as much as whole tensors at a fraction of the work. With r a random vector,

    (a)      A (V r) = z r                                    for every head and query
    (b, c)   state · r = carried(residual) · r + z (W r) + b · r    where the branch has no norm of its own

and where a norm stands in the way, the state after attention is rebuilt whole on a row that differs with the length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whence.errors import ModelError
from whence.reading.capture.recorder import Call, mix
from whence.reading.wiring.dataflow import times
from whence.reading.wiring.projection import Projection
from whence.reading.wiring.residual import Handle

if TYPE_CHECKING:
    from whence.reading.wiring.proof import AttentionSite

ROWS = 1  # of every sequence, rebuilt whole where a norm stands in the way of random projections


def assert_on_text(
    sites: Sequence[AttentionSite],
    calls: Sequence[Call],
    states: Mapping[Handle, Tensor],
    tolerance: float,
    name: str,
) -> None:
    """Refuse a pass in which attention · values is not the head output, or whose states are not what was proved."""
    for site, call in zip(sites, calls, strict=True):
        heads, values, weights = call.output, call.value, call.weights
        if heads.dim() != 4:
            continue  # the head outputs were not kept: nothing that needs them can be asked for
        direction = _direction(heads.shape[-1], heads)
        if values.dim() == 4 and weights.dim() == 4:
            seen = mix(weights, values @ direction[:, None])[..., 0]
            _refuse(seen, heads @ direction, tolerance, name, site, "attention · values is not its head output")
        wiring = site.wiring if site.reason_c is None else None
        after = None if wiring is None or wiring.after is None else states.get(wiring.after)
        residual = None if wiring is None or wiring.residual is None else states.get(wiring.residual)
        if site.projection is None or wiring is None or after is None or residual is None:
            continue
        if site.projection.rows is not None:  # a map of its own for every row: found anew, and proved, in each pass
            continue
        if after.dim() != 3 or residual.shape != after.shape or after.shape[:2] != (heads.shape[0], heads.shape[2]):
            continue
        sides = [times(states[side.handle], side.scale) for side in wiring.sides if side.handle in states]
        if len(sides) < len(wiring.sides):
            continue
        weight, bias = _matrix(site.projection, _working(heads))
        if wiring.norm is not None or wiring.branch_norm is not None:
            rows = _rows(after.shape[1])
            some = [t[:, rows].flatten(0, 1) for t in (after, residual, *sides)]
            projected = heads[:, :, rows].transpose(1, 2).flatten(2).flatten(0, 1).to(weight) @ weight
            projected = projected if bias is None else projected + bias
            other = torch.stack(some[2:]).sum(0).to(projected) if sides else None
            rebuilt = wiring.rebuild(some[1].to(projected), projected, other)
            what = f"{wiring.kind} wiring does not give its state after attention"
            _refuse(rebuilt, some[0], tolerance, name, site, what)
        else:
            along = _direction(after.shape[-1], weight)
            into = times(along, wiring.branch_scale)  # the branch's factor is a diagonal matrix, so it may act on r
            each = (weight @ into).view(heads.shape[1], heads.shape[-1], 1)
            total = (heads.to(along) @ each).sum((1, 3)) + residual.to(along) @ times(along, wiring.residual_scale)
            total = total if bias is None else total + bias @ into
            for side in sides:
                total = total + side.to(along) @ along
            what = f"{wiring.kind} wiring does not give its state after attention"
            _refuse(total, after.to(along) @ along, tolerance, name, site, what)


def _matrix(projection: Projection, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """(head · d_v, d) and the bias, without a copy where the dtype is the model's own."""
    bias = projection.bias
    return projection.weight.detach().flatten(0, 1).to(dtype), None if bias is None else bias.detach().to(dtype)


def _working(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype in (torch.float32, torch.float64) else torch.float32


def _direction(width: int, like: Tensor) -> Tensor:
    """A random unit vector, the same for every text."""
    return _unit(width).to(like)


@lru_cache(maxsize=64)
def _unit(width: int) -> Tensor:
    direction = torch.randn(width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    return direction / direction.norm()


@lru_cache(maxsize=64)
def _rows(n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(n))[:ROWS]


def _refuse(made: Tensor, theirs: Tensor, tolerance: float, name: str, site: AttentionSite, what: str) -> None:
    apart, size = float((made - theirs).abs_().amax()), float(theirs.abs().amax())
    error = apart / size if size > 0 else apart
    if not error <= tolerance:
        raise ModelError(
            f"{name}: on this text, {site.stack} layer {site.layer}: {what} (off by {error:.1e}, tolerance {tolerance:.0e}), "
            "although it was when the model was proved. Its computation depends on the input, or it was changed since."
        )
