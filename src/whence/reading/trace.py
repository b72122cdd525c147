"""A trace: one model, one text, and every tensor that the measures need, each with a proved meaning.

Axes: attention [head, query, key] per layer, values [head, key, d_v], head outputs [head, query, d_v], states
[token, d]. Attention layers are numbered from 0; hidden states 0 … L, with 0 the embeddings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whence.errors import InputError
from whence.reading.layer import Layer
from whence.reading.refusals import ranges, refuse_following
from whence.reading.storage import check_layer, check_pass, pack, understand_earlier, unpack
from whence.reading.tensor_tree import map_tensors, own_tensor
from whence.results.declared import check_kinds
from whence.results.labels import Tokens
from whence.results.provenance import Provenance
from whence.results.short_repr import short_repr
from whence.results.tensor_file import load_tensors, savable, save_tensors, understood

if TYPE_CHECKING:
    from whence.model.load import Model

__all__ = ["KEEP", "Layer", "Stack", "Trace"]

KEEP = ("attention", "queries", "keys", "values", "outputs", "states", "logits")
ROWS_NEED = frozenset({"queries", "keys", "values", "outputs"})
"""What rows of attention are made again from, and checked against, where the pass was fused."""


NOT_KEPT = "not kept"
"""What the provenance says of next-token logits that a trace was not asked to keep."""


class LayerTensors:
    """What a stack, and a trace of its first stack, show of all layers together."""

    def of(self, attention: str | None = None) -> Stack:
        """The stack of that kind; of a stack, itself."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.of().layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.of().layers)

    @property
    def attention(self) -> Tensor:
        """[layer, head, query, key]"""
        return self.of()._stacked("attention")

    @property
    def queries(self) -> Tensor:
        """[layer, head, query, d_k]"""
        return self.of()._stacked("queries")

    @property
    def keys(self) -> Tensor:
        """[layer, head, key, d_k]"""
        return self.of()._stacked("keys")

    @property
    def values(self) -> Tensor:
        """[layer, head, key, d_v]"""
        return self.of()._stacked("values")

    @property
    def outputs(self) -> Tensor:
        """[layer, head, query, d_v]"""
        return self.of()._stacked("outputs")

    @property
    def states(self) -> Tensor:
        """[layer + 1, token, d]: the hidden states; 0 is what the first block with attention reads, l + 1 what block l gives.

        0 is the embeddings, unless a state-space or convolution layer mixes tokens before that block (`Trace.mixes`).
        """
        layers = self.of().layers
        return torch.stack([layers[0].block_input, *(layer.block_output for layer in layers)])


@dataclass(frozen=True)
class Stack(LayerTensors):
    """The attention layers of one kind: an encoder's, a decoder's, or a decoder's over an encoder."""

    __repr__ = short_repr

    name: str
    layers: tuple[Layer, ...]
    tokens: Tokens  # of the queries
    key_tokens: Tokens

    def of(self, attention: str | None = None) -> Stack:  # noqa: ARG002
        return self

    def __getitem__(self, index: int) -> Layer:
        for layer in self.layers:
            if layer.index == index:
                return layer
        have = ranges(tuple(layer.index for layer in self.layers))
        raise InputError(f"there is no layer {index} in the {self.name}; it has layers {have} (counted from 0).")

    def _stacked(self, name: str) -> Tensor:
        tensors = [getattr(layer, name) for layer in self.layers]
        if len({t.shape for t in tensors}) > 1:
            shapes = sorted({str(tuple(t.shape)) for t in tensors})
            raise InputError(f"the {self.name}'s layers differ in shape ({', '.join(shapes)}): take them one by one.")
        return torch.stack(tensors)


