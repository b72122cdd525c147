"""The methods of `whence.contributions`, each on a trace: which matrix per layer, and what it needs."""

# ruff: noqa: ARG001 - a plan is made for a trace, whether it looks at it or not
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from whence.core.attention.effective_attention import effective_attention
from whence.errors import InputError, WiringError
from whence.mixing.alti import alti as alti_of
from whence.mixing.alti import normalise_rows
from whence.mixing.alti_logit import alti_logit
from whence.mixing.contributions import EMBEDDINGS, Contributions
from whence.mixing.decomposition import Decomposition, apart, decompose
from whence.mixing.decompx import decompx
from whence.mixing.flow import flow as flow_of
from whence.mixing.layerwise import Matrix, Plan, layerwise, of_stack, single
from whence.mixing.norms import part_norms
from whence.mixing.progress import Progress, bar
from whence.mixing.value_zeroing import value_zeroing
from whence.reading.inputs import Prepared
from whence.reading.rerun.run import prove_model
from whence.reading.trace import Layer, Trace
from whence.reading.wiring.block_tail import feedforward_of


@layerwise
def attention(trace: Trace, *, attention: str | None = None) -> Plan:
    """The mean over heads of the attention weights, as they are; `.rollout()` multiplies them without a residual."""
    return Plan("attention", lambda layer, _: (_weights(layer).mean(-3), None), {}, attention, both=False)


@layerwise
def effective(trace: Trace, *, constraint: str = "simplex", attention: str | None = None) -> Plan:
    """The mean over heads of effective attention (Brunner et al. 2020): what the head outputs depend on.

    constraint "simplex": rows keep their sum; "output": the paper's A⊥. Entries may be negative.
    """
    matrix: Matrix = lambda layer, _: (_effective(layer, constraint).mean(0), None)  # noqa: E731
    return Plan("effective", matrix, {"constraint": constraint}, attention, both=False, batched=False)


@layerwise
def rollout(trace: Trace, *, attention: str | None = None) -> Plan:
    """C = ½ (mean over heads of A) + ½ I (Abnar & Zuidema 2020); `.rollout()` is attention rollout."""
    return Plan("rollout", lambda layer, crossed: (_half(_weights(layer), crossed), None), {}, attention)


@layerwise
def effective_rollout(trace: Trace, *, constraint: str = "simplex", attention: str | None = None) -> Plan:
    """Rollout with effective attention in place of attention."""
    matrix: Matrix = lambda layer, crossed: (_half(_effective(layer, constraint), crossed), None)  # noqa: E731
    return Plan("effective-rollout", matrix, {"constraint": constraint}, attention, batched=False)


def flow(
    trace: Trace, *, layers: Sequence[int] | None = None, attention: str | None = None, progress: Progress = False
) -> Contributions:
    """Attention flow (Abnar & Zuidema 2020) from the embeddings, rows divided by their sums.

    n² maximum flows per layer: `layers` limits it to those that are wanted.
    """
    trace.follow("attention flow")
    stack = single(trace, attention, "flow")
    capacities = torch.stack([_half(_weights(layer), False) for layer in stack])
    chosen = [layer.index for layer in stack] if layers is None else [stack[i].index for i in layers]
    with bar("attention flow", len(chosen) * len(stack.tokens), progress) as step:
        values = flow_of(capacities, chosen, step)
    values = values / values.sum(-1, keepdim=True)
    return of_stack(trace, "flow", stack, values, {"origin": EMBEDDINGS}, layers=tuple(chosen))


@layerwise
def norms(trace: Trace, *, residual: bool = True, attention: str | None = None) -> Plan:
    """‖T_ij‖₂ with rows divided by their sums.

    residual=True: with residual and norm (Kobayashi et al. 2021). False: ‖Σ_h A V W‖, attention only (2020).
    """

    def matrix(layer: Layer, crossed: bool) -> tuple[Tensor, Tensor]:
        split = decompose(layer, crossed=crossed)
        if not residual:
            split = replace(split, weight=layer.projection.weight.detach().to(split.weight), scale=None)
        return normalise_rows(part_norms(split, residual=residual), crossed=crossed)

    return Plan("norms", matrix, {"residual": residual}, attention, both=residual)


