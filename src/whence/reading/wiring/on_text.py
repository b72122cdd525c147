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
from whence.reading.wiring.handles import Handle
from whence.reading.wiring.projection import Projection

if TYPE_CHECKING:
    from whence.reading.wiring.sites import AttentionSite

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
        wiring, handles = site.proved_wiring, site.state_handles
        if site.projection is None or wiring is None or handles is None:
            continue
        after, residual = (None if h is None else states.get(h) for h in (handles.after, handles.residual))
        if after is None or residual is None:
            continue
        if site.projection.rows is not None:  # a map of its own for every row: found anew, and proved, in each pass
            continue
        if after.dim() != 3 or residual.shape != after.shape or after.shape[:2] != (heads.shape[0], heads.shape[2]):
            continue
        side = handles.side_part(states.get)
        if side is None and handles.sides:
            continue
        weight, bias = _matrix(site.projection, _working(heads))
        if not wiring.linear:
            rows = _rows(after.shape[1])
            some = [t[:, rows].flatten(0, 1) for t in (after, residual, *(() if side is None else (side,)))]
            projected = heads[:, :, rows].transpose(1, 2).flatten(2).flatten(0, 1).to(weight) @ weight
            projected = projected if bias is None else projected + bias
            other = None if side is None else some[2].to(projected)
            rebuilt = wiring.rebuild(some[1].to(projected), projected, other)
            what = f"{wiring.kind} wiring does not give its state after attention"
            _refuse(rebuilt, some[0], tolerance, name, site, what)
        else:
            along = _direction(after.shape[-1], weight)
            back, into = wiring.toward(along)
            each = (weight @ into).view(heads.shape[1], heads.shape[-1], 1)
            total = (heads.to(along) @ each).sum((1, 3)) + residual.to(along) @ back
            total = total if bias is None else total + bias @ into
            total = total if side is None else total + side.to(along) @ along
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
    unit: Tensor = direction / direction.norm()
    return unit


@lru_cache(maxsize=64)
def _rows(n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(n))[:ROWS]


def _refuse(rebuilt: Tensor, theirs: Tensor, tolerance: float, name: str, site: AttentionSite, what: str) -> None:
    apart, size = float((rebuilt - theirs).abs_().amax()), float(theirs.abs().amax())
    error = apart / size if size > 0 else apart
    if not error <= tolerance:
        raise ModelError(
            f"{name}: on this text, {site.stack} layer {site.layer}: {what} (off by {error:.1e}, tolerance {tolerance:.0e}), "
            "although it was when the model was proved. Its computation depends on the input, or it was changed since."
        )
