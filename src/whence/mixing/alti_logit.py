"""ALTI-Logit: which input tokens pushed this logit, layer by layer and head by head?

Ferrando et al., "Explaining How Transformers Use Context to Build Predictions" (ACL 2023). In a pre-norm decoder the last
state is the embedding plus what every attention head and every feed-forward layer added, so a logit splits as

    logit_w(t) = u_w · L(x_t⁰)/σ + Σ_l Σ_h Σ_j u_w · L(A^h_tj V^h_j W^h)/σ + Σ_l u_w · L(ffn^l_t)/σ + biases

with L and σ the final norm's. What came through position j of layer l is followed back to the inputs by ALTI's rollout
of the layers below, R_{l−1}.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from whence.errors import InputError, WiringError
from whence.mixing.alti import alti
from whence.mixing.decomposition import decompose, working
from whence.mixing.rollout import rollout
from whence.model.load import Model
from whence.reading.trace import Layer, Trace
from whence.reading.wiring.norms import Norm, recognise
from whence.reading.wiring.op_graph import deviation
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
    trace: Trace, *, target: int | str | None = None, position: int = -1, model: Any = None
) -> LogitContributions:
    """Which inputs pushed the logit of `target` (a token or its id; None: the model's own first choice) at `position`."""
    if len(trace.stacks) > 1 or trace.of().name != "decoder":
        raise InputError(
            "alti-logit reads decoders: this trace is of " + ", ".join(trace.stacks) + ". Use method='alti'."
        )
    trace.follow("alti-logit")
    stack = trace.of()
    if trace.logits is None or trace.logits.dim() != 2:
        raise InputError("alti-logit needs next-token logits: load the model with task='text-generation'.")
    for layer in stack:
        if (
            layer.wiring not in ("pre-norm", "sandwich", "parallel")
            or layer.norm is not None
            or layer.residual_scale is not None
        ):
            raise WiringError(
                f"layer {layer.index} is {layer.wiring} wired: its states are not a sum of what the layers added, so a logit "
                "cannot be shared out among them."
            )
    n = len(stack.tokens)
    if not -n <= position < n:
        raise InputError(f"position={position} is out of range: there are {n} tokens.")
    at = position % n
    chosen = trace.with_model(model)
    word = _target(chosen, trace.logits[at], target)
    direction, bias, final = _read_out(trace, chosen, word, at)
    dtype = working(stack.layers[0].attention)
    decompositions = [decompose(layer) for layer in stack]
    origin = rollout(torch.stack([alti(part)[0] for part in decompositions]))
    direct = torch.stack([_heads(layer, direction.to(dtype), at) for layer in stack])  # (layer, head, position)
    values = torch.stack([d if i == 0 else d @ origin[i - 1] for i, d in enumerate(direct)])
    states = [layer.block_input[at].to(dtype) for layer in stack] + [final.to(dtype)]
    added = torch.stack([states[i + 1] - states[i] for i in range(len(stack))]) @ direction.to(dtype)
    constants = torch.stack([_constant(layer, at).to(dtype) for layer in stack]) @ direction.to(dtype)
    extra = {
        "feedforward": added - direct.sum((1, 2)) - constants,
        "embedding": (states[0] @ direction.to(dtype))[None],
        "bias": (bias.to(dtype) + constants.sum())[None],
        "logit": trace.logits[at, word].to(dtype)[None],
        "direct": direct,
    }
    whole = values.sum() + extra["feedforward"].sum() + extra["embedding"][0] + extra["bias"][0]
    error = float((whole - extra["logit"][0]).abs() / trace.logits[at].abs().max())
    if error > (1e-3 if dtype == trace.logits.dtype else 6e-2):
        raise WiringError(
            f"the parts add up to the logit only to {error:.1e} relative: the head is not linear in the last state."
        )
    provenance = trace.provenance.by("alti-logit", target=word, position=at, origin="embeddings")
    return LogitContributions.of_stack(stack, values, provenance, axes=("layer", "head", "input"), extra=extra)


def _heads(layer: Layer, direction: Tensor, at: int) -> Tensor:
    """(head, position): direction · what position j gave through head h."""
    weight = layer.projection.weight.to(direction)
    if layer.branch_norm is not None:
        weight = layer.branch_norm.linear(weight) / layer.branch_norm.scale(layer.projected[at].to(direction))
    if layer.branch_scale is not None:
        weight = weight * layer.branch_scale
    toward = weight @ direction  # (head, d_v)
    return layer.attention[:, at].to(direction) * torch.einsum("hkv,hv->hk", layer.values.to(direction), toward)


def _constant(layer: Layer, at: int) -> Tensor:
    """(d,): what the attention block adds whatever it looks at: output and norm biases."""
    like = layer.block_input[at]
    bias = layer.projection.bias
    constant = torch.zeros_like(like) if bias is None else bias.to(like)
    if layer.branch_norm is not None:
        norm = layer.branch_norm
        constant = norm.linear(constant) / norm.scale(layer.projected[at])
        constant = constant if norm.bias is None else constant + norm.bias.to(like)
    return constant if layer.branch_scale is None else constant * layer.branch_scale


def _target(model: Model, logits: Tensor, target: int | str | None) -> int:
    if target is None:
        return int(logits.argmax())
    if isinstance(target, str):
        if model.tokenizer is None:
            raise InputError(f"target={target!r} needs a tokenizer to be looked up: give the token's id.")
        ids = model.tokenizer(target, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            pieces = model.tokenizer.convert_ids_to_tokens(ids)
            raise InputError(
                f"target={target!r} is {len(ids)} tokens ({', '.join(map(str, pieces))}): give one, or its id."
            )
        target = ids[0]
    if not 0 <= int(target) < logits.shape[-1]:
        raise InputError(f"target={target} is not a token id: the vocabulary has {logits.shape[-1]}.")
    return int(target)


def _read_out(trace: Trace, model: Model, word: int, at: int) -> tuple[Tensor, Tensor, Tensor]:
    """(d,) direction u ⊙ L/σ, the constant part of the logit, and the last state (d,): all proved on this text."""
    stack = trace.of()
    assert trace.logits is not None
    last, final = stack.layers[-1].block_output, trace.final_states
    head = getattr(model.model, "get_output_embeddings", lambda: None)()
    if final is None or head is None or not isinstance(getattr(head, "weight", None), Tensor):
        raise WiringError(
            f"{model.name}: the map from its last state to its logits is not shown, so logits cannot be shared out."
        )
    weight = head.weight.detach()[word].to(last)
    bias = getattr(head, "bias", None)
    constant = weight.new_zeros(()) if bias is None else bias.detach()[word].to(last)
    theirs = trace.logits[:, word].to(last)
    error = float((final @ weight + constant - theirs).abs().max() / trace.logits.abs().max())
    if error > (1e-4 if last.dtype in (torch.float32, torch.float64) else 6e-2):
        raise WiringError(
            f"{model.name}: its logits are not a linear map of its last state (they differ by {error:.1e})."
        )
    if deviation(final, last) <= 1e-6:
        return weight, constant, last[at]
    norm = _final_norm(model, last, final)
    scaled = weight if norm.gain is None else weight * norm.gain.to(weight)
    scaled = scaled - scaled.mean() if norm.centred else scaled
    constant = constant if norm.bias is None else constant + norm.bias.to(weight) @ weight
    return scaled / norm.scale(last[at]), constant, last[at]


def _final_norm(model: Model, given: Tensor, returned: Tensor) -> Norm:
    """The norm between the last block and the head, recognised by what it does."""
    for module in reversed(list(model.model.modules())):
        parameters = list(module.parameters(recurse=False))
        if 1 <= len(parameters) <= 2 and all(p.numel() == given.shape[-1] for p in parameters):
            norm = recognise(module, given, returned, 1e-4 if given.dtype in (torch.float32, torch.float64) else 6e-2)
            if norm is not None:
                return norm
    raise WiringError(f"{model.name}: what stands between its last block and its logits is not a known norm.")
