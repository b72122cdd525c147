"""Which final states does a head read, and how much of each? Measured, not assumed.

The head's Jacobian by row, J_i = ∂logits/∂s_i at the final states s, says how much each row counts: row i gets
‖J_i‖_F / Σ_k ‖J_k‖_F, which is 1 for [CLS] or the last position alone, 1/n for mean pooling, 0 for rows that are left
out. It is then proved by intervention: rows that count for nothing are moved, and the logits must stay; the row that
counts most is moved, and they must change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whence.core.numerics.tolerances import UNREAD, state_agreement
from whence.errors import WiringError
from whence.model.load import Model
from whence.model.memory import lock_of
from whence.reading.capture.attach import accepted
from whence.reading.capture.own_hooks import on_leave
from whence.reading.capture.untouched import evaluating
from whence.reading.rerun.run import on_device
from whence.reading.trace import Stack, Trace

EXACT_OUTPUTS = 16
"""Up to this many logits the Jacobian is taken whole; of more, this many random combinations."""


def read_out(model: Model, trace: Trace, stack: Stack, position: int | None) -> Tensor:
    """[token], float64, summing to 1. position: which row of the logits; None: there is one for the whole text."""
    last = stack.layers[-1]._block_output
    final = trace.final_states if trace.final_states is not None else last
    n = len(stack.tokens)
    if final is None or final.shape[0] != n:
        raise _unseen(model, "its final states are not one per token")
    with lock_of(model.model), evaluating(model.model):
        slope, plain, coarse = _slopes(model, trace, final, position)
        weights = slope.norm(dim=-1)
        weights = torch.where(weights > weights.max() * UNREAD * (100 if coarse else 1), weights, 0.0)
        if not bool(weights.sum() > 0):
            raise _unseen(model, "no final state moves its logits")
        _prove(model, trace, final, position, weights, plain)
    return weights / weights.sum()


def _slopes(model: Model, trace: Trace, final: Tensor, position: int | None) -> tuple[Tensor, Tensor, bool]:
    """[token, output · d]: the Jacobian of the logits by row; the logits; and whether they are in half precision."""
    step = torch.zeros(1, *final.shape, dtype=final.dtype, device=model.device, requires_grad=True)
    logits = _run(model, trace, final, lambda t: t + step)
    with torch.enable_grad():
        logits = logits[0] if position is None else logits[0, position]
    if len(logits) <= EXACT_OUTPUTS:
        along = torch.eye(len(logits))
    else:
        along = torch.randn(EXACT_OUTPUTS, len(logits), generator=torch.Generator().manual_seed(0))
    rows = [torch.autograd.grad(logits, step, v.to(logits), retain_graph=True)[0][0] for v in along]
    slopes = torch.stack([row.detach().double().cpu() for row in rows], dim=1).flatten(1)
    return slopes, logits.detach().double(), logits.dtype not in (torch.float32, torch.float64)


def _prove(model: Model, trace: Trace, final: Tensor, position: int | None, weights: Tensor, outputs: Tensor) -> None:
    """Move the rows that are not read, all at once, and then the one that is read most."""
    noise = torch.randn(final.shape, generator=torch.Generator().manual_seed(1)).to(final) * final.abs().mean()
    for rows, read in ((weights == 0, False), (weights == weights.max(), True)):
        if not bool(rows.any()):
            continue
        moved = torch.where(rows[:, None].to(final.device), noise, torch.zeros_like(noise))
        with torch.no_grad():
            logits = _run(model, trace, final, partial(_add, moved))
        logits = (logits[0] if position is None else logits[0, position]).double()
        change = float((logits - outputs.to(logits)).abs().max() / outputs.abs().max().clamp(min=1e-30))
        if (change > state_agreement(torch.float32)) is not read:
            raise _unseen(
                model,
                f"moving {'the row that counts most' if read else 'rows that count for nothing'} changed the logits by "
                f"{change:.1e}",
            )


def _add(step: Tensor, states: Tensor) -> Tensor:
    return states + step.to(states)


def _unseen(model: Model, why: str) -> WiringError:
    return WiringError(f"{model.name}: which final states its head reads cannot be measured: {why}.")


def _run(model: Model, trace: Trace, final: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The logits with the final states changed as they leave the module that makes them."""
    inputs = accepted(model.model, on_device(model, trace.inputs))
    with torch.no_grad(), _changed(model.model, final, change) as done:
        logits: Tensor = model.model(**inputs).logits
    if not done:
        raise _unseen(model, "no module hands over its final states")
    return logits


@contextmanager
def _changed(model: nn.Module, final: Tensor, change: Callable[[Tensor], Tensor]) -> Iterator[list[nn.Module]]:
    """While the block runs, the first module to give the final states, known by their value, gives them changed.

    What comes after it is followed by autograd; what comes before is not, so that its activations need not be kept.
    """
    done: list[nn.Module] = []
    tolerance = state_agreement(final.dtype)
    size = float(final.abs().max())

    def same(tensor: Any) -> str | None:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return None
        for name, shape in (
            ("tokens second", (1, *final.shape)),
            ("tokens first", (final.shape[0], 1, final.shape[1])),
        ):
            if tensor.shape == shape and final.shape[0] > 1:
                rows = tensor[0] if name == "tokens second" else tensor[:, 0]
                if float((rows - final.to(rows)).abs().max()) <= tolerance * size:
                    return name
        if tensor.shape == (1, *final.shape) and float((tensor[0] - final.to(tensor)).abs().max()) <= tolerance * size:
            return "tokens second"
        return None

    def put(tensor: Tensor, order: str) -> Tensor:
        torch.set_grad_enabled(True)
        changed = change(tensor.detach() if order == "tokens second" else tensor.detach().transpose(0, 1))
        return changed if order == "tokens second" else changed.transpose(0, 1)

    def hook(module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
        if done:
            return None
        first = output[0] if isinstance(output, tuple) and output else output
        order = same(first)
        if order is None:
            return None
        done.append(module)
        changed = put(first, order)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    hooks = [on_leave(module, hook) for module in model.modules()]
    try:
        yield done
    finally:
        for each in hooks:
            each.remove()
