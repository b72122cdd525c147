"""(a) to (c) once more, on every text that is traced: a proof holds for what it was made on, and texts differ.

Random projections tell as much as whole tensors at a fraction of the work. With r a random vector,

    (a)      A (V r) = z r                                    for every head and query
    (b, c)   state · r = carried(residual) · r + z (W r) + b · r    where the branch has no norm of its own

and where a norm stands in the way, the state after attention is rebuilt whole on one row of each sequence, which differs
with the length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whence.errors import ModelError
from whence.reading.attention_rows import along_direction, attention_rows, output_error, tolerance_of, unit
from whence.reading.capture.lineage import Role
from whence.reading.capture.recorder import Call, mix
from whence.reading.wiring.handles import Handle
from whence.reading.wiring.projection import Projection

if TYPE_CHECKING:
    from whence.reading.wiring.sites import AttentionSite

SAMPLED = 2  # rows of attention made again on every text, besides the last, where a fused pass shows none


def assert_on_text(
    sites: Sequence[AttentionSite],
    calls: Sequence[Call],
    states: Mapping[Handle, Tensor],
    tolerance: float,
    name: str,
) -> None:
    """Refuse a pass in which attention · values is not the head output, or whose states are not what was proved."""
    for site, call in zip(sites, calls, strict=True):
        assert_site(site, call, states, tolerance, name)


def assert_role(site: AttentionSite, role: Role, name: str) -> None:
    """Refuse a pass in which a call reads from another stream, or runs in another one, than its stack is named for."""
    if role == site.role:
        return
    keys = "its keys come from another stream than its queries" if role.elsewhere else "it reads its own stream"
    raise ModelError(
        f"{name}: on this text, attention call {site.number} ({site.module}) runs {'inside' if role.in_decoder else 'outside'} "
        f"the decoder and {keys}, although it was {site.stack} layer {site.layer} when the model was proved. Its "
        "computation depends on the input."
    )


def assert_site(site: AttentionSite, call: Call, states: Mapping[Handle, Tensor], tolerance: float, name: str) -> None:
    """`assert_on_text` for one attention call."""
    heads, values, weights = call.output, call.value, call.weights
    if heads.dim() != 4:
        return  # the head outputs were not kept: nothing that needs them can be asked for
    if values.dim() == 4 and weights.dim() == 4:
        direction = _direction(heads.shape[-1], heads)
        seen = mix(weights, along_direction(values, direction)[..., None])[..., 0]
        theirs = along_direction(heads, direction)
        _refuse(seen, theirs, tolerance, name, site, "attention · values is not its head output")
    elif call.fused and values.dim() == 4 and call.query is not None and call.key is not None:
        _sampled_rows(site, call, name)
    wiring, handles = site.proved_wiring, site.state_handles
    if site.projection is None or wiring is None or handles is None:
        return
    after, residual = (None if h is None else states.get(h) for h in (handles.after, handles.residual))
    if after is None or residual is None:
        return
    if site.projection.rows is not None:  # a map of its own for every row: found anew, and proved, in each pass
        return
    if after.dim() != 3 or residual.shape != after.shape or after.shape[:2] != (heads.shape[0], heads.shape[2]):
        return
    side = handles.side_part(states.get)
    if side is None and handles.sides:
        return
    weight, bias = _matrix(site.projection, _working(heads))
    if not wiring.linear:
        row = int(sample(after.shape[1])[0])
        projected = heads[:, :, row].flatten(1).to(weight) @ weight
        projected = projected if bias is None else projected + bias
        other = None if side is None else side[:, row].to(projected)
        rebuilt = wiring.rebuild(residual[:, row].to(projected), projected, other)
        what = f"{wiring.kind} wiring does not give its state after attention"
        _refuse(rebuilt, after[:, row], tolerance, name, site, what)
    else:
        along = _direction(after.shape[-1], weight)
        back, into = wiring.toward(along)
        each = (weight @ into).view(heads.shape[1], heads.shape[-1], 1)
        total = (heads.to(along) @ each).sum((1, 3)) + residual.to(along) @ back
        total = total if bias is None else total + bias @ into
        total = total if side is None else total + side.to(along) @ along
        what = f"{wiring.kind} wiring does not give its state after attention"
        _refuse(total, after.to(along) @ along, tolerance, name, site, what)


def _sampled_rows(site: AttentionSite, call: Call, name: str) -> None:
    """(a) where the weights are not there: some rows, made again from queries and keys, give the model's head outputs."""
    assert call.query is not None
    assert call.key is not None
    n = call.output.shape[2]
    rows = sample(n).to(call.output.device)

    def at(t: Tensor | None, axis: int = -2) -> Tensor | None:
        return t if t is None or t.shape[axis] != n else t.index_select(axis, rows)

    query, output = call.query.index_select(2, rows), call.output.index_select(2, rows)
    scale, cap = (call.scale, None) if call.cap is None else call.cap
    assert scale is not None
    weights = attention_rows(
        query, call.key, scale=scale, cap=cap, visible=at(call.visible), bias=at(call.bias), sink=at(call.sink, -1)
    )
    error, tolerance = output_error(weights, call.value, output), tolerance_of(call.output.dtype)
    if not error <= tolerance:
        raise _changed(
            name, site, "attention made from queries and keys does not give its head output", error, tolerance
        )


def _matrix(projection: Projection, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """(head · d_v, d) and the bias, without a copy where the dtype is the model's own."""
    bias = projection.bias
    return projection.weight.detach().flatten(0, 1).to(dtype), None if bias is None else bias.detach().to(dtype)


def _working(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype in (torch.float32, torch.float64) else torch.float32


def _direction(width: int, like: Tensor) -> Tensor:
    """A random unit vector, the same for every text."""
    return unit(width, like.dtype, like.device)


@lru_cache(maxsize=64)
def sample(n: int) -> Tensor:
    """Some of n rows, the same for every text of this length, and the last."""
    some = torch.randperm(n, generator=torch.Generator().manual_seed(n))[:SAMPLED]
    return torch.cat([some, torch.tensor([n - 1])])


def _refuse(rebuilt: Tensor, theirs: Tensor, tolerance: float, name: str, site: AttentionSite, what: str) -> None:
    apart, size = float((rebuilt - theirs).abs_().amax()), float(theirs.abs().amax())
    error = apart / size if size > 0 else apart
    if not error <= tolerance:
        raise _changed(name, site, what, error, tolerance)


def _changed(name: str, site: AttentionSite, what: str, error: float, tolerance: float) -> ModelError:
    reason = "Its computation depends on the input, or it was changed since."
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        reason = (
            "torch.autocast is on, so it computes in another precision: trace it without, or load it in that dtype."
        )
    return ModelError(
        f"{name}: on this text, {site.stack} layer {site.layer}: {what} (off by {error:.1e}, tolerance {tolerance:.0e}), "
        f"although it was when the model was proved. {reason}"
    )
