"""(f) held: with all attention held at its value, a token that is moved moves no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from whence.reading.capture.own_hooks import on_leave
from whence.reading.capture.recorder import Call
from whence.reading.rerun.touching import TensorChange
from whence.reading.wiring.claim import AttentionClaim
from whence.reading.wiring.copies import Copy, CopyStates, run_copies
from whence.reading.wiring.handles import Handle
from whence.reading.wiring.op_graph import walk
from whence.reading.wiring.pushed import excess


@dataclass(frozen=True)
class Move:
    """A copy with one token moved: `own` stacks may change at `position` alone, all the others not at all."""

    copy: Copy
    own: frozenset[str]
    position: int
    length: int  # how many tokens there are


def moves_of(inputs: Mapping[str, Any], claims: Sequence[AttentionClaim], calls: Sequence[Call]) -> list[Move]:
    """Early, middle and late tokens of every sequence that the model is given, with all attention held."""
    held = {i: _hold(call.output[0]) for i, call in enumerate(calls)}
    two = any(name.startswith("decoder_input") for name in inputs)
    every = frozenset(claim.stack for claim in claims) | {"encoder", "decoder", "cross"}
    moves = []
    covered = False
    for name in ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds"):
        if name not in inputs:
            continue
        decoder = name.startswith("decoder")
        covered |= not decoder
        own = every if not two else frozenset({"decoder", "cross"} if decoder else {"encoder"})
        for at in _positions(inputs[name].shape[1]):
            changed = {**inputs, name: _other_token(inputs[name], at)}
            moves.append(Move(Copy(changed, heads=held), own, at, inputs[name].shape[1]))
    if not covered:  # pixels or sound: the first state that a block shows or is given is moved
        first = next((c for c in claims if c.stack != "cross" and (not two or c.stack == "encoder")), None)
        handle = None if first is None or first.handles is None else first.handles.residual
        if first is not None and (handle is None or not handle.onward):  # as where a feed-forward part comes first
            handle = first.block_input
        if first is not None and handle is not None:
            own = frozenset({"encoder"}) if two else every
            n = calls[claims.index(first)].output.shape[2]
            moves += [Move(Copy(inputs, held, {handle: _nudge(at)}), own, at, n) for at in _positions(n)]
    return moves


def _positions(n: int) -> list[int]:
    return sorted({min(1, n - 1), n // 2, max(n - 2, 0)}) if n > 1 else []


def _hold(output: Tensor) -> TensorChange:
    return lambda _: output


def _other_token(given: Tensor, at: int) -> Tensor:
    """The sequence with another of its own tokens at one position: an id that the model surely takes."""
    changed = given.clone()
    if given.is_floating_point():
        changed[:, at] = given.roll(1, -1)[:, at] * 1.5
        return changed
    others = [i for i in range(given.shape[1]) if not bool((given[:, i] == given[:, at]).all())]
    changed[:, at] = given[:, others[-1]] if others else given[:, at] - 1
    return changed


def _nudge(at: int) -> TensorChange:
    def nudge(state: Tensor) -> Tensor:
        state = state.clone()
        state[at] = state[at].roll(1, -1) * 1.5
        return state

    return nudge


def largest_leak(
    claims: Sequence[AttentionClaim], moves: Sequence[Move], before: CopyStates, after: Sequence[CopyStates]
) -> float | None:
    """The largest change of a state that was not moved, relative to the change of the one that was; None: not tested."""
    stack_of: dict[Handle | str, str] = {h: claim.stack for claim in claims for h in claim.states}
    worst: float | None = None
    for move, seen in zip(moves, after, strict=True):
        for place, state in seen.states.items():
            clean = before.states.get(place)
            if clean is None or not state.is_floating_point():
                continue
            stack = stack_of.get(place, place if isinstance(place, str) else "")
            error = _leak(clean, state, move if stack in move.own else None)
            worst = max(worst or 0.0, error)
    return worst


def _leak(clean: Tensor, moved: Tensor, move: Move | None) -> float:
    """How much the rows other than the moved token's changed, relative to that row's own change, or to the state."""
    if clean.shape != moved.shape:
        return float("inf")
    change = moved.double() - clean.double()
    scale = clean.double().abs().max()
    if move is not None:
        if change.shape[0] < move.length:  # tokens were pooled: each row is of several
            return float("inf") if bool(change.any()) else 0.0
        # A model may put positions of its own before the tokens: still, one row alone may change.
        row = move.position if change.shape[0] == move.length else int(change.abs().amax(-1).argmax())
        scale = change[row].abs().max().clone()
        change[row] = 0
    left = excess(change, clean.double(), clean.dtype)
    return left / float(scale) if scale > 0 else left


def mixing_modules(
    model: nn.Module, capture: str, clean: Copy, moves: Sequence[Move], held: float | None, tolerance: float
) -> str:
    """A sentence that names the modules whose output moves at other tokens than their input."""
    if held is None:
        return (
            "no token can be moved while its attention is held, so it is not known whether tokens mix outside the attention "
            "that was read"
        )
    names: dict[str, None] = {}
    for move in moves:
        if names:
            break
        still = _watched(model, capture, replace(clean, heads=move.copy.heads))
        moved = _watched(model, capture, move.copy)
        for key, (given, returned) in moved.items():
            if key not in still:
                continue
            leaks = [
                max((_leak(a, b, move) for a, b in zip(x, y, strict=False) if a.shape == b.shape), default=0.0)
                for x, y in zip(still[key], (given, returned), strict=True)
            ]
            inner = any(name.startswith(f"{key[0]}.") for name in names)
            if leaks[0] <= tolerance < leaks[1] and not inner and returned:
                names[key[0]] = None
    described = [f"{name} ({type(model.get_submodule(name)).__name__})" for name in names]
    more = f" and {len(described) - 2} more" if len(described) > 2 else ""
    where = f"in {', '.join(described[:2])}{more}" if described else "outside its modules"
    change = f"changes others by {held:.2g} of its own change" if held < float("inf") else "changes pooled states"
    return (
        f"tokens mix outside the attention that was read, {where}: with all attention held, moving one token {change}"
    )


Watched = dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]]


def _watched(model: nn.Module, capture: str, copy: Copy) -> Watched:
    """Inputs and outputs (token, d) of every module call, in the order in which the calls end."""
    watched: Watched = {}
    counts: dict[str, int] = {}

    def states(things: Any) -> list[Tensor]:
        return [
            t[0].detach().clone() for _, t in walk(things) if t.is_floating_point() and t.dim() == 3 and len(t) == 1
        ]

    def watch(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            number = counts[name] = counts.get(name, -1) + 1
            watched[name, number] = (states([args, kwargs]), states(output))

        return hook

    hooks = [on_leave(m, watch(n)) for n, m in model.named_modules() if n]
    try:
        run_copies(model, capture, [copy], [], together=True)
    finally:
        for hook in hooks:
            hook.remove()
    return watched
