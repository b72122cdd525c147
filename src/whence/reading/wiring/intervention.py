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

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from whence.reading.capture.attach import attached, picking_up
from whence.reading.capture.recorder import AttentionRecorder, Call, Edit
from whence.reading.rerun.touching import Change, touching
from whence.reading.wiring.dataflow import times
from whence.reading.wiring.op_graph import deviation, walk
from whence.reading.wiring.projection import Projection
from whence.reading.wiring.residual import Handle, Wiring

NOT_SHOWN = "no module shows the state after attention or the projection's output, so nothing could be pushed and seen"


@dataclass(frozen=True)
class Claim:
    """What was read of one attention call, to be tested: where the head outputs go, and where that can be seen."""

    stack: str
    projection: Projection | None
    wiring: Wiring | None
    projected: Handle | None  # the projection's output
    stream: Handle | None  # residual + branch, before a post-norm
    block_output: Handle | None

    @property
    def states(self) -> tuple[Handle, ...]:
        """Every place where this block shows a state."""
        wiring = self.wiring
        own = () if wiring is None else (wiring.residual, wiring.after, *(side.handle for side in wiring.sides))
        return tuple(h for h in (*own, self.projected, self.stream, self.block_output) if h is not None)


@dataclass(frozen=True)
class Verdict:
    """The errors of (e) for each call (None: not tested) and of (f) for the model, each with its reason."""

    pushed: tuple[tuple[float | None, str | None], ...]
    held: float | None
    mixes: str | None  # what mixes tokens outside the attention that was read


@dataclass(frozen=True)
class Copy:
    """One sequence of the batch: what it is given, and what is done to it on the way."""

    inputs: Mapping[str, Any]
    heads: Mapping[int, Change] = field(default_factory=dict)  # by call number, on (head, query, d_v)
    states: Mapping[Handle, Change] = field(default_factory=dict)  # on (token, d)


@dataclass(frozen=True)
class Seen:
    """What one copy showed: head outputs (head, query, d_v) of every call, and states (token, d)."""

    outputs: list[Tensor]
    states: dict[Handle | str, Tensor]


def intervene(
    model: nn.Module,
    capture: str,
    inputs: Mapping[str, Any],
    calls: Sequence[Call],
    claims: Sequence[Claim],
    tolerance: float,
) -> Verdict:
    """Test every claim, all copies in one batch; one by one where that does not hold, since copies may touch each other."""
    pushes = [_push(inputs, i, call) for i, call in enumerate(calls)]
    moves = _moves(inputs, claims, calls)
    copies = [Copy(inputs), *pushes, *(move.copy for move in moves)]
    handles = list(dict.fromkeys(h for claim in claims for h in claim.states))
    verdict: Verdict | None = None
    for together in (True, False):
        if together and not all(t.shape[:1] == (1,) for _, t in walk(dict(inputs))):
            continue
        try:
            seen = _run(model, capture, copies, handles, together=together)
        except (RuntimeError, ValueError, IndexError, TypeError):
            if together:
                continue  # a model that takes one sequence at a time
            # Tokens that are put together to patches by what they are: with another token there are other patches.
            moves = []
            seen = _run(model, capture, copies[: 1 + len(calls)], handles, together=False)
        if together and max(map(deviation, seen[0].outputs, (c.output[0] for c in calls)), default=0.0) > tolerance:
            continue
        after = seen[1 : 1 + len(calls)]
        pushed = tuple(
            _pushed(claim, seen[0], other, number, _position(call, number), tolerance)
            for number, (claim, call, other) in enumerate(zip(claims, calls, after, strict=True))
        )
        held = _held(claims, moves, seen[0], seen[1 + len(calls) :])
        verdict = Verdict(pushed, held, None)
        if all(error is not None and error <= tolerance for error, _ in pushed) and _within(held, tolerance):
            return verdict
    assert verdict is not None
    if not _within(verdict.held, tolerance):
        return replace(verdict, mixes=_mixing(model, capture, copies[0], moves, verdict.held, tolerance))
    return verdict


def _within(error: float | None, tolerance: float) -> bool:
    return error is not None and error <= tolerance


# -- (e) -----------------------------------------------------------------------------------------------------------


def _position(call: Call, number: int) -> int:
    """Which query is pushed: another one in each call, never the first, which many models treat as special."""
    count = call.output.shape[2]
    return 1 + (number * 5 + 2) % (count - 1) if count > 1 else 0


def _push(inputs: Mapping[str, Any], number: int, call: Call) -> Copy:
    """The same sequence with independent δ on all heads at one position of one call, each the size of the head output."""
    generator = torch.Generator().manual_seed(number)
    at, head_output = _position(call, number), call.output[0]
    direction = torch.randn(head_output[:, at].shape, generator=generator, dtype=torch.float64).to(head_output.device)
    size = head_output.double().norm() / head_output.shape[-2] ** 0.5 / direction.norm()
    delta = (direction * torch.where(size > 0, size, torch.ones_like(size))).to(head_output.dtype)

    def push(outputs: Tensor) -> Tensor:
        outputs = outputs.clone()
        outputs[:, at] += delta
        return outputs

    return Copy(inputs, heads={number: push})


