"""A trace: one model, one text, and every tensor that the measures need, each with a proved meaning.

Axes: attention [head, query, key] per layer, values [head, key, d_v], head outputs [head, query, d_v], states
[token, d]. Attention layers are numbered from 0; hidden states 0 … L, with 0 the embeddings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whence.errors import InputError, WiringError
from whence.files import load_tensors, save_tensors
from whence.provenance import Provenance
from whence.reading.norms import Norm
from whence.reading.tap import mix
from whence.reading.tokens import Tokens
from whence.reading.wiring import Projection

if TYPE_CHECKING:
    from whence.loading import Model

KEEP = ("attention", "queries", "keys", "values", "outputs", "states")
STACKS = ("encoder", "decoder", "cross")


@dataclass(frozen=True)
class Layer:
    """One attention layer of a trace. What was not kept, or could not be proved, is refused with the reason."""

    index: int
    heads: tuple[int, ...]  # which of the model's heads are here
    _attention: Tensor | None  # [head, query, key]
    _queries: Tensor | None  # [head, query, d_k], after rotary positions and norms
    grouped_keys: Tensor | None  # [kv head, key, d_k]: several query heads may share one (GQA)
    grouped_values: Tensor | None  # [kv head, key, d_v], the value bias included
    _outputs: Tensor | None  # [head, query, d_v]
    visible: Tensor | None  # boolean [query, key] or [head, query, key]; None: every key is visible
    scale: float | None  # the factor on query·key
    keys_proved: bool  # softmax(scale · QKᵀ + mask) was checked to be the attention
    causal: bool
    _block_input: Tensor | None  # [query, d], the residual r
    _after_attention: Tensor | None  # [query, d], after the post-norm where there is one
    _block_output: Tensor | None  # [query, d]
    _projection: Projection | None
    wiring: str | None  # post-norm | pre-norm | sandwich | parallel
    norm: Norm | None  # the norm after the residual add (post-norm)
    branch_norm: Norm | None  # the norm on the attention branch (sandwich)
    branch_scale: Tensor | float | None
    residual_scale: Tensor | float | None
    bias: Tensor | None = None  # added to the scaled scores (relative positions), [head, query, key] or broadcastable
    reason: str | None = None  # why wiring or projection are missing

    def _kept(self, tensor: Tensor | None, name: str) -> Tensor:
        if tensor is None:
            raise InputError(
                f"layer {self.index} has no {name}: they were not kept. Trace again with keep including {name!r}."
            )
        return tensor

    @property
    def attention(self) -> Tensor:
        """[head, query, key]; rows sum to 1 (less where the model has attention sinks)."""
        return self._kept(self._attention, "attention")

    @property
    def queries(self) -> Tensor:
        """[head, query, d_k]"""
        return self._kept(self._queries, "queries")

    @property
    def keys(self) -> Tensor:
        """[head, key, d_k], grouped heads repeated (made when asked for, not stored)."""
        return _repeat(self._kept(self.grouped_keys, "keys"), len(self.heads))

    @property
    def values(self) -> Tensor:
        """[head, key, d_v], grouped heads repeated (made when asked for, not stored)."""
        return _repeat(self._kept(self.grouped_values, "values"), len(self.heads))

    @property
    def outputs(self) -> Tensor:
        """[head, query, d_v]: attention · values, as the model computed it."""
        if self._outputs is None and self._attention is not None and self.grouped_values is not None:
            return mix(self._attention[None], self.grouped_values[None])[0]
        return self._kept(self._outputs, "outputs")

    @property
    def projection(self) -> Projection:
        """The output projection: weight [head, d_v, d] and bias [d]."""
        if self._projection is None:
            raise WiringError(f"layer {self.index}: the output projection was not proved: {self.reason}")
        return self._projection

    @property
    def transformed_values(self) -> Tensor:
        """T = V W, [head, key, d]: what each key would add to the block's output at full attention."""
        return torch.einsum("hkv,hvd->hkd", self.values, self.projection.weight.to(self.values))

    def _wired(self, tensor: Tensor | None, name: str) -> Tensor:
        if self.wiring is None:
            raise WiringError(f"layer {self.index}: the {name} is not known: {self.reason}")
        return self._kept(tensor, "states")

    @property
    def block_input(self) -> Tensor:
        """[query, d]: the state that the attention block's output is added to."""
        return self._wired(self._block_input, "block input")

    @property
    def projected(self) -> Tensor:
        """[query, d]: the attention block's output, all heads through the projection with its bias."""
        return self.projection(self.outputs)

    @property
    def branch(self) -> Tensor:
        """[query, d]: the attention block's output as it enters the residual sum (normed and scaled where it is)."""
        projected = self.projected
        if self.branch_norm is not None:
            projected = self.branch_norm(projected)
        return _times(projected, self.branch_scale)

    @property
    def before_norm(self) -> Tensor:
        """[query, d]: residual + attention, before a post-norm; what the norm's scale is taken of."""
        return _times(self.block_input, self.residual_scale) + self.branch

    @property
    def norm_scale(self) -> Tensor | None:
        """[query, 1]: what the post-norm divides by at each position; None where there is no post-norm."""
        return None if self.norm is None else self.norm.scale(self.before_norm)

    @property
    def after_attention(self) -> Tensor:
        """[query, d]: the state after attention (+ norm), as the model had it.

        In parallel wiring the feed-forward part is in it too, since nothing in the model is the sum without it.
        """
        if self._after_attention is None and self.wiring not in (None, "parallel") and self._block_input is not None:
            state = self.before_norm
            return state if self.norm is None else self.norm(state)
        return self._wired(self._after_attention, "state after attention")

    @property
    def block_output(self) -> Tensor:
        """[query, d]: the state after the whole block."""
        return self._wired(self._block_output, "state after the block")

    @property
    def visible_mask(self) -> Tensor:
        """Boolean [query, key] (or [head, query, key]): which keys each query may look at."""
        if self.visible is not None:
            return self.visible
        reference = self.attention
        return torch.ones(reference.shape[-2:], dtype=torch.bool, device=reference.device)

    def select(self, heads: Sequence[int]) -> Layer:
        """The same layer with only these heads (by the model's numbering)."""
        missing = [h for h in heads if h not in self.heads]
        if missing:
            raise InputError(f"layer {self.index} has no head {missing[0]}; it has heads {_ranges(self.heads)}.")
        at = torch.tensor([self.heads.index(h) for h in heads])

        def pick(t: Any) -> Any:
            return None if t is None else t[at.to(t.device)]

        n = len(self.heads)
        visible = self.visible
        projection = self._projection
        return replace(
            self,
            heads=tuple(heads),
            _attention=pick(self._attention),
            _queries=pick(self._queries),
            grouped_keys=None if self.grouped_keys is None else pick(_repeat(self.grouped_keys, n)),
            grouped_values=None if self.grouped_values is None else pick(_repeat(self.grouped_values, n)),
            _outputs=pick(self._outputs),
            visible=pick(visible) if visible is not None and visible.dim() == 3 and visible.shape[0] == n else visible,
            bias=pick(self.bias) if self.bias is not None and self.bias.shape[0] == n else self.bias,
            _projection=None if projection is None else Projection(pick(projection.weight), projection.bias),
        )

    def _map(self, move: Any) -> Layer:
        def through(value: Any) -> Any:
            if isinstance(value, Tensor):
                return move(value)
            if isinstance(value, Projection):
                return Projection(move(value.weight), None if value.bias is None else move(value.bias))
            if isinstance(value, Norm):
                weight, bias = (None if t is None else move(t) for t in (value.weight, value.bias))
                return Norm(weight, bias, value.eps, value.centred, value.offset)
            return value

        return replace(self, **{name: through(getattr(self, name)) for name in self.__dataclass_fields__})


