"""The sweep: directions from the embeddings through every layer, the fastest way that is proved to be right.

Folded (`whence.mixing.jacobian.fold`) where the blocks can be; whichever way the scores may react is tried and compared with
the model's own forward mode, which is what remains where none holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.core.numerics.tolerances import DIFFERENCE_AGREEMENT, DIFFERENCE_STEP, FOLD_AGREEMENT, STRAY_MASS
from whence.errors import ModelError
from whence.mixing.jacobian.fold import BlockJacobians, Fold, block_jacobians, fold_read
from whence.mixing.jacobian.forward_mode import Runner, no_forward_mode
from whence.mixing.jacobian.pairs import cost, paired_scores
from whence.mixing.jacobian.scores import Cap, Scores, candidates
from whence.model.load import Model
from whence.reading.inputs import Prepared
from whence.reading.rerun.run import prove_model
from whence.reading.rerun.word_embeddings import word_start
from whence.reading.trace import Stack, Trace
from whence.reading.wiring.block_tail import read_blocks
from whence.reading.wiring.op_graph import deviation
from whence.reading.wiring.proof import Proof


@dataclass(frozen=True)
class Sweep:
    """Directions from the embeddings through every layer: folded, or by the model's own forward mode."""

    stack: Stack
    runner: Runner
    folds: tuple[Fold, ...]
    route: str
    backward: bool = False  # by backward passes: the model has no forward mode

    def __call__(self, tangents: Tensor, source: Tensor, heads: bool) -> Iterator[Tensor]:
        """Directions (c, d) at one token each → by layer, (n, c, d), or (n, c, head, d_v) for heads."""
        if self.folds and not heads:
            moved = None
            for fold in self.folds:
                moved = fold.start(tangents, source)[0] if moved is None else fold(moved)[0]
                yield moved
            return
        n = len(self.stack.tokens)
        if self.folds:
            moved = torch.zeros(n, *tangents.shape).to(tangents)
            moved[source, torch.arange(len(source))] = tangents
            for i, fold in enumerate(self.folds):
                after, mixed = fold.start(tangents, source) if i == 0 else fold(moved)
                yield mixed + fold.query_part(moved)
                moved = after
            return
        placed = torch.zeros(len(tangents), n, tangents.shape[1]).to(tangents)
        placed[torch.arange(len(source)), source] = tangents
        states, outputs = self.runner.through_backward(placed) if self.backward else self.runner.through(placed)
        for state, output in zip(states, outputs, strict=True):
            yield output.permute(2, 0, 1, 3) if heads else state.transpose(0, 1)


def prepare(trace: Trace, model: Model, stack: Stack, budget: int, count: int) -> Sweep:
    """The fastest way through this trace that is proved to be right."""
    proof = prove_model(model, Prepared(dict(trace.inputs), trace.tokens))
    proof.refuse_chosen_heads(stack, "hidden token attribution")
    words = word_start(trace, model, proof, stack)
    runner = Runner(model, proof, dict(trace.inputs), proof.of(stack.name)[: len(stack)], stack.layers, words)
    if operation := _without_forward_mode(runner):
        return _by_backward(stack, runner, operation)
    reason = ""
    for folds, reason in _folds(trace, model, proof, stack, runner, budget, count):
        if not folds:
            break
        sweep = Sweep(stack, runner, tuple(folds), "folded forward mode")
        worst = _miss(sweep)
        if worst <= FOLD_AGREEMENT[stack.layers[0].block_input.dtype]:
            return sweep
        reason = f"folded matrices miss the model by {worst:.0e}"
    return Sweep(stack, runner, (), f"torch.func.jvp ({reason})")


def _without_forward_mode(runner: Runner) -> str:
    """What torch says of an operation with a backward of its own and no forward mode; empty where there is none."""
    try:
        runner.through(torch.zeros_like(runner.layers[0].block_input)[None])
    except RuntimeError as problem:
        if no_forward_mode(problem):
            return " ".join(str(problem).split())
    return ""


def _by_backward(stack: Stack, runner: Runner, operation: str) -> Sweep:
    """Backward passes, after they agreed with differences of the model's own outputs.

    An operation's own backward need not be the derivative of what it computes: straight-through estimators say something
    else on purpose.
    """
    x = stack.layers[0].block_input
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x)[None]
    small = DIFFERENCE_STEP * float(x.square().mean().sqrt())
    with _explained(runner, "by backward passes"):
        states = runner.through_backward(direction)[0]
        whole, half = (_central_differences(runner, direction, step) for step in (small, small / 2))
    # Richardson: two steps together take away what curvature leaves of each.
    differences = [(4 * h - w) / 3 for h, w in zip(half, whole, strict=True)]
    missed = max(deviation(ours, theirs) for ours, theirs in zip(states, differences, strict=True))
    if not missed <= DIFFERENCE_AGREEMENT:
        raise ModelError(
            f"{runner.model.name} has operations with a backward pass of their own, and it is not the derivative of what "
            f"they compute: the two differ by {missed:.1e}. Which of them attribution should follow is not for whence to "
            "choose."
        )
    return Sweep(stack, runner, (), f"backward passes (an operation has no forward mode: {operation[:80]})", True)


def _central_differences(runner: Runner, direction: Tensor, step: float) -> list[Tensor]:
    above, below = (runner.moved(sign * step * direction)[0] for sign in (1, -1))
    return [(a - b) / (2 * step) for a, b in zip(above, below, strict=True)]