def _pushed(
    claim: Claim, before: Seen, after: Seen, number: int, at: int, tolerance: float
) -> tuple[float | None, str | None]:
    """How far the change of the state is from branch(p + δ·W) − branch(p), relative to that change."""
    if claim.projection is None:
        return None, "needs the output projection"
    p = [claim.projection(seen.outputs[number].double()) for seen in (before, after)]
    wiring = claim.wiring
    place: Handle | None = claim.projected
    function: Change = lambda q: q  # noqa: E731
    if wiring is not None and claim.stream is not None:
        place, function = claim.stream, wiring.branch
    elif wiring is not None and wiring.after is not None and wiring.residual in before.states:
        residual = before.states[wiring.residual].double()
        for side in wiring.sides:
            residual = residual + times(before.states[side.handle].double(), side.scale)
        place, function = wiring.after, lambda q: wiring.rebuild(residual, q)
    if place is None or place not in before.states or place not in after.states:
        return None, NOT_SHOWN
    state = before.states[place].double()
    change = after.states[place].double() - state
    if (
        change.shape[-2] != p[0].shape[0]
    ):  # windows of a larger image: the row that was pushed is the one that moved most
        row = int(change.abs().amax(-1).argmax())
        expected = torch.zeros_like(change)
        expected[row] = (function(p[1]) - function(p[0]))[at]
    else:
        expected = torch.zeros_like(change)
        expected[at] = (function(p[1]) - function(p[0]))[at]
    error = _excess(change - expected, state, before.states[place].dtype) / float(expected.abs().max())
    if error <= tolerance:
        return error, None
    elsewhere = change.clone()
    elsewhere[at] = 0
    why = (
        "other positions move too"
        if _excess(elsewhere, state, before.states[place].dtype) > tolerance * float(expected.abs().max())
        else "something else also reads them (an adapter, a second projection) or the branch is not what it seems"
    )
    return error, (
        f"pushing the head outputs moves the state after attention otherwise than the output projection would (off by "
        f"{error:.1e} of the change): {why}"
    )


def _excess(difference: Tensor, state: Tensor, dtype: torch.dtype) -> float:
    """The largest difference beyond what rounding of the state itself allows.

    Some states have single entries of 1e3 and more, whose last digit is larger than 1e-4 of a small change.
    """
    return float((difference.abs() - 4 * torch.finfo(dtype).eps * state.abs()).clamp(min=0).max())


# -- (f) -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """A copy with one token moved: `own` stacks may change at `position` alone, all the others not at all."""

    copy: Copy
    own: frozenset[str]
    position: int
    length: int  # how many tokens there are


def _moves(inputs: Mapping[str, Any], claims: Sequence[Claim], calls: Sequence[Call]) -> list[Move]:
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
    if not covered:  # pixels or sound: the first state that a block shows is moved
        first = next((c for c in claims if c.stack != "cross" and (not two or c.stack == "encoder")), None)
        handle = None if first is None or first.wiring is None else first.wiring.residual
        if first is not None and handle is not None and handle.onward:
            own = frozenset({"encoder"}) if two else every
            n = calls[claims.index(first)].output.shape[2]
            moves += [Move(Copy(inputs, held, {handle: _nudge(at)}), own, at, n) for at in _positions(n)]
    return moves


def _positions(n: int) -> list[int]:
    return sorted({min(1, n - 1), n // 2, max(n - 2, 0)}) if n > 1 else []


def _hold(output: Tensor) -> Change:
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


def _nudge(at: int) -> Change:
    def nudge(state: Tensor) -> Tensor:
        state = state.clone()
        state[at] = state[at].roll(1, -1) * 1.5
        return state

    return nudge


def _held(claims: Sequence[Claim], moves: Sequence[Move], before: Seen, after: Sequence[Seen]) -> float | None:
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
    left = _excess(change, clean.double(), clean.dtype)
    return left / float(scale) if scale > 0 else left


def _mixing(
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

    hooks = [m.register_forward_hook(watch(n), with_kwargs=True) for n, m in model.named_modules() if n]
    try:
        _run(model, capture, [copy], [], together=True)
    finally:
        for hook in hooks:
            hook.remove()
    return watched


# -- passes --------------------------------------------------------------------------------------------------------


def _run(
    model: nn.Module, capture: str, copies: Sequence[Copy], handles: Sequence[Handle], *, together: bool
) -> list[Seen]:
    if not together:
        return [seen for copy in copies for seen in _run(model, capture, [copy], handles, together=True)]
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
            stack.callback(body.register_forward_hook(_final(name, finals)).remove)
        model(**batch)
    found: list[Seen] = []
    for i in range(count):
        own: dict[Handle | str, Tensor] = {}
        places: list[tuple[Handle | str, Tensor]] = [*states.items(), *finals.items()]
        for place, tensor in places:
            row = _row(tensor, i, count)
            if row is not None:
                own[place] = row
        found.append(Seen([call.output[i].detach() for call in recorder.calls], own))
    return found


def _edits(copies: Sequence[Copy]) -> dict[int, list[Edit]]:
    calls = {number for copy in copies for number in copy.heads}
    return {n: [Edit(output=_spread([c.heads.get(n) for c in copies]))] for n in calls}


def _spread(changes: Sequence[Change | None]) -> Change:
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
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        states = getattr(output, "last_hidden_state", output[0] if isinstance(output, tuple) and output else output)
        if isinstance(states, Tensor) and states.dim() == 3:
            into[name] = states

    return hook
