"""A trace of attention that somebody has already: the tuples that transformers gives and bertviz takes.

With values, everything that needs attention and values alone works as on a trace of a model: identifiability, effective
attention, certificates, decisions, verdicts, other rows. Without them nothing can be certified, and it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whence.core.numerics.tolerances import row_sum_slack
from whence.errors import InputError
from whence.reading.layer import GIVEN, Layer
from whence.reading.trace import Stack, Trace
from whence.results.labels import Tokens, readable
from whence.results.provenance import Provenance


def from_tensors(
    attentions: Any = None,
    tokens: Any = None,
    values: Any = None,
    *,
    encoder_attentions: Any = None,
    decoder_attentions: Any = None,
    cross_attentions: Any = None,
    encoder_tokens: Any = None,
    decoder_tokens: Any = None,
    encoder_values: Any = None,
    decoder_values: Any = None,
    cross_values: Any = None,
    visible: Any = None,
    text: str | None = None,
    name: str = "tensors",
) -> Trace:
    """A trace made of given tensors: what `output_attentions=True` returned, its tokens, and the values if they are at hand.

    attentions: one tensor a layer, [batch of 1, head, query, key] or [head, query, key]; or one tensor with the layers
    first. tokens: as many as there are keys. values: one tensor a layer, [batch of 1, head, key, d_v] (fewer heads where
    several share theirs), the value bias included. Encoder–decoders: `encoder_attentions` with `encoder_tokens`,
    `decoder_attentions` and `cross_attentions` with `decoder_tokens`, each with its `…_values`.

    visible: boolean [query, key], which keys may be looked at. None: all of them, or, where all above the diagonal is
    exactly 0 in every layer and head, those up to the query (a causal mask).

    >>> import torch, whence
    >>> attention = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).expand(1, 2, 2, 2)
    >>> trace = whence.from_tensors((attention,), ["a", "b"], (torch.eye(2).expand(1, 2, 2, 2),))
    >>> whence.certify(trace, 0, 0, 1).dimension
    0
    """
    given = {
        "encoder": (encoder_attentions, encoder_tokens, encoder_tokens, encoder_values),
        "decoder": (decoder_attentions, decoder_tokens, decoder_tokens, decoder_values),
        "cross": (cross_attentions, decoder_tokens, encoder_tokens, cross_values),
    }
    if attentions is not None:
        if any(part is not None for parts in given.values() for part in parts):
            raise InputError(
                "attentions= is for models with one stack: leave out the encoder's, decoder's and cross parts."
            )
        causal = visible is None and _is_causal(_layers("attentions", attentions))
        given = {"decoder" if causal else "encoder": (attentions, tokens, tokens, values)}
    stacks = {
        stack: _stack(stack, *parts, visible if stack != "cross" else None)
        for stack, parts in given.items()
        if parts[0] is not None
    }
    if not stacks:
        raise InputError("no attention was given: from_tensors takes what a model returns with output_attentions=True.")
    return Trace(stacks=stacks, provenance=Provenance(name, "from_tensors"), text=text)


def _stack(name: str, attentions: Any, tokens: Any, key_tokens: Any, values: Any, visible: Any) -> Stack:
    weights = _layers(f"{name} attentions", attentions)
    given = [None] * len(weights) if values is None else _layers(f"{name} values", values)
    if len(given) != len(weights):
        raise InputError(f"{name}: values of {len(given)} layers were given for the attention of {len(weights)}.")
    queries, keys = _tokens(name, tokens), _tokens(name, key_tokens)
    keys = queries if key_tokens is tokens else keys
    mask = None if visible is None else torch.as_tensor(visible).bool()
    if mask is None and name != "cross" and _is_causal(weights):
        mask = torch.ones(weights[0].shape[-2:], dtype=torch.bool).tril()
    pairs = enumerate(zip(weights, given, strict=True))
    layers = tuple(_layer(name, i, a, v, len(queries), len(keys), mask) for i, (a, v) in pairs)
    return Stack(name, layers, queries, keys)


def _layers(name: str, given: Any) -> list[Tensor]:
    """[head, query, key] of each layer."""
    parts = list(given) if isinstance(given, (list, tuple)) or (hasattr(given, "dim") and given.dim() >= 4) else None
    if not parts:
        raise InputError(f"{name}: give one tensor for each layer, as a tuple or list, not a {type(given).__name__}.")
    tensors = []
    for i, part in enumerate(parts):
        if part is None:
            raise InputError(f"{name}: layer {i} is None; load the model with attn_implementation='eager'.")
        try:
            tensor = torch.as_tensor(part).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as problem:
            raise InputError(f"{name}: layer {i} is no tensor: {problem}") from None
        if tensor.dim() == 4:
            if tensor.shape[0] != 1:
                raise InputError(
                    f"{name}: layer {i} has a batch of {tensor.shape[0]}: give one text, as attention[{0}:{1}]."
                )
            tensor = tensor[0]
        if tensor.dim() != 3 or not tensor.is_floating_point():
            raise InputError(
                f"{name}: layer {i} has the shape {tuple(tensor.shape)}; needed: [1, head, query, key] of real numbers."
            )
        if not bool(tensor.isfinite().all()):
            raise InputError(f"{name}: layer {i} holds numbers that are not finite.")
        tensors.append(tensor)
    return tensors


def _layer(
    name: str, index: int, weights: Tensor, values: Tensor | None, queries: int, keys: int, mask: Tensor | None
) -> Layer:
    heads = weights.shape[0]
    if weights.shape[1:] != (queries, keys):
        raise InputError(
            f"{name}: layer {index} has attention over {weights.shape[1]} × {weights.shape[2]} positions, and there are "
            f"{queries} × {keys} tokens."
        )
    if bool((weights < 0).any()):
        raise InputError(f"{name}: layer {index} has negative attention: give it after the softmax.")
    allowed = row_sum_slack(weights.dtype)
    sums = weights.double().sum(-1)
    worst = float((sums - 1).abs().max())
    if worst > allowed:
        head, row = divmod(int((sums - 1).abs().argmax()), queries)
        raise InputError(
            f"{name}: layer {index}, head {head}, row {row} sums to {float(sums[head, row]):.4f}, not to 1: give the whole "
            "attention after the softmax (no dropout, no average over texts; a model with sinks must be traced)."
        )
    if mask is not None:
        if mask.shape[-2:] != (queries, keys):
            raise InputError(f"visible has the shape {tuple(mask.shape)}, and there are {queries} × {keys} tokens.")
        if bool((weights * ~mask).any()):
            raise InputError(f"{name}: layer {index} attends to keys that visible= hides.")
    if values is not None and (values.shape[1] != keys or values.shape[0] == 0 or heads % values.shape[0]):
        raise InputError(
            f"{name}: layer {index} has values of the shape {tuple(values.shape)}; needed: [head, key, d_v] for {heads} "
            f"heads (or heads that share theirs) and {keys} keys."
        )
    return Layer(
        index=index, heads=tuple(range(heads)), _attention=weights, _queries=None, grouped_keys=None,
        grouped_values=values, _outputs=None, visible=mask, scale=None, keys_proved=False,
        causal=mask is not None and _lower(mask), _block_input=None, _after_attention=None, _block_output=None,
        _projection=None, wiring=None, reason=GIVEN,
    )  # fmt: skip


def _lower(mask: Tensor) -> bool:
    return mask.shape[-1] == mask.shape[-2] and not bool(mask.triu(1).any())


def _is_causal(layers: Sequence[Tensor]) -> bool:
    square = all(a.shape[-1] == a.shape[-2] > 1 for a in layers)
    return square and not any(bool(a.triu(1).any()) for a in layers)


def _tokens(name: str, given: Any) -> Tokens:
    if isinstance(given, Tokens):
        return given
    if given is None or isinstance(given, str) or not all(isinstance(token, str) for token in given):
        raise InputError(f"{name}: tokens must be a list of texts, one for each position, not {given!r:.60}.")
    raw = tuple(given)
    special = tuple(t[:1] + t[-1:] in ("[]", "<>") and len(t) > 2 for t in raw)
    return Tokens(readable(None, raw, special), raw, special=special)
