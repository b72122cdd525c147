"""Forward mode through the model itself: what moves, and how, when a block's input does.

An operation may bring a backward of its own and no forward mode (`autograd.Function` without `jvp`, as BLOOM's activation):
such a model is followed by backward passes instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from whence.mixing.jacobian.pairs import Moved
from whence.mixing.jacobian.scores import Cap
from whence.model.load import Model
from whence.model.memory import lock_of
from whence.reading.capture.interface import plain_experts
from whence.reading.capture.recorder import AttentionRecorder, Edit
from whence.reading.rerun.replay import TensorChange, block_handles, repeated, replay
from whence.reading.trace import Layer
from whence.reading.wiring.handles import Handle
from whence.reading.wiring.proof import Proof
from whence.reading.wiring.sites import AttentionSite

_one_at_a_time = threading.RLock()
"""torch counts the levels of forward mode for the whole process: two threads would end each other's."""


@dataclass(frozen=True)
class Runner:
    """Forward mode through the model itself, on one sequence: the fallback, and the source of unread blocks' matrices."""

    model: Model
    proof: Proof
    inputs: Mapping[str, Tensor]
    sites: tuple[AttentionSite, ...]
    layers: tuple[Layer, ...]
    words: Handle | None = None  # where directions start, if not at what the first block reads

    def _stepping(self, outputs: dict[int, Tensor], step: Tensor) -> dict[Handle, TensorChange]:
        """`step` added to the embeddings, and every block's output noted down."""
        changes = self._watching(outputs)
        start = self.words if self.words is not None else block_handles(self.sites[0])[0]
        changes[start] = _then(changes.get(start), lambda t: t + step)
        return changes

    def _apart(self, changes: dict[Handle, TensorChange], step: Tensor | None) -> dict[Handle, TensorChange]:
        """Every block reads its own recorded input, whatever the one before gave."""
        for i, site in enumerate(self.sites):
            start = block_handles(site)[0]
            changes[start] = _then(changes.get(start), self._put(i, step))
        return changes

    def _put(self, i: int, step: Tensor | None) -> TensorChange:
        """The block's input put back to what it was, with the direction added where there is one."""
        constant = self.layers[i].block_input[None]
        return lambda t: constant.to(t).expand_as(t) if step is None else constant.to(t) + step

    def through(self, tangents: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Directions (c, n, d) at the embeddings → (block outputs (c, n, d), head outputs (c, head, n, d_v)) by layer."""
        states, heads = self._pushed(self.moved, tangents)
        return states, heads

    def moved(self, step: Tensor, *, gradients: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """Block outputs (c, n, d) and head outputs with `step` (c, n, d) added to the embeddings."""
        outputs: dict[int, Tensor] = {}
        changes = self._stepping(outputs, step)
        recorder = AttentionRecorder(keep=lambda _: frozenset({"outputs"}))
        self._replay(len(step), changes, recorder, gradients)
        calls = [recorder.calls[site.number].output for site in self.sites]
        return [outputs[i] for i in range(len(self.sites))], calls

    def through_backward(self, tangents: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """As `through`, by backward passes: for operations that bring a backward of their own and no forward mode.

        u ↦ Jᵀu is linear, so that its own derivative along a direction q, one more backward pass, is J q, in all
        layers at once.
        """
        step = torch.zeros_like(self.layers[0].block_input[None], requires_grad=True)
        outputs = [part for parts in self.moved(step, gradients=True) for part in parts]
        along = [torch.zeros_like(part, requires_grad=True) for part in outputs]
        (pulled,) = torch.autograd.grad(outputs, step, along, create_graph=True)
        moved = torch.autograd.grad(pulled, along, tangents[:, None], is_grads_batched=True, materialize_grads=True)
        return [state[:, 0] for state in moved[: len(self.sites)]], [head[:, 0] for head in moved[len(self.sites) :]]

    def block_directions(self, tangents: Tensor) -> tuple[list[Tensor], list[tuple[Tensor, Tensor, Tensor]]]:
        """Directions (c, n, d) at every block's input, head outputs held: block outputs, and queries, keys, values."""

        def function(step: Tensor) -> tuple[list[Tensor], list[tuple[Tensor, Tensor, Tensor]]]:
            outputs: dict[int, Tensor] = {}
            changes = self._apart(self._watching(outputs), step)
            recorder = AttentionRecorder(
                edits=self._held(None), keep=lambda _: frozenset({"queries", "keys", "values"})
            )
            self._replay(len(step), changes, recorder)
            calls = [recorder.calls[site.number] for site in self.sites]
            parts = [(call.query, call.key, call.value) for call in calls]
            return [outputs[i] for i in range(len(self.sites))], parts  # type: ignore[return-value]

        states, parts = self._pushed(function, tangents)
        return states, parts

    def reactions(self, tangents: Tensor) -> list[Moved]:
        """Directions (c, n, d) at every block's input: how its queries, keys and weights move."""

        def function(step: Tensor) -> list[Moved]:
            changes = self._apart({}, step)
            recorder = AttentionRecorder(
                edits=self._held(None), keep=lambda _: frozenset({"queries", "keys", "attention"})
            )
            self._replay(len(step), changes, recorder)
            calls = [recorder.calls[site.number] for site in self.sites]
            return [(call.query, call.key, call.weights) for call in calls]  # type: ignore[misc]

        reactions: list[Moved] = self._pushed(function, tangents)
        return reactions

    def d_heads(self, tangents: Tensor) -> list[Tensor]:
        """Directions (c, head, n, d_v) at every block's head outputs, its input held → block outputs (c, n, d)."""

        def function(step: Tensor) -> list[Tensor]:
            outputs: dict[int, Tensor] = {}
            changes = self._apart(self._watching(outputs), None)
            recorder = AttentionRecorder(edits=self._held(step), keep=lambda _: frozenset())
            self._replay(len(step), changes, recorder)
            return [outputs[i] for i in range(len(self.sites))]

        states: list[Tensor] = self._pushed(function, tangents)
        return states

    def _pushed(self, function: Callable[[Tensor], Any], tangents: Tensor) -> Any:
        """The derivative of `function` along each tangent."""
        with _one_at_a_time:
            return _mapped(function, tangents)

    def caps(self) -> list[Cap | None]:
        """The soft cap on each layer's scores, where there is one."""
        recorder = AttentionRecorder(keep=lambda _: frozenset())
        self._replay(1, {}, recorder)
        return [recorder.calls[site.number].cap for site in self.sites]

    def _replay(
        self, size: int, changes: Mapping[Handle, TensorChange], recorder: AttentionRecorder, gradients: bool = False
    ) -> None:
        with lock_of(self.model.model), plain_experts(self.model.model):
            replay(
                self.model,
                self.proof,
                repeated(self.inputs, size),
                size,
                changes,
                recorder=recorder,
                gradients=gradients,
            )

    def _watching(self, outputs: dict[int, Tensor]) -> dict[Handle, TensorChange]:
        changes: dict[Handle, TensorChange] = {}
        for i, site in enumerate(self.sites):
            end = block_handles(site)[1]
            changes[end] = _then(changes.get(end), _keeping(outputs, i))
        return changes

    def _held(self, step: Tensor | None) -> dict[int, list[Edit]]:
        """Head outputs put back to what they were, with the direction added where there is one."""

        def hold(i: int) -> Callable[[Tensor], Tensor]:
            constant = self.layers[i].outputs[None]
            return lambda z: constant.to(z).expand_as(z) if step is None else constant.to(z) + step

        return {site.number: [Edit(output=hold(i))] for i, site in enumerate(self.sites)}


def no_forward_mode(problem: RuntimeError) -> bool:
    """Whether torch refused because an operation has a backward of its own and no forward mode, of the old or new kind."""
    return "setup_context" in str(problem) or "jvp" in str(problem) or isinstance(problem, NotImplementedError)


def _keeping(outputs: dict[int, Tensor], i: int) -> TensorChange:
    """Note the tensor down under `i`, the first time it comes by."""
    return lambda tensor: outputs.setdefault(i, tensor)


def _then(before: TensorChange | None, after: TensorChange) -> TensorChange:
    return after if before is None else lambda t: after(before(t))


def _mapped(function: Callable[[Tensor], Any], tangents: Tensor) -> Any:
    """The derivative of `function` at 0 along each tangent (c, …), c first in every result.

    Directions are mapped over with the model's own numbers computed once. Where the model, or the way it is overheard,
    looks at its numbers to decide what to do, or writes into what it was given, that is not possible: the sequence is
    then repeated in a batch.
    """

    def along(tangent: Tensor, zero: Tensor) -> Any:
        return torch.func.jvp(function, (zero,), (tangent,))[1]

    try:
        # `zero` must be created outside vmap, otherwise every later tensor would be batched too.
        zero = torch.zeros_like(tangents[:1])
        made = torch.func.vmap(along, in_dims=(0, None))(tangents[:, None], zero)
    except RuntimeError as problem:
        if no_forward_mode(problem):  # a batch would not help
            raise
        return along(tangents, torch.zeros_like(tangents))
    return tree_map(lambda t: t[:, 0], made)