def _miss(sweep: Sweep) -> float:
    """Proof of the folding against forward mode through the model itself, along random directions.

    At two tokens, the way every direction goes; and at all tokens at once, so that every matrix of every layer is in it.
    """
    stack = sweep.stack
    first = stack.layers[0].block_input
    n, width = first.shape
    generator = torch.Generator().manual_seed(1)
    tangents = torch.randn(2, width, generator=generator).to(first)
    source = torch.tensor([0, n - 1])
    everywhere = torch.randn(n, 1, width, generator=generator).to(first)
    with _explained(sweep.runner):
        wanted = [*Sweep(stack, sweep.runner, (), "")(tangents, source, False)]
        wanted += [state.transpose(0, 1) for state in sweep.runner.through(everywhere.transpose(0, 1))[0]]
    made = [*sweep(tangents, source, False)]
    for fold in sweep.folds:
        everywhere = fold(everywhere)[0]
        made.append(everywhere)
    return max(deviation(ours, theirs) for ours, theirs in zip(made, wanted, strict=True))


def _folds(
    trace: Trace, model: Model, proof: Proof, stack: Stack, runner: Runner, budget: int, count: int
) -> Iterator[tuple[list[Fold], str]]:
    """The blocks' matrices, for each way that the scores may react; none, and why, where there are none."""
    layer = stack.layers[0]
    if trace.mixes is not None:
        yield [], trace.mixes
        return
    if layer.block_input.dtype not in FOLD_AGREEMENT:
        yield [], f"{layer.block_input.dtype} is too coarse to prove a folding in"
        return
    for each in stack:
        if each.grouped_keys is None or each._queries is None or each.keys.shape[-1] != each.queries.shape[-1]:
            yield [], f"layer {each.index}'s queries and keys are not known"
            return
        if each.attention.shape[1] != each.attention.shape[2] or each.outputs.shape != layer.outputs.shape:
            yield [], "its layers differ in shape"
            return
    n, width = layer.block_input.shape
    readings = read_blocks(model, proof, trace.inputs)
    read = [readings[proof.site(stack.name, each.index).number] for each in stack]
    plain = all(r.feedforward is not None and r.maps is not None for r in read)
    each_size = layer.block_input.element_size() * n * width * (width + layer.outputs.shape[0] * layer.outputs.shape[2])
    needed = len(stack) * each_size * (1.5 if plain else 2.5)
    if needed > 0.8 * budget:
        yield [], f"folded matrices would take {needed / 1e9:.1f} GB of the {budget / 1e9:.1f} GB allowed"
        return
    caps: list[Cap | None] = [None] * len(stack) if all(each.keys_proved for each in stack) else runner.caps()
    jacobians: list[BlockJacobians] = []
    for scores in _ways(stack, runner, caps, count, budget - needed):
        if plain:
            yield [fold_read(each, r, s) for each, r, s in zip(stack, read, scores, strict=True)], ""
            continue
        try:
            jacobians = jacobians or block_jacobians(runner)
        except RuntimeError as problem:
            yield [], f"forward mode block by block failed: {' '.join(str(problem).split())[:100]}"
            return
        yield [block.fold(each, s) for block, each, s in zip(jacobians, stack, scores, strict=True)], ""


def _ways(stack: Stack, runner: Runner, caps: list[Cap | None], count: int, memory: float) -> Iterator[list[Scores]]:
    """How the scores may react: to queries and keys alone, else pair by pair."""
    yield from candidates(stack.layers, caps)
    followed, held = cost(stack.layers[0], len(stack))
    n, width = stack.layers[0].block_input.shape
    if n * count <= followed + 2 * width or held > memory:
        return  # finding the pairs, and the blocks' matrices, takes more directions than were wanted in all
    for layer in stack:
        rows = layer.attention.sum(-1)
        if 2 * layer.queries.shape[-1] > width or bool((rows - 1).abs().max() > STRAY_MASS):
            return  # the two parts of a pair cannot be told apart; or rows have a sink, and constants do not cancel
    try:
        yield paired_scores(stack.layers, runner.reactions)
    except RuntimeError:
        return  # no forward mode block by block: the model's own, all through, is tried next and says why


def run(sweep: Sweep, directions: Tensor, at: Tensor, heads: bool) -> Iterator[Tensor]:
    """The sweep; what torch cannot follow is said in words."""
    if sweep.folds:
        yield from sweep(directions, at, heads)
        return
    with _explained(sweep.runner):
        yield from sweep(directions, at, heads)


@contextmanager
def _explained(runner: Runner, how: str = "in forward mode") -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TypeError) as problem:
        raise ModelError(
            f"{runner.model.name} cannot be followed {how}: {' '.join(str(problem).split())[:200]}"
        ) from problem


def columns(sweep: Sweep, n: int, width: int, budget: int) -> int:
    """How many directions go through a layer at once within the budget."""
    layer = sweep.stack.layers[0]
    count, bytes_each = layer.outputs.shape[0], layer.block_input.element_size()
    if sweep.folds:
        left = budget - sum(fold.bytes for fold in sweep.folds)
        each = bytes_each * (2 * count * n * n + 12 * n * width)
        best = max(32, min(2**22 // (n * width), 2**22 // (count * n * n)))  # more at once only leave the cache
    else:
        left = budget
        most = max(16, min(128, 2**21 // (n * width)))  # tensors stay small enough for memory that is used again
        best = -(-width // -(-width // most))  # all d directions of a token in pieces of one size
        each = (
            bytes_each
            * (4 * count * n * n + 16 * n * width)
            * (len(sweep.stack) if sweep.backward else len(sweep.stack) // 2 + 2)
        )
    return max(1, min(best, max(left, 0) // each))
