"""ALTI-Logit: which input tokens pushed this logit, layer by layer and head by head?

Ferrando et al., "Explaining How Transformers Use Context to Build Predictions" (ACL 2023). In a pre-norm decoder the last
state is the embedding plus what every attention head and every feed-forward layer added, so a logit splits as

    logit_w(t) = u_w · L(x_t⁰)/σ + Σ_l Σ_h Σ_j u_w · L(A^h_tj V^h_j W^h)/σ + Σ_l u_w · L(ffn^l_t)/σ + biases

with L and σ the final norm's. What came through position j of layer l is followed back to the inputs by ALTI's rollout
of the layers below, R_{l−1}.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from whence.core.numerics.tolerances import RAISED_SUM, SAME_STATE, state_agreement
from whence.errors import InputError, WiringError
from whence.mixing.alti import alti
from whence.mixing.decomposition import decompose, working
from whence.mixing.prediction import choice
from whence.mixing.rollout import rollout
from whence.model.load import Model
from whence.model.memory import lock_of
from whence.reading.capture.attach import accepted
from whence.reading.capture.own_hooks import on_enter
from whence.reading.capture.untouched import evaluating
from whence.reading.rerun.run import on_device
from whence.reading.trace import Layer, Trace
from whence.reading.wiring.norms import Norm, recognise
from whence.reading.wiring.op_graph import deviation
from whence.results.declared import Array
from whence.results.result import Result

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class LogitContributions(Result):
    """`values` [layer, head, input]: what each head of each layer added to one logit from each input token.

    `extra`: "feedforward" [layer], "embedding" [1] (the token's own embedding, never mixed), "bias" [1] (output and norm
    biases), "logit" [1] and "direct" [layer, head, position of that layer], before the way back to the inputs. All but
    "direct" and `values` together add up to the logit.
    """

    kind: ClassVar[str] = "logit-contributions"
    arrays: ClassVar[Mapping[str, Array]] = {
        "values": Array("layer head input"),
        "feedforward": Array("layer"),
        **dict.fromkeys(("embedding", "bias", "logit"), Array("1")),
        "direct": Array("layer head input"),
    }

    def by_input(self) -> Tensor:
        """[input]: summed over layers and heads, the token's own embedding included."""
        total: Tensor = self.values.sum((0, 1))
        total[int(self.provenance.settings["position"])] += self.extra["embedding"][0]
        return total

    def by_layer(self) -> pd.DataFrame:
        """What attention and feed-forward layer of every layer added to the logit."""
        import pandas as pd

        attention = self.values.sum((1, 2)).tolist()
        return pd.DataFrame(
            {"layer": self.layers, "attention": attention, "feedforward": self.extra["feedforward"].tolist()}
        )


def alti_logit(
    trace: Trace,
    *,
    target: int | str | None = None,
    foil: int | str | None = None,
    position: int = -1,
    model: Any = None,
) -> LogitContributions:
    """Which inputs pushed the logit of `target` (a token or its id; None: the model's own first choice) at `position`.

    foil: the difference of the target's logit and this token's is shared out instead.
    """
    if len(trace.stacks) > 1 or trace.of().name != "decoder":
        raise InputError(
            "alti-logit reads decoders: this trace is of " + ", ".join(trace.stacks) + ". Use method='alti'."
        )
    trace.follow("alti-logit")
    stack = trace.of()
    trace.refuse_dropped_logits("alti-logit")
    if trace.logits is None or trace.logits.dim() != 2:
        raise InputError("alti-logit needs next-token logits: load the model with task='text-generation'.")
    for layer in stack:
        wiring = layer.equation("way from layer to layer")
        if not wiring.additive:
            raise WiringError(
                f"layer {layer.index} is {wiring.kind} wired: its states are not a sum of what the layers added, so a logit "
                "cannot be shared out among them."
            )
    n = len(stack.tokens)
    if not -n <= position < n:
        raise InputError(f"position={position} is out of range: there are {n} tokens.")
    at = position % n
    chosen = trace.with_model(model)
    word = int(trace.logits[at].argmax()) if target is None else choice(chosen, trace.logits, target, "target")
    other = None if foil is None else choice(chosen, trace.logits, foil, "foil")
    if other == word:
        raise InputError(f"foil={foil!r} is the target itself ({word}): there is nothing between them to explain.")
    return _shared_out(trace, _LogitMap.of(trace, chosen), _origins(trace), word, other, at)


