"""Run a proved model with every block cut loose from the one before: each reads the state it was traced with.

Whatever is changed in one block (a value set to zero, a direction to be followed) then shows in that block's output
and nowhere else, so that one pass answers for all layers at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from whence.errors import WiringError
from whence.model.load import Model
from whence.reading.capture.attach import accepted, attached
from whence.reading.capture.recorder import AttentionRecorder, Edit
from whence.reading.rerun.run import on_device
from whence.reading.rerun.touching import TensorChange, touching
from whence.reading.wiring.handles import Handle
from whence.reading.wiring.proof import Proof
from whence.reading.wiring.sites import AttentionSite


def block_handles(site: AttentionSite) -> tuple[Handle, Handle]:
    """Where a block's input and output are seen; refused where they are not."""
    block_input = None if site.proved_wiring is None or site.state_handles is None else site.state_handles.residual
    if block_input is None:
        raise WiringError(
            f"{site.stack} layer {site.layer}: its wiring is not proved ({site.reason_b or site.reason_c})."
        )
    if not block_input.onward:
        raise WiringError(f"{site.stack} layer {site.layer}: no module passes on the state that the block reads.")
    if site.block_output is None:
        raise WiringError(f"{site.stack} layer {site.layer}: no module shows the state after the block.")
    return block_input, site.block_output


def replay(
    model: Model,
    proof: Proof,
    batch: Mapping[str, Tensor],
    size: int,
    changes: Mapping[Handle, TensorChange],
    *,
    edits: Mapping[int, Sequence[Edit]] | None = None,
    recorder: AttentionRecorder | None = None,
    gradients: bool = False,
) -> Any:
    """One forward pass with `changes` in place; the model's output. `gradients`: ready for backward passes."""
    inputs = accepted(model.model, on_device(model, batch))
    inputs.pop("output_hidden_states", None)
    recorder = recorder if recorder is not None else AttentionRecorder(edits=edits or {}, keep=lambda _: frozenset())
    with ExitStack() as stack:
        stack.enter_context(attached(model.model, proof.capture, recorder, size))
        stack.enter_context(touching(model.model, changes))
        stack.enter_context(torch.set_grad_enabled(gradients or torch.is_grad_enabled()))
        return model.model(**inputs)


def repeated(inputs: Mapping[str, Tensor], times: int) -> dict[str, Tensor]:
    """The same sequence `times` times in a batch."""
    return {name: t.expand(times, *t.shape[1:]) if t.shape[0] == 1 else t for name, t in inputs.items()}


__all__ = ["TensorChange", "block_handles", "repeated", "replay", "touching"]