@dataclass(frozen=True)
class Stack:
    """The attention layers of one kind: an encoder's, a decoder's, or a decoder's over an encoder."""

    name: str
    layers: tuple[Layer, ...]
    tokens: Tokens  # of the queries
    key_tokens: Tokens

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __getitem__(self, index: int) -> Layer:
        for layer in self.layers:
            if layer.index == index:
                return layer
        have = _ranges(tuple(layer.index for layer in self.layers))
        raise InputError(f"there is no layer {index} in the {self.name}; it has layers {have} (counted from 0).")

    def _stacked(self, name: str) -> Tensor:
        tensors = [getattr(layer, name) for layer in self.layers]
        if len({t.shape for t in tensors}) > 1:
            shapes = sorted({str(tuple(t.shape)) for t in tensors})
            raise InputError(f"the {self.name}'s layers differ in shape ({', '.join(shapes)}): take them one by one.")
        return torch.stack(tensors)

    @property
    def attention(self) -> Tensor:
        """[layer, head, query, key]"""
        return self._stacked("attention")

    @property
    def queries(self) -> Tensor:
        """[layer, head, query, d_k]"""
        return self._stacked("queries")

    @property
    def keys(self) -> Tensor:
        """[layer, head, key, d_k]"""
        return self._stacked("keys")

    @property
    def values(self) -> Tensor:
        """[layer, head, key, d_v]"""
        return self._stacked("values")

    @property
    def outputs(self) -> Tensor:
        """[layer, head, query, d_v]"""
        return self._stacked("outputs")

    @property
    def states(self) -> Tensor:
        """[layer + 1, token, d]: the hidden states; 0 is what the first block reads, l + 1 what block l gives."""
        first = self.layers[0].block_input
        return torch.stack([first, *(layer.block_output for layer in self.layers)])


