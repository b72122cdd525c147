"""One attention layer of a trace: what was captured, and what follows from it by the proved wiring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from whence.errors import InputError, WiringError
from whence.reading.capture.recorder import mix
from whence.reading.tensor_tree import map_tensors
from whence.reading.wiring.equation import Wiring
from whence.reading.wiring.norms import Norm
from whence.reading.wiring.projection import Projection


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
    wiring: Wiring | None  # the residual equation: kind, norms and factors
    bias: Tensor | None = None  # added to the scaled scores (relative positions), [head, query, key] or broadcastable
    reason: str | None = None  # why wiring or projection are missing
    second_norm: Norm | None = None  # the norm that ends a post-norm block, after the feed-forward layer
    _before_second_norm: Tensor | None = None  # [query, d]
    sink: Tensor | None = None  # [head, query]: the weight of a learned sink, a key that is always visible, of value 0
    _side: Tensor | None = None  # [query, d], parallel: what else is added, made from the token's own state

    def _if_kept(self, tensor: Tensor | None, name: str) -> Tensor:
        if tensor is None:
            raise InputError(
                f"layer {self.index} has no {name}: they were not kept. Trace again with keep including {name!r}."
            )
        return tensor

    @property
    def attention(self) -> Tensor:
        """[head, query, key]; rows sum to 1, or with `sink` to 1 where the model has learned sinks."""
        return self._if_kept(self._attention, "attention")

    @property
    def attention_and_sink(self) -> Tensor:
        """[head, query, key (+ 1)]: the sink as the last column, where there is one; rows sum to 1."""
        attention = self.attention
        return attention if self.sink is None else torch.cat([attention, self.sink.to(attention)[..., None]], dim=-1)

    @property
    def queries(self) -> Tensor:
        """[head, query, d_k]"""
        return self._if_kept(self._queries, "queries")

    @property
    def keys(self) -> Tensor:
        """[head, key, d_k], grouped heads repeated (made when asked for, not stored)."""
        return repeat_heads(self._if_kept(self.grouped_keys, "keys"), len(self.heads))

    @property
    def values(self) -> Tensor:
        """[head, key, d_v], grouped heads repeated (made when asked for, not stored)."""
        return repeat_heads(self._if_kept(self.grouped_values, "values"), len(self.heads))

    @property
    def outputs(self) -> Tensor:
        """[head, query, d_v]: attention · values, as the model computed it."""
        if self._outputs is None and self._attention is not None and self.grouped_values is not None:
            return mix(self._attention[None], self.grouped_values[None])[0]
        return self._if_kept(self._outputs, "outputs")

    @property
    def row_projection(self) -> Projection:
        """The output projection, with a map L of its own for every row where the model turns its head outputs first."""
        if self._projection is None:
            raise WiringError(f"layer {self.index}: the output projection was not proved: {self.reason}")
        return self._projection

    @property
    def projection(self) -> Projection:
        """The output projection: weight [head, d_v, d] and bias [d], the same for every row.

        Refused where it is not, so that no measure leaves out the rotation (`row_projection` has it).
        """
        projection = self.row_projection
        if projection.rows is not None:
            raise WiringError(
                f"layer {self.index}: the head outputs are turned row by row (rotary values) before they are "
                "projected, which this measure does not follow; certificates, effective attention, rollout, norms, "
                "ALTI, GlobEnc and ALTI-Logit do."
            )
        return projection

    @property
    def transformed_values(self) -> Tensor:
        """T = V W, [head, key, d]: what each key would add to the block's output at full attention."""
        return torch.einsum("hkv,hvd->hkd", self.values, self.projection.weight.to(self.values))

    def equation(self, name: str) -> Wiring:
        """The proved wiring, for what `name` says; refused where it is not proved."""
        if self.wiring is None:
            raise WiringError(f"layer {self.index}: the {name} is not known: {self.reason}")
        return self.wiring

    def _wired(self, tensor: Tensor | None, name: str) -> Tensor:
        self.equation(name)
        if tensor is None:
            raise InputError(
                f"layer {self.index} has no {name}: states were not kept (trace again with keep including 'states'), or "
                "no module of this model hands them over as [sequence, token, d]."
            )
        return tensor

    @property
    def block_input(self) -> Tensor:
        """[query, d]: the state that the attention block's output is added to."""
        return self._wired(self._block_input, "block input")

    @property
    def projected(self) -> Tensor:
        """[query, d]: the attention block's output, all heads through the projection with its bias."""
        return self.row_projection(self.outputs)

    @property
    def branch(self) -> Tensor:
        """[query, d]: the attention block's output as it enters the residual sum (normed and scaled where it is)."""
        return self.equation("attention branch").branch(self.projected)

    @property
    def own(self) -> Tensor:
        """[query, d]: all that the token itself carries into the sum: its residual and, in parallel wiring, its side branch."""
        wiring = self.equation("residual")
        return wiring.carried(self.block_input, self._wired(self._side, "side branch") if wiring.parallel else None)

    @property
    def before_norm(self) -> Tensor:
        """[query, d]: residual + attention, before a post-norm; what the norm's scale is taken of."""
        return self.own + self.branch

    @property
    def after_attention(self) -> Tensor:
        """[query, d]: the state after attention (+ norm), as the model had it.

        In parallel wiring the feed-forward part is in it too, since nothing in the model is the sum without it.
        """
        if self._after_attention is None and self.wiring is not None and self._block_input is not None:
            return self.wiring.finish(self.before_norm)
        return self._wired(self._after_attention, "state after attention")

    @property
    def block_output(self) -> Tensor:
        """[query, d]: the state after the whole block."""
        return self._wired(self._block_output, "state after the block")

    @property
    def before_second_norm(self) -> Tensor:
        """[query, d]: state after attention + feed-forward part, before the norm that ends a post-norm block."""
        return self._wired(self._before_second_norm, "sum before the second norm")

    @property
    def visible_mask(self) -> Tensor:
        """Boolean [query, key] (or [head, query, key]): which keys each query may look at."""
        if self.visible is not None:
            return self.visible
        reference = self.attention
        return torch.ones(reference.shape[-2:], dtype=torch.bool, device=reference.device)

    def visible_of(self, head: int) -> Tensor | None:
        """[query, key]: which keys the head at this place sees; None: all of them."""
        return self.visible if self.visible is None or self.visible.dim() == 2 else self.visible[head]

    def row(self, head: int, query: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """The row of one query of the head at this place: weights [key], values [key, d_v], visible [key] (None: all)."""
        visible = self.visible_of(head)
        return self.attention[head, query], self.values[head], None if visible is None else visible[query]

    def select(self, heads: Sequence[int]) -> Layer:
        """The same layer with only these heads (by the model's numbering)."""
        missing = [h for h in heads if h not in self.heads]
        if missing:
            raise InputError(f"layer {self.index} has no head {missing[0]}; it has heads {ranges(self.heads)}.")
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
            grouped_keys=None if self.grouped_keys is None else pick(repeat_heads(self.grouped_keys, n)),
            grouped_values=None if self.grouped_values is None else pick(repeat_heads(self.grouped_values, n)),
            _outputs=pick(self._outputs),
            sink=pick(self.sink),
            visible=pick(visible) if visible is not None and visible.dim() == 3 and visible.shape[0] == n else visible,
            bias=pick(self.bias) if self.bias is not None and self.bias.shape[0] == n else self.bias,
            _projection=None if projection is None else replace(projection, weight=pick(projection.weight)),
        )

    def _map(self, move: Any) -> Layer:
        moved: Layer = map_tensors(self, move)
        return moved


def refuse_following(what: str, mixes: str | None) -> None:
    """The refusal of measures that follow tokens through the layers by way of attention; `mixes`: why, if so."""
    if mixes is not None:
        raise WiringError(
            f"{what} follows tokens through the layers by way of attention, but {mixes}. Attention, identifiability, "
            "certificates and each layer's own contributions of its attention block are right; from input to output use "
            "hidden-token-attribution, gradients or occlusion."
        )


def repeat_heads(grouped: Tensor, heads: int) -> Tensor:
    """[kv head, token, d] → [head, token, d]; a view where nothing needs repeating."""
    groups = heads // grouped.shape[-3]
    return grouped if groups == 1 else grouped.repeat_interleave(groups, dim=-3)


def ranges(numbers: tuple[int, ...]) -> str:
    """ "0 … 5" for people, where the numbers follow each other."""
    if numbers and numbers == tuple(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 2:
        return f"{numbers[0]} … {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"