@layerwise
def alti(
    trace: Trace,
    *,
    distance: str = "l1",
    second_norm: bool = False,
    attention: str | None = None,
    model: Any = None,
) -> Plan:
    """ALTI (Ferrando et al. 2022): C_ij ∝ max(0, ‖y_i‖ − ‖y_i − T_ij‖); for encoder–decoders ALTI+.

    distance: "l1" (the paper's) or "l2". second_norm: compare after the block's second norm, with L₂(T_ij)/σ₂ against
    the block's own output (the feed-forward part belongs to no token).
    """
    if distance not in ("l1", "l2"):
        raise InputError(f"distance={distance!r} is not 'l1' or 'l2'.")
    settings = {"distance": distance, "second_norm": second_norm}
    if not second_norm:
        return Plan("alti", lambda la, crossed: alti_of(decompose(la, crossed=crossed), distance), settings, attention)
    stack = single(trace, attention, "alti after the second norm").name
    onward = _after_second_norm(trace, model, stack)
    return Plan("alti", lambda layer, _: alti_of(onward(layer), distance), settings, stack, both=False)


@layerwise
def globenc(trace: Trace, *, attention: str | None = None, model: Any = None) -> Plan:
    """GlobEnc (Modarressi et al. 2022): ‖L₂(T_ij)/σ₂‖₂, rolled out as published, without dividing rows by their sums.

    The feed-forward layer counts only through σ₂. In a pre-norm block nothing comes after the add, and L₂ is left out.
    """
    stack = single(trace, attention, "globenc").name
    onward = _after_second_norm(trace, model, stack)
    return Plan("globenc", lambda layer, _: (part_norms(onward(layer)), None), {"normalised": False}, stack, both=False)


METHODS: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "effective": effective,
    "rollout": rollout,
    "effective-rollout": effective_rollout,
    "flow": flow,
    "norms": norms,
    "alti": alti,
    "globenc": globenc,
    "value-zeroing": value_zeroing,
    "decompx": decompx,
    "alti-logit": alti_logit,
}


# -- the parts they share ------------------------------------------------------------------------------------------


def _weights(layer: Layer) -> Tensor:
    attention = layer.attention.detach()
    return attention if attention.dtype in (torch.float32, torch.float64) else attention.float()


def _effective(layer: Layer, constraint: str) -> Tensor:
    values = layer.values.detach().to(_weights(layer).dtype)
    return effective_attention(_weights(layer), values, constraint=constraint, visible=layer.visible)  # type: ignore[arg-type]


def _half(attention: Tensor, crossed: bool) -> Tensor:
    """½ A + ½ I; crossed: the residual is a column of its own, after the keys."""
    mean = 0.5 * attention.mean(-3)
    if crossed:
        return torch.cat([mean, mean.new_full((*mean.shape[:-1], 1), 0.5)], dim=-1)
    return mean + 0.5 * torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)


def _after_second_norm(trace: Trace, model: Any, stack: str) -> Callable[[Layer], Decomposition]:
    """A layer's parts as the block's second norm passes them on: by the sum that the trace kept, else by the model."""

    def onward(layer: Layer) -> Decomposition:
        split = decompose(layer)
        norm, before = layer.second_norm, layer._before_second_norm
        if norm is not None and before is not None:
            made = split.through(norm, before.detach().to(split.state))
            _check(layer, made.state)
            return made
        chosen = trace.with_model(model)
        proof = prove_model(chosen, Prepared(dict(trace.inputs), trace.tokens))
        rest = feedforward_of(chosen, proof, trace.inputs, stack, layer.index)
        if rest.norm is None:
            return split
        return split.through(rest.norm, rest.before_norm(split.state), rest.residual_scale)

    return onward


def _check(layer: Layer, state: Tensor) -> None:
    """The second norm of what was kept must be the block's output, on this very text."""
    if layer._block_output is None:
        return
    error, tolerance = apart(state, layer._block_output)
    if not error <= tolerance:
        raise WiringError(
            f"layer {layer.index}: its second norm misses the block's output by {error:.1e} (tolerance {tolerance:.0e})."
        )