def alti_logits(trace: Trace, rows: Sequence[tuple[int, int, int | None]], model: Any = None) -> Iterator[Tensor]:
    """`alti_logit(…).by_input()` for many (position, target, foil) of one trace; what they share is computed once."""
    if not rows:
        return
    position, target, foil = rows[0]
    yield alti_logit(
        trace, target=target, foil=foil, position=position, model=model
    ).by_input()  # refuses what is unfit
    logits, origin = _LogitMap.of(trace, trace.with_model(model)), _origins(trace)
    for position, target, foil in rows[1:]:
        yield _shared_out(trace, logits, origin, target, foil, position).by_input()


def _origins(trace: Trace) -> Tensor:
    """[layer, position, input]: ALTI's rollout."""
    return rollout(torch.stack([alti(decompose(layer))[0] for layer in trace.of()]))


def _shared_out(
    trace: Trace, logits: _LogitMap, origin: Tensor, word: int, other: int | None, at: int
) -> LogitContributions:
    stack = trace.of()
    assert trace.logits is not None
    direction, bias, final = logits.direction(word, other, at)
    logit = trace.logits[at, word] if other is None else trace.logits[at, word] - trace.logits[at, other]
    dtype = working(stack.layers[0].outputs)
    direct = torch.stack([_heads(layer, direction.to(dtype), at) for layer in stack])  # (layer, head, position)
    values = torch.stack([d if i == 0 else d @ origin[i - 1] for i, d in enumerate(direct)])
    states = [layer.block_input[at].to(dtype) for layer in stack] + [final.to(dtype)]
    added = torch.stack([states[i + 1] - states[i] for i in range(len(stack))]) @ direction.to(dtype)
    constants = torch.stack([_constant(layer, at).to(dtype) for layer in stack]) @ direction.to(dtype)
    extra = {
        "feedforward": added - direct.sum((1, 2)) - constants,
        "embedding": (states[0] @ direction.to(dtype))[None],
        "bias": (bias.to(dtype) + constants.sum())[None],
        "logit": logit.to(dtype)[None],
        "direct": direct,
    }
    whole = values.sum() + extra["feedforward"].sum() + extra["embedding"][0] + extra["bias"][0]
    error = float((whole - extra["logit"][0]).abs() / trace.logits[at].abs().max())
    if error > (RAISED_SUM if dtype == trace.logits.dtype else state_agreement(torch.bfloat16)):
        raise WiringError(
            f"the parts add up to the logit only to {error:.1e} relative: the head is not linear in the last state."
        )
    provenance = trace.provenance.by("alti-logit", target=word, foil=other, position=at, origin="embeddings")
    return LogitContributions.of_stack(stack, values, provenance, axes=("layer", "head", "input"), extra=extra)


def _heads(layer: Layer, direction: Tensor, at: int) -> Tensor:
    """(head, position): direction · what position j gave through head h."""
    projection = layer.row_projection
    weight = projection.weight.to(direction)
    weight = weight if projection.rows is None else projection.rows[at].to(direction) @ weight
    weight = layer.equation("attention branch").branch_part(weight, layer.projected[at].to(direction))
    toward = weight @ direction  # (head, d_v)
    place = at % layer.shape[1]
    return layer.rows(place, place + 1)[:, 0].to(direction) * torch.einsum(
        "hkv,hv->hk", layer.values.to(direction), toward
    )


def _constant(layer: Layer, at: int) -> Tensor:
    """(d,): what the attention block adds whatever it looks at: output and norm biases."""
    like = layer.block_input[at]
    bias = layer.row_projection.bias
    constant = torch.zeros_like(like) if bias is None else bias.to(like)
    return layer.equation("attention branch").branch_constant(constant, layer.projected[at])


