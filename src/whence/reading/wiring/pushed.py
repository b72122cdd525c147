"""(e) pushed: a push on the head outputs of one call moves the state after attention as the projection says, and no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from whence.reading.capture.recorder import Call
from whence.reading.rerun.touching import TensorChange
from whence.reading.wiring.claim import AttentionClaim
from whence.reading.wiring.copies import Copy, CopyStates
from whence.reading.wiring.handles import Handle

NOT_SHOWN = "no module shows the state after attention or the projection's output, so nothing could be pushed and seen"


def pushed_position(call: Call, number: int) -> int:
    """Which query is pushed: another one in each call, never the first, which many models treat as special."""
    count = call.output.shape[2]
    return 1 + (number * 5 + 2) % (count - 1) if count > 1 else 0


def push(inputs: Mapping[str, Any], number: int, call: Call) -> Copy:
    """The same sequence with independent δ on all heads at one position of one call, each the size of the head output."""
    generator = torch.Generator().manual_seed(number)
    at, head_output = pushed_position(call, number), call.output[0]
    direction = torch.randn(head_output[:, at].shape, generator=generator, dtype=torch.float64).to(head_output.device)
    size = head_output.double().norm() / head_output.shape[-2] ** 0.5 / direction.norm()
    delta = (direction * torch.where(size > 0, size, torch.ones_like(size))).to(head_output.dtype)

    def pushed(outputs: Tensor) -> Tensor:
        outputs = outputs.clone()
        outputs[:, at] += delta
        return outputs

    return Copy(inputs, heads={number: pushed})


def push_error(
    claim: AttentionClaim, before: CopyStates, after: CopyStates, number: int, at: int, tolerance: float
) -> tuple[float | None, str | None]:
    """How far the change of the state is from branch(p + δ·W) − branch(p), relative to that change."""
    if claim.projection is None:
        return None, "needs the output projection"
    p = [claim.projection(seen.outputs[number].double()) for seen in (before, after)]
    wiring, handles = claim.wiring, claim.handles
    place: Handle | None = claim.projected
    function: TensorChange = lambda q: q  # noqa: E731
    if wiring is not None and claim.stream is not None:
        place, function = claim.stream, wiring.branch
    elif wiring is not None and handles is not None and handles.after is not None and handles.residual in before.states:
        residual = before.states[handles.residual].double()
        side = handles.side_part(lambda handle: before.states[handle].double())
        place, function = handles.after, lambda q: wiring.rebuild(residual, q, side)
    if place is None or place not in before.states or place not in after.states:
        return None, NOT_SHOWN
    state = before.states[place].double()
    change = after.states[place].double() - state
    # In windows of a larger image the row that was pushed is the one that moved most.
    row = at if change.shape[-2] == p[0].shape[0] else int(change.abs().amax(-1).argmax())
    expected = torch.zeros_like(change)
    expected[row] = (function(p[1]) - function(p[0]))[at]
    error = excess(change - expected, state, before.states[place].dtype) / float(expected.abs().max())
    if error <= tolerance:
        return error, None
    elsewhere = change.clone()
    elsewhere[at] = 0
    why = (
        "other positions move too"
        if excess(elsewhere, state, before.states[place].dtype) > tolerance * float(expected.abs().max())
        else "something else also reads them (an adapter, a second projection) or the branch is not what it seems"
    )
    return error, (
        f"pushing the head outputs moves the state after attention otherwise than the output projection would (off by "
        f"{error:.1e} of the change): {why}"
    )


def excess(difference: Tensor, state: Tensor, dtype: torch.dtype) -> float:
    """The largest difference beyond what rounding of the state itself allows.

    Some states have single entries of 1e3 and more, whose last digit is larger than 1e-4 of a small change.
    """
    return float((difference.abs() - 4 * torch.finfo(dtype).eps * state.abs()).clamp(min=0).max())