@dataclass(frozen=True)
class Trace:
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
    logits: Tensor | None = None  # [token, vocabulary] or [labels]; None where the model has no head
    final_states: Tensor | None = None  # [token, d], after the final norm
    inputs: Mapping[str, Tensor] = field(default_factory=dict, repr=False)  # what the model was given, batch of one
    model: Model | None = field(default=None, repr=False, compare=False)

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

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __getitem__(self, index: int) -> Layer:
        return self.of()[index]

    @property
    def attention(self) -> Tensor:
        """[layer, head, query, key]"""
        return self.of().attention

    @property
    def queries(self) -> Tensor:
        """[layer, head, query, d_k]"""
        return self.of().queries

    @property
    def keys(self) -> Tensor:
        """[layer, head, key, d_k]"""
        return self.of().keys

    @property
    def values(self) -> Tensor:
        """[layer, head, key, d_v]"""
        return self.of().values

    @property
    def outputs(self) -> Tensor:
        """[layer, head, query, d_v]"""
        return self.of().outputs

    @property
    def states(self) -> Tensor:
        """[layer + 1, token, d]"""
        return self.of().states

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

        def move(t: Tensor) -> Tensor:
            return t.to(device)

        stacks = {n: replace(s, layers=tuple(la._map(move) for la in s.layers)) for n, s in self.stacks.items()}
        return replace(
            self,
            stacks=stacks,
            logits=None if self.logits is None else move(self.logits),
            final_states=None if self.final_states is None else move(self.final_states),
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """One safetensors file, with tokens, wiring and provenance as JSON in its header."""
        tensors: dict[str, Tensor] = {f"inputs.{name}": t for name, t in self.inputs.items()}
        for name in ("logits", "final_states"):
            if getattr(self, name) is not None:
                tensors[name] = getattr(self, name)
        stacks = {}
        for name, stack in self.stacks.items():
            described = []
            for layer in stack.layers:
                plain: dict[str, Any] = {}
                for part in layer.__dataclass_fields__:
                    _pack(f"{name}.{layer.index}.{part}", getattr(layer, part), tensors, plain)
                described.append(plain)
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
        }
        return save_tensors(path, "trace", tensors, header)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """A saved trace. It has no model: measures that must run it again ask for one with model=."""
        tensors, header = load_tensors(path, "trace")
        stacks = {}
        for name, data in header["stacks"].items():
            layers = tuple(
                Layer(**{part: _unpack(key, value, tensors) for part, (key, value) in _parts(name, plain).items()})
                for plain in data["layers"]
            )
            stacks[name] = Stack(name, layers, Tokens.from_dict(data["tokens"]), Tokens.from_dict(data["key_tokens"]))
        return cls(
            stacks=stacks,
            provenance=Provenance.from_dict(header["provenance"]),
            text=header["text"],
            text_pair=header["text_pair"],
            target=header["target"],
            logits=tensors.get("logits"),
            final_states=tensors.get("final_states"),
            inputs={n.removeprefix("inputs."): t for n, t in tensors.items() if n.startswith("inputs.")},
        )

    def with_model(self, model: Model | None) -> Model:
        """The model to run again: the one given, else the trace's own; refused if its weights are not the trace's."""
        from whence.loading import as_model

        chosen = as_model(model) if model is not None else self.model
        if chosen is None:
            raise InputError("this trace was loaded from a file and has no model: give it with model=.")
        known = self.provenance.weights
        if model is not None and known is not None and chosen.weights_hash != known:
            raise InputError(
                f"the model {chosen.name!r} given with model= has other weights ({chosen.weights_hash[:12]}…) than the one "
                f"traced ({self.provenance.model}, {known[:12]}…)."
            )
        return chosen

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


def _times(x: Tensor, factor: Tensor | float | None) -> Tensor:
    if factor is None:
        return x
    return x * (factor.to(x) if isinstance(factor, Tensor) else factor)


def _repeat(grouped: Tensor, heads: int) -> Tensor:
    groups = heads // grouped.shape[0]
    return grouped if groups == 1 else grouped.repeat_interleave(groups, dim=0)


def _ranges(numbers: tuple[int, ...]) -> str:
    if numbers and numbers == tuple(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 2:
        return f"{numbers[0]} … {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"


def _pack(key: str, value: Any, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
    """Tensors into the file's tensors, the rest into its JSON."""
    part = key.rpartition(".")[2]
    if isinstance(value, Tensor):
        tensors[key] = value
        plain[part] = {"tensor": key}
    elif isinstance(value, Projection):
        tensors[f"{key}.weight"] = value.weight
        if value.bias is not None:
            tensors[f"{key}.bias"] = value.bias
        plain[part] = {"projection": key}
    elif isinstance(value, Norm):
        for name, tensor in (("weight", value.weight), ("bias", value.bias)):
            if tensor is not None:
                tensors[f"{key}.{name}"] = tensor
        plain[part] = {"norm": key, "eps": value.eps, "centred": value.centred, "offset": value.offset}
    else:
        plain[part] = list(value) if isinstance(value, tuple) else value


def _parts(stack: str, plain: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    return {part: (f"{stack}.{plain['index']}.{part}", value) for part, value in plain.items()}


def _unpack(key: str, value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict) and "tensor" in value:
        return tensors[value["tensor"]]
    if isinstance(value, dict) and "projection" in value:
        return Projection(tensors[f"{key}.weight"], tensors.get(f"{key}.bias"))
    if isinstance(value, dict) and "norm" in value:
        return Norm(
            tensors.get(f"{key}.weight"), tensors.get(f"{key}.bias"), value["eps"], value["centred"], value["offset"]
        )
    return tuple(value) if isinstance(value, list) else value