@dataclass(frozen=True)
class _LogitMap:
    """How the logits are made from the last states, proved on this text: final norm, then a linear head."""

    head: Any
    factor: float  # some heads put one on all logits
    last: Tensor  # (token, d): what the last block gives
    final: Tensor  # (token, d): what the head reads
    norm: Norm | None  # between the two

    @classmethod
    def of(cls, trace: Trace, model: Model) -> _LogitMap:
        stack = trace.of()
        assert trace.logits is not None
        last = stack.layers[-1].block_output
        head: Any = getattr(model.model, "get_output_embeddings", lambda: None)()
        final = None if head is None else _head_input(model, trace, head)
        if (
            final is None
            or final.shape[0] != len(stack.tokens)
            or not isinstance(getattr(head, "weight", None), Tensor)
        ):
            raise WiringError(
                f"{model.name}: the map from its last state to its logits is not shown, so logits cannot be shared out."
            )
        dtype = working(last)
        last, final, logits = last.to(dtype), final.to(dtype), trace.logits.to(dtype)
        head_bias = getattr(head, "bias", None)
        whole = final @ head.weight.detach().to(final).T  # (token, vocabulary)
        whole = whole if head_bias is None else whole + head_bias.detach().to(whole)
        factor = float((whole * logits).sum() / whole.square().sum())
        error = float((factor * whole - logits).abs().max() / logits.abs().max())
        if error > state_agreement(trace.logits.dtype):
            raise WiringError(
                f"{model.name}: its logits are not a linear map of its last state (they differ by {error:.1e})."
            )
        norm = None if deviation(final, last) <= SAME_STATE else _final_norm(model, last, final)
        return cls(head, factor, last, final, norm)

    def direction(self, word: int, other: int | None, at: int) -> tuple[Tensor, Tensor, Tensor]:
        """(d,) direction u ⊙ L/σ, the constant part of the logit, and the last state (d,).

        u is the target's row of the head, less the foil's, times the one factor.
        """
        weight = self._row(self.head.weight, word, other)
        head_bias = getattr(self.head, "bias", None)
        constant = weight.new_zeros(()) if head_bias is None else self._row(head_bias, word, other)
        if self.norm is None:
            return weight, constant, self.last[at]
        constant = constant if self.norm.bias is None else constant + self.norm.bias.to(weight) @ weight
        return self.norm.adjoint(weight) / self.norm.scale(self.last[at]), constant, self.last[at]

    def _row(self, parameter: Tensor, word: int, other: int | None) -> Tensor:
        chosen = parameter.detach()[word].to(self.final)
        return self.factor * (chosen if other is None else chosen - parameter.detach()[other].to(self.final))


def _head_input(model: Model, trace: Trace, head: torch.nn.Module) -> Tensor | None:
    """(token, d): what the head reads on this text. The trace's final states are it, where its body hands them over."""
    if trace.final_states is not None:
        return trace.final_states
    given: list[Tensor] = []
    hook = on_enter(head, lambda _module, args, _kwargs: given.append(args[0].detach()))
    try:
        with lock_of(model.model), evaluating(model.model), torch.no_grad():
            model.model(**accepted(model.model, on_device(model, trace.inputs)))
    finally:
        hook.remove()
    return given[-1][0] if given and given[-1].dim() == 3 else None


def _final_norm(model: Model, given: Tensor, returned: Tensor) -> Norm:
    """The norm between the last block and the head, recognised by what it does."""
    for module in reversed(list(model.model.modules())):
        parameters = list(module.parameters(recurse=False))
        if 1 <= len(parameters) <= 2 and all(p.numel() == given.shape[-1] for p in parameters):
            norm = recognise(module, given, returned, state_agreement(given.dtype))
            if norm is not None:
                return norm
    raise WiringError(f"{model.name}: what stands between its last block and its logits is not a known norm.")
