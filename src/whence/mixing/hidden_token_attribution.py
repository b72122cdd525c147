"""Hidden token attribution: how strongly does each hidden state react to each input embedding?

Brunner et al., "On Identifiability in Transformers" (ICLR 2020), section 5: with J_ij^l = ∂e_j^l/∂x_i (d × d),

    c_ij^l = ‖J_ij^l‖_F / Σ_k ‖J_kj^l‖_F,     stored as values[l, j, i], so that rows sum to 1 like attention's.

Forward mode: a direction at one input token is followed through all layers in one sweep (`whence.mixing.jacobian.fold`).
Exact: d directions per token. Probes: k orthonormal directions q_c per token, and (d/k) Σ_c ‖J q_c‖² is an unbiased
estimate of ‖J‖_F² (Hutchinson); the standard errors of the shares follow by the delta method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from scipy.special import stdtrit
from torch import Tensor

from whence.core.numerics.tolerances import SAME_STATE, state_agreement
from whence.errors import InputError, WiringError
from whence.mixing.budget import as_bytes
from whence.mixing.jacobian.sweep import Sweep, columns, prepare, run
from whence.mixing.mixture import Mixture, check_rows
from whence.mixing.raised import in_float32
from whence.model.load import Model
from whence.reading.capture.attach import accepted
from whence.reading.capture.own_hooks import on_enter, on_leave
from whence.reading.capture.untouched import evaluating
from whence.reading.rerun.run import on_device
from whence.reading.trace import Stack, Trace
from whence.reading.wiring.norms import Norm, recognise
from whence.reading.wiring.op_graph import deviation
from whence.results.declared import Array
from whence.results.progress import Progress, counted

EXACT_LENGTH = 24
"""Up to this many tokens mode="auto" is exact: beyond, probes."""


@dataclass(frozen=True)
class HiddenTokenAttribution(Mixture):
    """`values` [layer, hidden, input] (of="states") or [layer, head, hidden, input] (of="heads"); rows sum to 1.

    `extra`: "squared", the (estimated) squared Frobenius norms; with probes also "squared_error", their standard errors,
    and "error": `values` ± 1.96 error covers the exact share in 95 % of runs. With k probes the standard error is itself
    an estimate, so that it is widened by Student's t with k − 1 degrees of freedom.
    """

    kind: ClassVar[str] = "hidden-token-attribution"
    arrays: ClassVar[Mapping[str, Array]] = {
        "values": Array("layer hidden input | layer head hidden input"),
        "squared": Array("*"),
        **dict.fromkeys(("squared_error", "error"), Array("*", needed=False)),
    }

    @property
    def exact(self) -> bool:
        return bool(self.provenance.settings["mode"] == "exact")

    def rollout(self) -> HiddenTokenAttribution:
        """Itself: it already reaches back to the embeddings."""
        return self

    @property
    def error(self) -> Tensor | None:
        """Standard errors of the shares, widened so that ± 1.96 of them cover 95 %; None where they are exact."""
        return self.extra.get("error")


def hidden_token_attribution(
    trace: Trace,
    mode: str = "auto",
    probes: int = 16,
    norm: str = "frobenius",
    *,
    of: str = "states",
    embeddings: str = "after",
    attention: str | None = None,
    seed: int = 0,
    memory: str | float = "2GB",
    progress: Progress = False,
    model: Any = None,
) -> HiddenTokenAttribution:
    """How strongly each hidden token reacts to each input embedding, in every layer.

    mode: "exact", "probes", or "auto" (exact up to `EXACT_LENGTH` tokens; the result's settings say which it was).
    probes: orthonormal directions per input token. norm: "frobenius", the only one that is defined here: a gradient of
    the summed outputs, which some code uses, nearly vanishes after a LayerNorm.
    of: "states", every block's output, or "heads", every head's output (Pascual et al. 2021's global attention).
    embeddings: with respect to x "after" the embedding norm or "before" it; the same where the model has none, and
    refused where something else comes between that norm and the first block. Where tokens mix before the first block
    with attention (state-space layers, convolutions), x is the word embeddings, and the settings say "words".
    attention: "encoder" of an encoder–decoder. memory: what the sweep may hold at once.

    >>> import whence
    >>> trace = whence.trace(whence.load(), "The bank raised its rates.")
    >>> mixed = whence.hidden_token_attribution(trace, mode="probes", probes=4)
    >>> mixed.values.shape, mixed.error.shape
    (torch.Size([6, 8, 8]), torch.Size([6, 8, 8]))
    """
    for name, value, known in (
        ("mode", mode, ("auto", "exact", "probes")),
        ("norm", norm, ("frobenius",)),
        ("of", of, ("states", "heads")),
        ("embeddings", embeddings, ("after", "before")),
    ):
        if value not in known:
            raise InputError(f"{name}={value!r} is not one of {', '.join(map(repr, known))}.")
    if torch.is_inference_mode_enabled():
        raise InputError(
            "hidden token attribution takes derivatives, which torch.inference_mode() switches off for good: call it outside "
            "(torch.no_grad() does no harm)."
        )
    _stack(trace, attention)
    trace, chosen, raised = in_float32(trace, trace.with_model(model))
    stack = _stack(trace, attention)
    n, width = stack.layers[0].block_input.shape
    if mode == "auto":
        mode = "exact" if n <= EXACT_LENGTH else "probes"
    if mode == "probes" and not probes >= 2:
        raise InputError(f"probes={probes} is too few for a standard error: give at least 2.")
    count = width if mode == "exact" else min(probes, width)
    budget = as_bytes(memory)
    sweep = prepare(trace, chosen, stack, budget, count)
    if sweep.runner.words is not None:
        if embeddings == "before":
            raise InputError(
                f"embeddings='before': {chosen.name} mixes tokens before its first block with attention, so that attribution "
                "is to the word embeddings themselves. Leave embeddings= out."
            )
        embeddings = "words"
    before = _embedding_norm(trace, chosen, stack) if embeddings == "before" else None
    first, second = _squared(sweep, n, width, count, mode, seed, of == "heads", before, budget, progress)
    mean, error = _estimate(first, second, count, width)
    values, spread = _shares(mean, error)
    spread *= _widening(count)
    extra = {"squared": mean}
    if count < width:
        extra |= {"squared_error": error, "error": spread}
    settings: dict[str, Any] = {
        "mode": "exact" if count == width else "probes",
        "of": of,
        "norm": norm,
        "way": sweep.route,
    }
    settings |= {"embeddings": embeddings, "attention": stack.name, "origin": "embeddings"}
    if embeddings == "before":
        settings["embedding_norm"] = None if before is None else before[0].kind
    settings |= raised
    if count < width:
        settings |= {"probes": count, "seed": seed}
    axes = ("layer", "head", "hidden", "input") if of == "heads" else ("layer", "hidden", "input")
    provenance = trace.provenance.by("hidden-token-attribution", **settings)
    values = check_rows(values, "hidden token attribution")
    return HiddenTokenAttribution.of_stack(stack, values, provenance, axes=axes, extra=extra)


def _stack(trace: Trace, attention: str | None) -> Stack:
    stack = trace.of(attention)
    if stack.name == "cross" or (len(trace.stacks) > 1 and stack.name == "decoder"):
        raise InputError(
            "hidden token attribution reads an encoder, or a decoder of its own: choose attention='encoder'."
        )
    for layer in stack:
        if layer.wiring is None:
            raise WiringError(f"layer {layer.index}: its wiring is not proved ({layer.reason}).")
    read = stack.layers[0].block_input.shape[0]
    if read != len(stack.tokens) or any(layer.block_input.shape[0] != read for layer in stack):
        raise WiringError(
            f"the {stack.name} of this model reads {read} states first and {stack.layers[-1].block_input.shape[0]} last, "
            f"for {len(stack.tokens)} tokens: states that are pooled on the way are not one per token, so there is "
            "nothing to share out."
        )
    if tuple(layer.index for layer in stack) != tuple(range(len(stack))):
        raise InputError(
            "hidden token attribution follows every layer from 0 on: give the whole trace, and select afterwards."
        )
    return stack


def _squared(
    sweep: Sweep,
    n: int,
    width: int,
    count: int,
    mode: str,
    seed: int,
    heads: bool,
    before: tuple[Norm, Tensor] | None,
    budget: int,
    progress: Progress,
) -> tuple[Tensor, Tensor]:
    """Sums over directions of ‖J q‖² and ‖J q‖⁴: (layer, (head,) hidden, input) each, in float64."""
    layer = sweep.stack.layers[0]
    depth = len(sweep.stack)
    shape = (depth, layer.outputs.shape[0], n, n) if heads else (depth, n, n)
    first, second = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    size = columns(sweep, n, width, budget)
    generator = torch.Generator().manual_seed(seed)
    work = [(token, start, min(size, count - start)) for token in range(n) for start in range(0, count, size)]
    groups = _grouped(work, size)
    probes: dict[int, Tensor] = {}
    title = f"hidden token attribution, {mode}"
    with counted(title, len(groups), progress) as step:
        for group in groups:
            tangents, source = [], []
            for token, start, many in group:
                if token not in probes:  # tokens come in order, so that a seed gives the same probes for any budget
                    probes.clear()
                    probes[token] = _directions(width, count, generator)
                tangents.append(probes[token][start : start + many].to(layer.block_input))
                source += [token] * many
            at = torch.tensor(source)
            directions = torch.cat(tangents)
            if before is not None:
                directions = before[0].tangent(before[1][at], directions[:, None])[:, 0]
            for i, moved in enumerate(run(sweep, directions, at, heads)):
                square = moved.to(torch.float64).square().sum(-1) if moved.dtype == torch.float64 else _square(moved)
                square = square.to(first.device)
                if heads:
                    square = square.permute(2, 0, 1)  # (head, n, c)
                first[i].index_add_(-1, at, square)
                second[i].index_add_(-1, at, square.square())
            step()
    return first, second


def _square(moved: Tensor) -> Tensor:
    return torch.einsum("...d,...d->...", moved, moved).to(torch.float64)


def _directions(width: int, count: int, generator: torch.Generator) -> Tensor:
    """(count, d) orthonormal rows: the unit vectors for all d of them, else at random (uniform on the frames)."""
    if count == width:
        return torch.eye(width, dtype=torch.float64)
    q, r = torch.linalg.qr(torch.randn(width, count, generator=generator, dtype=torch.float64))
    rows: Tensor = (q * torch.diagonal(r).sign()).T
    return rows


def _grouped(work: list[tuple[int, int, int]], size: int) -> list[list[tuple[int, int, int]]]:
    """Pieces of work together up to `size` directions."""
    groups: list[list[tuple[int, int, int]]] = []
    for piece in work:
        if groups and sum(p[2] for p in groups[-1]) + piece[2] <= size:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


# -- from sums to shares -------------------------------------------------------------------------------------------


def _estimate(first: Tensor, second: Tensor, count: int, width: int) -> tuple[Tensor, Tensor]:
    """‖J‖_F² and its standard error. Orthonormal probes: k of d cost-free dimensions leave (1 − k/d) of the variance."""
    mean = first / count * width
    if count == width:
        return mean, torch.zeros_like(mean)
    variance = (second / count - (first / count).square()).clamp(min=0) * count / (count - 1)
    return mean, width * (variance / count * (1 - count / width)).sqrt()


def _widening(count: int) -> float:
    """t_{.975, k−1} / 1.96: what a standard error from k probes lacks to cover like a known one."""
    return float(stdtrit(count - 1, 0.975)) / 1.96


def _shares(squared: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """c and its standard error: a_i = √m_i, var a_i = var m_i / 4 m_i, and the delta method on a_i / Σ a."""
    length = squared.sqrt()
    total = length.sum(-1, keepdim=True)
    share = length / total
    variance = torch.where(squared > 0, error.square() / (4 * squared.clamp(min=torch.finfo(squared.dtype).tiny)), 0.0)
    rest = variance.sum(-1, keepdim=True) - variance
    spread = ((1 - share).square() * variance + share.square() * rest).sqrt() / total
    return share, spread


# -- before the embedding norm -------------------------------------------------------------------------------------


def _embedding_norm(trace: Trace, model: Model, stack: Stack) -> tuple[Norm, Tensor] | None:
    """The norm that gave the embeddings, with what it read, (n, d); None where there is none.

    Refused where the embeddings pass a norm and then something else (ALBERT's wider map): what comes before that norm
    has another width, and is not what the first block reads.
    """
    x = stack.layers[0].block_input
    norms: list[
        tuple[Norm, Tensor, bool]
    ] = []  # every norm up to the first block: with what it read, and whether it gave x
    reached: list[torch.nn.Module] = []

    def is_x(tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.shape == (1, *x.shape) and deviation(tensor[0], x) <= SAME_STATE

    def before(module: torch.nn.Module, args: Any, _kwargs: Any) -> None:
        if any(is_x(a) for a in args):
            reached.append(module)  # the first block is being read: what follows belongs to it

    def after(module: torch.nn.Module, args: Any, _kwargs: Any, output: Any) -> None:
        given = next((a for a in args if isinstance(a, Tensor) and a.is_floating_point()), None)
        if reached or given is None or not isinstance(output, Tensor) or given.shape != output.shape:
            return
        if output.dim() != 3 or output.shape[:2] != (1, x.shape[0]):
            return
        norm = recognise(module, given, output, state_agreement(torch.float32))
        if norm is not None:
            norms.append((norm, given[0].detach(), is_x(output)))

    hooks = []
    try:
        for module in model.model.modules():
            hooks += [on_enter(module, before), on_leave(module, after)]
        with evaluating(model.model):
            model.model(**accepted(model.model, on_device(model, trace.inputs)))
    finally:
        for hook in hooks:
            hook.remove()
    given_x = [(norm, given) for norm, given, gave in norms if gave]
    if not given_x and norms:
        raise InputError(
            f"embeddings='before': {model.name} puts its embeddings through a norm and then through something else before "
            "the first block reads them, so that there is no state of one norm less. Use embeddings='after'."
        )
    return given_x[0] if given_x else None
