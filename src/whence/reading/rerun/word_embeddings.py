"""The word embeddings of a text, and whether they, not what the first block reads, are the states of single tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from whence.core.numerics.tolerances import SAME_STATE
from whence.errors import InputError, WiringError
from whence.model.load import Model
from whence.reading.capture.attach import accepted, picking_up
from whence.reading.capture.own_hooks import on_leave
from whence.reading.capture.untouched import evaluating
from whence.reading.rerun.replay import block_handles
from whence.reading.rerun.run import on_device
from whence.reading.rerun.touching import touching
from whence.reading.trace import Stack, Trace
from whence.reading.wiring.handles import Handle
from whence.reading.wiring.proof import Proof


def word_embedding(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[nn.Module, Tensor]:
    """The layer that turns this text's ids into vectors, and what it gives, (1, n, d)."""
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor):
        raise InputError("gradient and perturbation methods explain texts: these inputs have no input_ids.")
    layers: list[tuple[nn.Module, Tensor]] = []

    def watch(module: nn.Module, args: Any, _kwargs: Any, output: Any) -> None:
        given = args[0] if args else None
        if layers or not isinstance(given, Tensor) or not isinstance(output, Tensor) or output.dim() != 3:
            return
        if given.dtype == ids.dtype and given.shape == ids.shape == output.shape[:2] and torch.equal(given, ids):
            layers.append((module, output.detach()))  # the innermost layer is the first to be done

    hooks = [on_leave(module, watch) for module in model.modules()]
    try:
        with evaluating(model), torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if not layers:
        raise InputError("no layer of the model turns the token ids into vectors, so gradients cannot be read there.")
    return layers[0]


def word_start(trace: Trace, model: Model, proof: Proof, stack: Stack) -> Handle | None:
    """The word embeddings, where a state-space or convolution layer mixes tokens before the first block with attention.

    What that block reads is then no embedding of one token. Measured: one token's word embedding is moved, and the other
    rows of the block's input are looked at. None: they stay, and the block's input is where directions start.
    """
    if trace.mixes is None:
        return None
    first = block_handles(proof.of(stack.name)[0])[0]
    inputs = accepted(model.model, on_device(model, trace.inputs))
    module, embedded = word_embedding(model.model, inputs)
    name = next(name for name, candidate in model.model.named_modules() if candidate is module)
    words = Handle(name, 0, "out", (), False)

    def read(move: Tensor) -> Tensor:
        changes = {words: lambda t: t + move}
        with evaluating(model.model), picking_up(model.model, [first]) as states, touching(model.model, changes):
            model.model(**inputs)
        return states[first][0].detach()

    n = embedded.shape[1]
    still = read(torch.zeros_like(embedded))
    for at in {0, n - 1}:
        move = torch.zeros_like(embedded)
        move[:, at] = embedded[:, at].roll(1, -1)
        change = (read(move) - still).abs().amax(-1)
        own = change[at].clone()
        change[at] = 0
        if float(change.max()) > SAME_STATE * float(own):
            if embedded.shape[-1] != still.shape[-1]:
                raise WiringError(
                    f"tokens mix before the first block with attention, and the word embeddings ({embedded.shape[-1]} numbers) "
                    f"have another width than its states ({still.shape[-1]}): there is no state of one token to start from."
                )
            return words
    return None
