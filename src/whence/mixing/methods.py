"""The methods of `whence.contributions`, each on a trace: which matrix per layer, and what it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from whence.core.effective_attention import effective_attention
from whence.errors import InputError
from whence.mixing.alti import alti as alti_of
from whence.mixing.alti import normalise_rows
from whence.mixing.alti_logit import alti_logit
from whence.mixing.contributions import EMBEDDINGS, LAYER, Contributions
from whence.mixing.decomposition import Decomposition, decompose
from whence.mixing.decompx import decompx
from whence.mixing.encoder_decoder import together
from whence.mixing.flow import flow as flow_of
from whence.mixing.mixture import check_rows
from whence.mixing.norms import part_norms
from whence.mixing.progress import bar
from whence.mixing.value_zeroing import value_zeroing
from whence.reading.feedforward import FeedForward, feedforward_of
from whence.reading.inputs import Prepared
from whence.reading.proof import Proof
from whence.reading.run import prove_model
from whence.reading.trace import Layer, Stack, Trace

Matrix = Callable[[Layer, bool], tuple[Tensor, int]]
"""One layer (and whether its keys are other tokens than its queries) → (query, source) and the degenerate rows."""


def attention(trace: Trace, *, attention: str | None = None) -> Contributions:
    """The mean over heads of the attention weights, as they are; `.rollout()` multiplies them without a residual."""
    return _one(trace, "attention", attention, lambda layer, _: (_weights(layer).mean(0), 0), {})


def effective(trace: Trace, *, constraint: str = "simplex", attention: str | None = None) -> Contributions:
    """The mean over heads of effective attention (Brunner et al. 2020): what the head outputs depend on.

    constraint "simplex": rows keep their sum; "output": the paper's A⊥. Entries may be negative.
    """
    matrix: Matrix = lambda layer, _: (_effective(layer, constraint).mean(0), 0)  # noqa: E731
    return _one(trace, "effective", attention, matrix, {"constraint": constraint})


def rollout(trace: Trace, *, attention: str | None = None) -> Contributions:
    """C = ½ (mean over heads of A) + ½ I (Abnar & Zuidema 2020); `.rollout()` is attention rollout."""
    return _any(trace, "rollout", attention, lambda layer, crossed: (_half(_weights(layer), crossed), 0), {})


def effective_rollout(trace: Trace, *, constraint: str = "simplex", attention: str | None = None) -> Contributions:
    """Rollout with effective attention in place of attention."""
    matrix: Matrix = lambda layer, crossed: (_half(_effective(layer, constraint), crossed), 0)  # noqa: E731
    return _any(trace, "effective-rollout", attention, matrix, {"constraint": constraint})


def flow(
    trace: Trace, *, layers: Sequence[int] | None = None, attention: str | None = None, progress: bool = False
) -> Contributions:
    """Attention flow (Abnar & Zuidema 2020) from the embeddings, rows divided by their sums.

    n² maximum flows per layer: `layers` limits it to those that are wanted.
    """
    stack = _single(trace, attention, "flow")
    capacities = torch.stack([_half(_weights(layer), False) for layer in stack])
    chosen = [layer.index for layer in stack] if layers is None else [stack[i].index for i in layers]
    with bar("attention flow", len(chosen) * len(stack.tokens), progress) as step:
        values = flow_of(capacities, chosen, step)
    values = values / values.sum(-1, keepdim=True)
    return _result(trace, "flow", stack, values, {"origin": EMBEDDINGS}, layers=tuple(chosen))


def norms(trace: Trace, *, residual: bool = True, attention: str | None = None) -> Contributions:
    """‖T_ij‖₂ with rows divided by their sums.

    residual=True: with residual and norm (Kobayashi et al. 2021). False: ‖Σ_h A V W‖, attention only (2020).
    """

    def matrix(layer: Layer, crossed: bool) -> tuple[Tensor, int]:
        split = decompose(layer, crossed=crossed)
        if not residual:
            split = _attention_part(layer, split)
        return normalise_rows(part_norms(split, residual=residual), crossed=crossed)

    run = _any if residual else _one
    return run(trace, "norms", attention, matrix, {"residual": residual})


def alti(
    trace: Trace,
    *,
    distance: str = "l1",
    second_norm: bool = False,
    attention: str | None = None,
    model: Any = None,
) -> Contributions:
    """ALTI (Ferrando et al. 2022): C_ij ∝ max(0, ‖y_i‖ − ‖y_i − T_ij‖); for encoder–decoders ALTI+.

    distance: "l1" (the paper's) or "l2". second_norm: compare after the block's second norm, with L₂(T_ij)/σ₂ against
    the block's own output (the feed-forward part belongs to no token).
    """
    if distance not in ("l1", "l2"):
        raise InputError(f"distance={distance!r} is not 'l1' or 'l2'.")
    settings = {"distance": distance, "second_norm": second_norm}
    if not second_norm:
        return _any(trace, "alti", attention, lambda la, x: alti_of(decompose(la, crossed=x), distance), settings)
    blocks = _Blocks(trace, model, _single(trace, attention, "alti after the second norm"))
    matrix: Matrix = lambda layer, _: alti_of(blocks.after_second_norm(layer), distance)  # noqa: E731
    return _one(trace, "alti", attention, matrix, settings)


def globenc(trace: Trace, *, attention: str | None = None, model: Any = None) -> Contributions:
    """GlobEnc (Modarressi et al. 2022): ‖L₂(T_ij)/σ₂‖₂, rolled out as published, without dividing rows by their sums.

    The feed-forward layer counts only through σ₂. In a pre-norm block nothing comes after the add, and L₂ is left out.
    """
    blocks = _Blocks(trace, model, _single(trace, attention, "globenc"))
    matrix: Matrix = lambda layer, _: (part_norms(blocks.after_second_norm(layer)), 0)  # noqa: E731
    return _one(trace, "globenc", attention, matrix, {"normalised": False})


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
    mean = 0.5 * attention.mean(0)
    if crossed:
        return torch.cat([mean, mean.new_full((mean.shape[0], 1), 0.5)], dim=1)
    return mean + 0.5 * torch.eye(mean.shape[0], dtype=mean.dtype, device=mean.device)


def _attention_part(layer: Layer, split: Decomposition) -> Decomposition:
    """The parts before any norm: A V W alone."""
    from dataclasses import replace

    weight = layer.projection.weight.detach().to(split.sources)
    sources = torch.bmm(layer.values.detach().to(split.sources), weight)
    return replace(split, sources=sources, scale=None, own=torch.zeros_like(split.own))


class _Blocks:
    """The feed-forward parts of a trace's blocks, found once."""

    def __init__(self, trace: Trace, model: Any, stack: Stack) -> None:
        self.model = trace.with_model(model)
        self.inputs: Mapping[str, Tensor] = trace.inputs
        self.proof: Proof = prove_model(self.model, Prepared(dict(trace.inputs), trace.tokens))
        self.stack = stack

    def feedforward(self, layer: Layer) -> FeedForward:
        return feedforward_of(self.model, self.proof, self.inputs, self.stack.name, layer.index)

    def after_second_norm(self, layer: Layer) -> Decomposition:
        """The attention's parts as the block's second norm passes them on."""
        split = decompose(layer)
        rest = self.feedforward(layer)
        if rest.norm is None:
            return split
        before = rest.before_norm(split.state)
        return split.through(rest.norm, before, rest.norm(before))


def _single(trace: Trace, attention: str | None, name: str) -> Stack:
    """The one stack that a method of a single stack reads."""
    if attention is None and len(trace.stacks) > 1:
        raise InputError(
            f"{name} reads one stack, and this trace has {', '.join(trace.stacks)}: choose attention='encoder' or 'decoder'."
        )
    stack = trace.of(attention)
    if stack.name == "cross":
        raise InputError(
            "cross-attention is read together with its decoder: leave attention= out (alti, norms, rollout)."
        )
    return stack


def _one(trace: Trace, name: str, attention: str | None, matrix: Matrix, settings: Mapping[str, Any]) -> Contributions:
    stack = _single(trace, attention, name)
    found = [matrix(layer, False) for layer in stack]
    values = check_rows(torch.stack([m for m, _ in found]), name)
    degenerate = torch.tensor([count for _, count in found])
    return _result(trace, name, stack, values, {"origin": LAYER, **settings}, degenerate=degenerate)


def _any(trace: Trace, name: str, attention: str | None, matrix: Matrix, settings: Mapping[str, Any]) -> Contributions:
    """One stack, or an encoder and its decoder together."""
    if attention is not None or len(trace.stacks) == 1:
        return _one(trace, name, attention, matrix, settings)
    return together(trace, name, matrix, {"origin": LAYER, **settings})


def _result(
    trace: Trace,
    name: str,
    stack: Stack,
    values: Tensor,
    settings: Mapping[str, Any],
    *,
    layers: tuple[int, ...] | None = None,
    degenerate: Tensor | None = None,
) -> Contributions:
    return Contributions(
        values=values,
        axes=("layer", "hidden", "input"),
        tokens=stack.tokens,
        provenance=trace.provenance.by(name, attention=stack.name, **settings),
        layers=layers if layers is not None else tuple(layer.index for layer in stack),
        extra={} if degenerate is None else {"degenerate": degenerate},
    )
