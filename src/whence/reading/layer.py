"""One attention layer of a trace: what was captured, and what follows from it by the proved wiring."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from whence.errors import InputError, WiringError
from whence.reading.attention_rows import BLOCK, attention_rows, output_error, rows_at_a_time, tolerance_of
from whence.reading.capture.recorder import mix
from whence.reading.refusals import ranges
from whence.reading.tensor_tree import own_tensor
from whence.reading.wiring.equation import Wiring
from whence.reading.wiring.norms import Norm
from whence.reading.wiring.projection import Projection
from whence.results.short_repr import short_repr

HELD = 1 << 20
"""Attention of at most this many weights is held on to once it was made: 4 MB in float32."""

GIVEN = "only attention and values were given, and no model"
"""Why a layer that was made of given tensors has no wiring."""

STATES = ("_block_input", "_after_attention", "_block_output", "_before_second_norm", "_side")
"""The parts of a layer with a row for each query and the model's width."""


@dataclass(frozen=True)
class Layer:
    """One attention layer of a trace. What was not kept, or could not be proved, is refused with the reason."""

    __repr__ = short_repr

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
    cap: tuple[float, float] | None = None  # a soft cap on the scores: (factor on query·key, cap)
    rebuilt: bool = False  # the pass was fused: attention is made again, row by row, from queries and keys
    first_row: int | None = None  # of a block of rows: which of the layer's rows is its first (`block`)

    def _if_kept(self, tensor: Tensor | None, name: str) -> Tensor:
        if tensor is None and self.reason == GIVEN:
            raise InputError(
                f"no {name} were given with the attention of layer {self.index}, so nothing can be certified: which other "
                "attention has the same output depends on the values. Give them to from_tensors, or trace the model."
            )
        if tensor is None:
            raise InputError(
                f"layer {self.index} has no {name}: they were not kept. Trace again with keep including {name!r}."
            )
        return tensor

    @property
    def attention(self) -> Tensor:
        """[head, query, key]; rows sum to 1, or with `sink` to 1 where the model has learned sinks.

        Where the pass was fused it is made now, block by block, each block checked against the model's own head outputs.
        It is held on to where it is small; else it lives as long as somebody uses it.
        """
        if self._attention is not None or not self.rebuilt:
            return self._if_kept(self._attention, "attention")
        known = vars(self).get("_made")
        weights: Tensor | None = known() if known is not None else None
        if weights is None:
            weights = self._rebuilt()
            held = weights
            vars(self)["_made"] = (lambda: held) if weights.numel() <= HELD else weakref.ref(weights)
        return weights

    @property
    def shape(self) -> tuple[int, int, int]:
        """(heads, queries, keys) of the attention, without making it."""
        if self._attention is not None:
            heads, queries, keys = self._attention.shape[-3:]
            return heads, queries, keys
        if not self.rebuilt or self._outputs is None or self.grouped_values is None:
            return self.attention.shape[-3:]  # type: ignore[return-value]  # refused with the reason
        return len(self.heads), self._outputs.shape[-2], self.grouped_values.shape[-2]

    @property
    def dtype(self) -> torch.dtype:
        """The attention's, without making it."""
        return self.attention.dtype if self._outputs is None or not self.rebuilt else self._outputs.dtype

    def rows(self, first: int, last: int) -> Tensor:
        """[head, row, key]: the attention of queries first … last − 1 and of no other.

        >>> import whence
        >>> layer = whence.trace(whence.load(), "The bank raised its rates.")[0]
        >>> layer.rows(2, 4).shape, bool(torch.equal(layer.rows(2, 4), layer.attention[:, 2:4]))
        (torch.Size([12, 2, 8]), True)
        """
        _, queries, keys = self.shape
        if not 0 <= first < last <= queries:
            raise InputError(f"rows({first}, {last}) of layer {self.index}: there are rows 0 … {queries - 1}.")
        if self._attention is not None or not self.rebuilt:
            return self.attention[..., first:last, :]
        made = self.block(first, last)._rebuilt()
        return made if made.shape[-1] == keys else torch.nn.functional.pad(made, (0, keys - made.shape[-1]))

    def _rebuilt(self) -> Tensor:
        """The attention of every row here, a block at a time."""
        heads, queries, keys = self.shape
        step = rows_at_a_time(heads, keys)
        if step >= queries or self.outputs.dim() == 4:
            return self._rows_made()
        out = self.outputs.new_zeros(heads, queries, keys)
        for first in range(0, queries, step):
            made = self.block(first, min(first + step, queries))._rows_made()
            out[:, first : first + made.shape[1], : made.shape[2]] = made
        return out

    def _rows_made(self) -> Tensor:
        """Every row here at once, checked against the head outputs."""

        def batched(t: Tensor) -> Tensor:
            return t if self.outputs.dim() == 4 else t[None]

        query, key = batched(self.queries), batched(self._if_kept(self.grouped_keys, "keys"))
        scale, cap = (self.scale, None) if self.cap is None else self.cap
        assert scale is not None
        sink = None if self.sink is None else batched(self.sink)
        weights = attention_rows(query, key, scale=scale, cap=cap, visible=self.visible, bias=self.bias, sink=sink)
        value, output = batched(self._if_kept(self.grouped_values, "values")), batched(self.outputs)
        error, tolerance = output_error(weights, value, output), tolerance_of(output.dtype)
        if not error <= tolerance:
            start = self.first_row or 0
            last = start + query.shape[-2] - 1
            raise WiringError(
                f"layer {self.index}, rows {start} … {last}: attention made from queries and keys does not give the "
                f"head outputs that the model computed (off by {error:.1e}, tolerance {tolerance:.0e}), so it is not given out."
            )
        weights = weights.to(self.outputs.dtype)
        return weights if self.outputs.dim() == 4 else weights[0]

    def block(self, first: int, last: int) -> Layer:
        """Queries first … last − 1 of this layer as a layer of its own; under a causal mask, with the keys that they see."""
        queries, keys = self.shape[1:]
        cut_keys = self.causal and queries == keys and self.first_row is None
        end = last if cut_keys else keys

        def at(t: Tensor | None, axis: int, stop: int = last, start: int = first) -> Any:
            return None if t is None else t.narrow(axis, start, stop - start)

        def pairs(t: Tensor | None) -> Tensor | None:
            if t is None:
                return None
            t = t if t.shape[-2] == 1 else at(t, -2)
            return t if t.shape[-1] == 1 else at(t, -1, end, 0)

        projection = self._projection
        if projection is not None and projection.rows is not None:
            projection = replace(projection, rows=at(projection.rows, 0))
        return replace(
            self,
            _attention=pairs(self._attention),
            _queries=at(self._queries, -2),
            grouped_keys=at(self.grouped_keys, -2, end, 0),
            grouped_values=at(self.grouped_values, -2, end, 0),
            _outputs=at(self._outputs, -2),
            visible=pairs(self.visible),
            bias=pairs(self.bias),
            sink=at(self.sink, -1),
            _projection=projection,
            first_row=(self.first_row or 0) + first,
            **{name: at(getattr(self, name), -2) for name in STATES},
        )

    def blocks(self, size: int = BLOCK) -> Iterator[Layer]:
        """The layer in blocks of rows of at most `size` weights, in order (see `block`)."""
        heads, queries, keys = self.shape
        step = rows_at_a_time(heads, keys, size)
        for first in range(0, queries, step):
            yield self if step >= queries else self.block(first, min(first + step, queries))

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
        return self.own_in(self.block_input.dtype)

    def own_in(self, dtype: torch.dtype) -> Tensor:
        """`own`, added up in that dtype: a sum that was rounded in half precision is another."""
        wiring = self.equation("residual")
        side = self._wired(self._side, "side branch").to(dtype) if wiring.parallel else None
        return wiring.carried(self.block_input.to(dtype), side)

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
        like = self.grouped_values if self._attention is None else self._attention
        return torch.ones(self.shape[-2:], dtype=torch.bool, device=None if like is None else like.device)

    def visible_of(self, head: int) -> Tensor | None:
        """[query, key]: which keys the head at this place sees; None: all of them."""
        return self.visible if self.visible is None or self.visible.dim() == 2 else self.visible[head]

    def row(self, head: int, query: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """The row of one query of the head at this place: weights [key], values [key, d_v], visible [key] (None: all)."""
        visible = self.visible_of(head)
        return self.weights_of(head, query), self.values[head], None if visible is None else visible[query]

    def weights_of(self, head: int, query: int) -> Tensor:
        """[key]: one row of the head at this place, without making any other."""
        if self._attention is not None or not self.rebuilt:
            return self.attention[head, query]
        made = self.select([self.heads[head]]).rows(query, query + 1)
        return made[0, 0]

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

    def copied(self) -> Layer:
        """The same layer with tensors of its own. The model's weights stay shared: they are the same for every text."""
        parts: dict[str, Any] = {name: own_tensor(getattr(self, name)) for name in (*OF_TEXT, *STATES)}
        return replace(self, **parts)


OF_TEXT = ("_attention", "_queries", "grouped_keys", "grouped_values", "_outputs", "visible", "bias", "sink")
"""The parts of a layer that belong to its text, besides its states."""


def repeat_heads(grouped: Tensor, heads: int) -> Tensor:
    """[kv head, token, d] → [head, token, d]; a view where nothing needs repeating."""
    groups = heads // grouped.shape[-3]
    return grouped if groups == 1 else grouped.repeat_interleave(groups, dim=-3)
