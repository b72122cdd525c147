"""(e) pushed and (f) held: the reading of a model is proved by moving things in it and seeing what follows.

A sum that adds up proves nothing when one of its parts was defined as the rest, so two interventions are made on copies
of a short sequence, all in one batch where copies of a batch leave each other alone:

(e) pushed   add a random δ to the head outputs of one attention call at one position: the state after attention changes
             by branch(p + δ·W) − branch(p) at that position, p the projection's output, and nowhere else. An adapter or
             any second path that also reads the head outputs is refuted by it.
(f) held     hold every recorded attention output at its value and change one input token: no other token's state
             changes in any layer. State-space layers, convolutions and attention that was not seen are refuted by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from whence.reading.capture.recorder import Call
from whence.reading.wiring.claim import AttentionClaim
from whence.reading.wiring.copies import Copy, run_copies
from whence.reading.wiring.held import largest_leak, mixing_modules, moves_of
from whence.reading.wiring.op_graph import deviation, walk
from whence.reading.wiring.pushed import push, push_error, pushed_position


@dataclass(frozen=True)
class InterventionErrors:
    """The errors of (e) for each call (None: not tested) and of (f) for the model, each with its reason."""

    pushed: tuple[tuple[float | None, str | None], ...]
    held: float | None
    mixes: str | None  # what mixes tokens outside the attention that was read


def intervene(
    model: nn.Module,
    capture: str,
    inputs: Mapping[str, Any],
    calls: Sequence[Call],
    claims: Sequence[AttentionClaim],
    tolerance: float,
) -> InterventionErrors:
    """Test every claim, all copies in one batch; one by one where that does not hold, since copies may touch each other."""
    pushes = [push(inputs, i, call) for i, call in enumerate(calls)]
    moves = moves_of(inputs, claims, calls)
    copies = [Copy(inputs), *pushes, *(move.copy for move in moves)]
    handles = list(dict.fromkeys(h for claim in claims for h in claim.states))
    errors: InterventionErrors | None = None
    for together in (True, False):
        if together and not all(t.shape[:1] == (1,) for _, t in walk(dict(inputs))):
            continue
        try:
            seen = run_copies(model, capture, copies, handles, together=together)
        except (RuntimeError, ValueError, IndexError, TypeError):
            if together:
                continue  # a model that takes one sequence at a time
            # Tokens that are put together to patches by what they are: with another token there are other patches.
            moves = []
            seen = run_copies(model, capture, copies[: 1 + len(calls)], handles, together=False)
        if together and max(map(deviation, seen[0].outputs, (c.output[0] for c in calls)), default=0.0) > tolerance:
            continue
        after = seen[1 : 1 + len(calls)]
        pushed = tuple(
            push_error(claim, seen[0], other, number, pushed_position(call, number), tolerance)
            for number, (claim, call, other) in enumerate(zip(claims, calls, after, strict=True))
        )
        held = largest_leak(claims, moves, seen[0], seen[1 + len(calls) :])
        errors = InterventionErrors(pushed, held, None)
        if all(error is not None and error <= tolerance for error, _ in pushed) and _within(held, tolerance):
            return errors
    assert errors is not None
    if not _within(errors.held, tolerance):
        return replace(errors, mixes=mixing_modules(model, capture, copies[0], moves, errors.held, tolerance))
    return errors


def _within(error: float | None, tolerance: float) -> bool:
    return error is not None and error <= tolerance