@dataclass(frozen=True)
class Trace(LayerTensors):
    """Everything one forward pass of one model on one text showed.

    >>> import whence
    >>> trace = whence.trace(whence.load(), "The bank raised its rates.")
    >>> trace.attention.shape               # [layer, head, query, key]
    torch.Size([6, 12, 8, 8])
    >>> trace[0].values.shape               # [head, key, d_v]
    torch.Size([12, 8, 32])
    """

    stacks: Mapping[str, Stack]
    provenance: Provenance
    text: str | None = None
    text_pair: str | None = None
    target: str | None = None
    logits: Tensor | None = None  # [token, vocabulary] or [labels]; None where the model has no head, or not kept
    final_states: Tensor | None = None  # [token, d], after the final norm
    inputs: Mapping[str, Tensor] = field(default_factory=dict, repr=False)  # what the model was given, batch of one
    model: Model | None = field(default=None, repr=False, compare=False)
    mark: int | None = field(default=None, repr=False, compare=False)  # the model's fingerprint when it was traced
    prompt_length: int | None = None  # how many of a decoder's tokens are the prompt, where a continuation follows
    mixes: str | None = None  # what mixes tokens outside the attention that was read, so that nothing may be followed

    def refuse_dropped_logits(self, what: str) -> None:
        """Refuse `what` where the model made a logit for every word of every token and the trace was told not to keep them."""
        if self.provenance.settings.get("logits") == NOT_KEPT:
            raise InputError(
                f"{what} needs the logits, which this trace did not keep: trace again with keep including 'logits'."
            )

    def follow(self, what: str) -> None:
        """Refuse a measure that follows tokens through the layers by way of attention where they also mix elsewhere."""
        refuse_following(what, self.mixes)

    @property
    def continuation(self) -> str | None:
        """What follows the prompt, as text; None where the trace is of one text without a continuation."""
        if self.prompt_length is None:
            return None
        spans = (self.tokens.spans or ())[self.prompt_length :]
        known = [span for span in spans if span is not None]
        if self.text is not None and known:
            return self.text[known[0][0] : known[-1][1]]
        return " ".join(self.tokens[self.prompt_length :])

    def of(self, attention: str | None = None) -> Stack:
        """The stack of that kind ("encoder", "decoder", "cross"); None: the only one, or an encoder–decoder's encoder."""
        if attention is None:
            return next(iter(self.stacks.values()))
        if attention not in self.stacks:
            raise InputError(f"attention={attention!r} is not in this trace; it has: {', '.join(self.stacks)}.")
        return self.stacks[attention]

    @property
    def tokens(self) -> Tokens:
        return self.of().tokens

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.of().layers

    def __getitem__(self, index: int) -> Layer:
        return self.of()[index]

    @property
    def pooled(self) -> Tensor | None:
        """[d]: the mean of the final states over the tokens (how the embedded MiniLM makes its embedding)."""
        return None if self.final_states is None else self.final_states.mean(dim=0)

    def select(self, *, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None) -> Trace:
        """Only these layers and heads, numbered as in the model."""
        stacks = {}
        for name, stack in self.stacks.items():
            kept = stack.layers if layers is None else tuple(stack[i] for i in layers)
            stacks[name] = replace(stack, layers=tuple(la if heads is None else la.select(heads) for la in kept))
        return replace(self, stacks=stacks)

    def to(self, device: str | torch.device) -> Trace:
        """A copy on another device (or in another dtype)."""
        return replace(
            self,
            stacks={n: map_tensors(stack, lambda t: t.to(device)) for n, stack in self.stacks.items()},
            logits=None if self.logits is None else self.logits.to(device),
            final_states=None if self.final_states is None else self.final_states.to(device),
        )

    def copied(self) -> Trace:
        """The same trace with tensors of its own: what it shares with the other texts of its batch is copied out of it."""
        stacks = {n: replace(s, layers=tuple(la.copied() for la in s.layers)) for n, s in self.stacks.items()}
        return replace(self, stacks=stacks, logits=own_tensor(self.logits), final_states=own_tensor(self.final_states))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """One safetensors file, with tokens, wiring and provenance as JSON in its header."""
        with savable(path, "trace"):
            self._check()
        tensors: dict[str, Tensor] = {f"inputs.{name}": t for name, t in self.inputs.items()}
        for name in ("logits", "final_states"):
            if getattr(self, name) is not None:
                tensors[name] = getattr(self, name)
        stacks = {}
        for name, stack in self.stacks.items():
            described = []
            for layer in stack.layers:
                held = {part: getattr(layer, part) for part in layer.__dataclass_fields__}
                described.append({p: pack(f"{name}.{layer.index}.{p}", v, tensors) for p, v in held.items()})
            stacks[name] = {
                "layers": described,
                "tokens": stack.tokens.to_dict(),
                "key_tokens": stack.key_tokens.to_dict(),
            }
        header = {
            "stacks": stacks,
            "provenance": self.provenance.to_dict(),
            "text": self.text,
            "text_pair": self.text_pair,
            "target": self.target,
            "mixes": self.mixes,
            "prompt_length": self.prompt_length,
        }
        return save_tensors(path, "trace", tensors, header)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """A saved trace. It has no model: measures that must run it again ask for one with model=."""
        tensors, header = load_tensors(path, "trace")
        with understood(path, "trace"):
            stacks = {}
            for name, data in header["stacks"].items():
                described = [understand_earlier(plain, name, tensors) for plain in data["layers"]]
                layers = tuple(Layer(**{p: unpack(v, tensors) for p, v in plain.items()}) for plain in described)
                tokens, key_tokens = Tokens.from_dict(data["tokens"]), Tokens.from_dict(data["key_tokens"])
                stacks[name] = Stack(name, layers, tokens, key_tokens)
            trace = cls(
                stacks=stacks,
                provenance=Provenance.from_dict(header["provenance"]),
                text=header["text"],
                text_pair=header["text_pair"],
                target=header["target"],
                mixes=header.get("mixes"),
                prompt_length=header.get("prompt_length"),
                logits=tensors.get("logits"),
                final_states=tensors.get("final_states"),
                inputs={n.removeprefix("inputs."): t for n, t in tensors.items() if n.startswith("inputs.")},
            )
            trace._check()
        return trace

    def _check(self) -> None:
        """A ValueError unless every part is what it is declared to be and as long as the tokens and heads ask for."""
        check_kinds(self)
        if not self.stacks:
            raise ValueError("it has no layers")
        for stack in self.stacks.values():
            if not stack.layers or len({layer.index for layer in stack}) != len(stack):
                raise ValueError(f"the {stack.name}'s layers are {[layer.index for layer in stack]}")
            for layer in stack:
                check_layer(layer, len(stack.tokens), len(stack.key_tokens))
        check_pass(self)
        if self.prompt_length is not None and not 0 <= self.prompt_length <= len(self.tokens):
            raise ValueError(f"its prompt is {self.prompt_length} of {len(self.tokens)} tokens long")

    def with_model(self, model: Model | None) -> Model:
        """The model to run again: the one given, else the trace's own; refused if its weights are not the trace's."""
        from whence.model.load import as_model
        from whence.model.memory import fingerprint

        model_used = as_model(model) if model is not None else self.model
        if model_used is None:
            made = self.provenance.method == "from_tensors"
            raise InputError(
                "this trace was made of tensors and has no model: trace the model itself for this."
                if made
                else "this measure runs the model again, and this trace, loaded from a file or a layer of a stream, has none: "
                "give it with model=, or collect the stream first (stream.collect())."
            )
        if self.model is not None and model_used.model is self.model.model:
            if self.mark is not None and fingerprint(model_used.model) != self.mark:
                raise InputError(
                    f"{model_used.name!r} has changed since this text was traced (weights, adapters, hooks or settings), so "
                    "that running it again would not be about this trace. Trace the text again."
                )
        else:
            self._check_weights(model_used)
        mask = self.inputs.get("attention_mask")
        if mask is not None and mask.dim() == 2 and not bool(mask.bool().all()):
            raise InputError(
                "this trace was made of inputs whose attention_mask hides tokens before or between others; measures that run "
                "the model again need a sequence without hidden tokens: give it without padding."
            )
        return model_used

    def _check_weights(self, model: Model) -> None:
        """Refuse a model given with model= whose weights are not those that were traced."""
        known = self.provenance.weights_hash
        if self.provenance.changed:
            raise InputError(
                f"{self.provenance.model!r} was changed after this text was traced and before its weights were hashed, so "
                f"that nobody can tell whether {model.name!r} has the weights that were traced. Trace the text again."
            )
        if known is not None and model.weights_hash != known:
            raise InputError(
                f"the model {model.name!r} given with model= has other weights ({model.weights_hash[:12]}…) than the one "
                f"traced ({self.provenance.model}, {known[:12]}…)."
            )

    def _repr_html_(self) -> str:
        import html

        words = " ".join(
            f"<span title='{html.escape(r)}'>{html.escape(t)}</span>"
            for t, r in zip(self.tokens, self.tokens.raw, strict=True)
        )
        return f"<div><b>{html.escape(repr(self))}</b><p>{words}</p></div>"

    def __repr__(self) -> str:
        parts = [
            f"{len(s)} {n} layers × {len(s.layers[0].heads)} heads, {len(s.tokens)} tokens"
            for n, s in self.stacks.items()
        ]
        return f"Trace({self.provenance.model}: {'; '.join(parts)})"
