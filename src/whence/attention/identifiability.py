"""How much of each attention row does the model's output pin down? Per layer, head and row, and by token type."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from whence.attention.effective_attention import of_layer
from whence.attention.heads import by_group, key_labels, sink_last, values_by_group
from whence.core.attention.leverage import leverage as leverage_of
from whence.core.attention.null_space import NullSpace, null_space
from whence.core.numerics.tolerances import measured_in
from whence.reading.joined_layers import JoinedLayers
from whence.reading.streaming import Stream
from whence.reading.trace import Layer, Stack, Trace
from whence.results.declared import Array
from whence.results.result import Result

if TYPE_CHECKING:
    import pandas as pd

COUNTS = ("length", "rank", "simplex_rank", "null_dimension", "simplex_null_dimension")
_CACHED = 1 << 14  # numbers worked on together
_ROWS = 1 << 22  # weights of a block of rows: 16 MB in float32
CONDITIONS = ("condition", "simplex_condition")


@dataclass(frozen=True)
class Identifiability(Result):
    """Null share per layer, head and row (`values`), and in `extra` everything else.

    `extra`: length, rank, simplex_rank, null_dimension, simplex_null_dimension, null_share = ‖a − a⊥‖₁/‖a‖₁ (it can
    exceed 1), r (Pearson, of the row) as [layer, head, query]; head_r as [layer, head]; leverage as [layer, head,
    query, key] (or query 1 where every row of every layer sees the same keys); raw_by_type and effective_by_type as
    [layer, head, type]; with condition=True also condition and simplex_condition, with keys=True also
    reachable_dimension, near_tied_bound and what they rest on. A learned sink counts as a key, the last one.
    """

    kind: ClassVar[str] = "identifiability"
    arrays: ClassVar[Mapping[str, Array]] = {
        "values": Array("layer head query"),
        **dict.fromkeys(COUNTS, Array("layer head query", "integer")),
        **dict.fromkeys(("null_share", "r"), Array("layer head query")),
        "head_r": Array("layer head"),
        **dict.fromkeys(("raw_by_type", "effective_by_type"), Array("layer head type")),
        "leverage": Array("layer head query? key", needed=False),
        **dict.fromkeys(CONDITIONS, Array("layer head query", needed=False)),
        "reachable_dimension": Array("layer head query", "integer", needed=False),
        "reachable_ratio": Array("layer head query", needed=False),
        "near_tied_bound": Array("layer head", needed=False),
        "tied": Array("layer head", "boolean", needed=False),
    }

    @property
    def token_types(self) -> tuple[str, ...]:
        return token_types(self.key_tokens or self.tokens)

    def _sizes(self) -> dict[str, int]:
        return {**super()._sizes(), "type": len(self.token_types)}

    def to_frame(self) -> pd.DataFrame:
        """A line per layer, head and row: length, ranks, null dimensions, leverage, null share and r."""
        import pandas as pd

        shape = self.values.shape
        index = pd.MultiIndex.from_product([self.layers, self.heads, range(shape[2])], names=list(self.axes))
        names = [n for n in self.extra if tuple(self.extra[n].shape) == tuple(shape)]
        columns = {name: self.extra[name].reshape(-1).cpu().numpy() for name in names}
        if (lever := self.extra.get("leverage")) is not None:
            seen = self.extra["length"].to(torch.float64)
            columns["mean_leverage"] = (lever.sum(-1).expand(shape) / seen).reshape(-1).cpu().numpy()
        frame = pd.DataFrame(columns, index=index).reset_index()
        frame.insert(3, "query_token", [self.tokens[i] for i in frame["query"]])
        return frame

    def by_token_type(self) -> pd.DataFrame:
        """Attention to [CLS], [SEP], punctuation and the rest, raw and effective, by layer: Brunner's Figure 1.

        Each number is the mean over heads and rows of the attention that goes to all tokens of that type.
        """
        import pandas as pd

        raw, effective = (self.extra[f"{kind}_by_type"].mean(dim=1) for kind in ("raw", "effective"))
        rows = [
            {"layer": layer, "type": kind, "raw": float(raw[i, t]), "effective": float(effective[i, t])}
            for i, layer in enumerate(self.layers)
            for t, kind in enumerate(self.token_types)
        ]
        return pd.DataFrame(rows)


def token_types(tokens: Any) -> tuple[str, ...]:
    """The types that occur, special tokens first, then punctuation, then the rest."""
    kinds = tokens.kinds()
    special = list(dict.fromkeys(k for k in kinds if k not in ("punctuation", "rest")))
    return (*special, *(k for k in ("punctuation", "rest") if k in kinds))


@overload
def identifiability(
    trace: Trace | Stream, *, keys: bool = ..., condition: bool = ..., leverage: bool | None = ..., attention: str | None = ...,
) -> Identifiability: ...  # fmt: skip
@overload
def identifiability(
    trace: Sequence[Trace], *, keys: bool = ..., condition: bool = ..., leverage: bool | None = ...,
    attention: str | None = ...,
) -> list[Identifiability]: ...  # fmt: skip
def identifiability(
    trace: Trace | Stream | Sequence[Trace],
    *,
    keys: bool = False,
    condition: bool = False,
    leverage: bool | None = None,
    attention: str | None = None,
) -> Identifiability | list[Identifiability]:
    """Rank, null space, leverage, null share and raw–effective correlation of every attention row.

    With `condition=True` also the condition numbers of V and V − 1μᵀ for each row (one factorisation a row under a
    causal mask). With `keys=True` also, for each row, the local dimension of the alternatives that some query could
    have produced (`reachable_dimension`; −1: undetermined) and for each head the bound of the near-tied theorem
    (`near_tied_bound`). leverage=False leaves the leverage out, a third of the work; None: it is computed for a trace and
    left out of a stream, where it would be a number for every weight. Long texts are worked on in blocks of rows; of
    several traces, given as a list, those of one length go together, and a list comes back.

    >>> import whence
    >>> found = whence.identifiability(whence.trace(whence.load(), "The bank raised its rates."))
    >>> int(found.extra["null_dimension"].max())        # 8 tokens, heads of 32: nothing is free
    0
    """
    if isinstance(trace, Stream):
        options: dict[str, Any] = {"keys": keys, "condition": condition, "leverage": bool(leverage)}
        rows = JoinedLayers(lambda piece: identifiability(piece, **options))
        joined: Identifiability = trace.read(rows, attention)
        return joined
    names = COUNTS + CONDITIONS if condition else COUNTS
    if not isinstance(trace, Trace):
        return [
            _result(one, one.of(attention), measures, keys)
            for one, measures in _of_texts(list(trace), attention, names, leverage is not False)
        ]
    stack = trace.of(attention)
    return _result(trace, stack, _measures(stack, names, leverage is not False), keys)


def _of_texts(
    traces: list[Trace], attention: str | None, names: tuple[str, ...], leverage: bool
) -> list[tuple[Trace, list[dict[str, Tensor]]]]:
    """The measures of every layer of every text; texts of one length go together, as more heads of one layer."""
    order = sorted(range(len(traces)), key=lambda i: len(traces[i].of(attention).tokens))
    places: dict[int, list[dict[str, Tensor]]] = {}
    for group in _alike([traces[i].of(attention) for i in order]):
        stacks = [traces[order[i]].of(attention) for i in group]
        together = stacks[0] if len(stacks) == 1 else _as_heads(stacks)
        layers = _measures(together, names, leverage)
        for number, i in enumerate(group):
            heads = len(stacks[0].layers[0].heads)
            own = slice(number * heads, (number + 1) * heads)
            places[order[i]] = [{name: t[own] for name, t in layer.items()} for layer in layers]
    return [(trace, places[i]) for i, trace in enumerate(traces)]


def _alike(stacks: list[Stack]) -> list[list[int]]:
    """Which neighbours go together: those of one length, read alike, with the same mask and no sink, of a bounded size."""
    groups: list[list[int]] = []
    for i, stack in enumerate(stacks):
        last = None if not groups else stacks[groups[-1][0]]
        size = max(math.prod(layer.shape) for layer in stack)
        if last is not None and (len(groups[-1]) + 1) * size <= _ROWS and _same_reading(last, stack):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _same_reading(one: Stack, other: Stack) -> bool:
    def alike(a: Layer, b: Layer) -> bool:
        facts = [(x.index, x.heads, x.shape, x.rebuilt, x.scale, x.cap, x.dtype, x.causal) for x in (a, b)]
        plain = all(x.sink is None and x.bias is None and (x.visible is None or x.visible.dim() == 2) for x in (a, b))
        projection = a._projection
        same = projection is b._projection and (
            projection is None or (projection.full_rank and projection.rows is None)
        )
        return facts[0] == facts[1] and plain and same and _same_mask(a.visible, b.visible)

    return len(one) == len(other) and all(alike(a, b) for a, b in zip(one, other, strict=True))


def _as_heads(stacks: list[Stack]) -> Stack:
    """Several texts of one length as one, each text's heads after those of the one before."""

    def merged(layers: tuple[Layer, ...]) -> Layer:
        parts: dict[str, Any] = {}
        for name in ("_attention", "_queries", "grouped_keys", "grouped_values", "_outputs"):
            tensors = [getattr(layer, name) for layer in layers]
            parts[name] = None if any(t is None for t in tensors) else torch.cat(tensors)
        return replace(layers[0], heads=tuple(range(len(layers) * len(layers[0].heads))), **parts)

    return replace(stacks[0], layers=tuple(merged(layers) for layers in zip(*stacks, strict=True)))


def _measures(stack: Stack, names: tuple[str, ...], leverage: bool) -> list[dict[str, Tensor]]:
    """By layer, everything that is measured by head: [head, …]."""
    columns = len(key_labels(stack))
    spaces = zip(stack, _null_spaces(stack), strict=True)
    return [_layer(layer, columns, space, names, leverage) for layer, space in spaces]


def _result(trace: Trace, stack: Stack, layers: list[dict[str, Tensor]], keys: bool) -> Identifiability:
    labels = key_labels(stack)
    kinds, types = labels.kinds(), token_types(labels)
    picks = torch.tensor([[k == t for t in types] for k in kinds], dtype=torch.float64)
    for measures in layers:
        for kind in ("raw", "effective"):
            mass = measures.pop(f"{kind}_by_key") @ picks
            measures[f"{kind}_by_type"] = mass.to(measured_in(stack.layers[0].dtype))
    extra = {name: _stacked([found[name] for found in layers]) for name in layers[0]}
    if keys:
        from whence.attention.key_constraint import key_constraint

        found_keys = [key_constraint(layer) for layer in stack]
        extra |= {name: torch.stack([f[name] for f in found_keys]) for name in found_keys[0]}
    origin = trace.provenance.by("identifiability", keys=keys, attention=stack.name)
    axes = ("layer", "head", "query")
    return Identifiability.of_stack(stack, extra["null_share"], origin, axes=axes, key_tokens=labels, extra=extra)


def _stacked(layers: list[Tensor]) -> Tensor:
    """[layer, …]. Layers with one visible set for all rows may stand beside windowed ones: they are repeated by row."""
    if len({t.shape for t in layers}) > 1:
        layers = list(torch.broadcast_tensors(*layers))
    return torch.stack(layers)


def _null_spaces(stack: Stack) -> list[NullSpace]:
    """The null space of every layer. Layers under one mask go together: small problems are faster in one batch."""
    parts = [values_by_group(layer) for layer in stack]
    found: list[NullSpace | None] = [None] * len(parts)
    for first, (values, visible) in enumerate(parts):
        if found[first] is not None:
            continue
        alike = [
            i
            for i, (v, m) in enumerate(parts)
            if found[i] is None and v.shape == values.shape and v.dtype == values.dtype and _same_mask(m, visible)
        ]
        space = null_space(torch.stack([parts[i][0] for i in alike]), visible=visible)
        for place, i in enumerate(alike):
            found[i] = space[place]
    return [space for space in found if space is not None]


def _same_mask(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and a.shape == b.shape and torch.equal(a, b))


def _layer(
    layer: Layer, columns: int, space: NullSpace, names: tuple[str, ...], with_leverage: bool
) -> dict[str, Tensor]:
    """columns: keys of the result, a sink included."""
    values, visible = values_by_group(layer)
    heads, n_query, _ = layer.shape
    full = (values.shape[0], heads // values.shape[0], n_query)

    def per_row(t: Tensor) -> Tensor:
        return (t if visible is not None else t[..., None]).expand(full).reshape(heads, n_query)

    measures = {name: per_row(getattr(space, name)) for name in names}
    blocks = [_block(block, columns, bool(space.null_dimension.any())) for block in layer.blocks(_ROWS)]
    gaps, sums = (torch.cat([block[i] for block in blocks], -1) for i in (0, 1))
    seen = measures["length"].to(torch.float64)
    measures["null_share"], measures["r"], measures["head_r"] = gaps, _r(seen, sums), _r(seen.sum(-1), sums.sum(-1))
    for i, kind in ((2, "raw"), (3, "effective")):
        measures[f"{kind}_by_key"] = torch.stack([block[i] for block in blocks]).sum(0) / n_query
    if with_leverage:
        lever = leverage_of(values, visible=visible)
        if visible is None:
            lever = lever[..., None, :]
        lever = lever.expand(*full[:2], *lever.shape[-2:]).flatten(0, 1)
        measures["leverage"] = sink_last(layer, lever, columns).to(torch.float32)
    return measures


def _block(layer: Layer, columns: int, free: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Null shares and sums of some rows (`row_sums`), and the raw and effective mass on each of `columns` keys, by head.

    free: whether any row has a null space; values of full row rank have none, and attention is its own effective part.
    """
    weights = by_group(layer)[0]
    raw = weights.flatten(0, 1).to(measured_in(weights.dtype))
    width = columns if layer.sink is not None else raw.shape[-1]  # under a causal mask, the keys that they see
    raw = sink_last(layer, raw, width)
    effective = of_layer(layer, columns=width) if free else raw
    gaps, sums = row_sums(raw, effective)
    mass = [pad(t.sum(1, dtype=torch.float64), (0, columns - width)) for t in (raw, effective)]
    return gaps, sums, mass[0], mass[1]


def row_sums(raw: Tensor, effective: Tensor) -> tuple[Tensor, Tensor]:
    """‖a − a⊥‖₁/‖a‖₁ of each row [head, query], and what r is made of: Σa, Σa⊥, Σa², Σa⊥², Σaa⊥ [5, head, query]; float64.

    Hidden keys are 0 on both sides and enter no sum.
    """
    gaps, sums = [], []
    # As many heads at a time as keep their float64 copies in the cache.
    heads = max(1, _CACHED // max(1, raw[0].numel()))
    for a, e in zip(raw.split(heads), effective.split(heads), strict=True):
        a64, e64 = a.to(torch.float64), e.to(torch.float64)
        gaps.append((a64 - e64).abs().sum(-1) / a64.abs().sum(-1))
        sums.append(torch.stack([t.sum(-1) for t in (a64, e64, a64 * a64, e64 * e64, a64 * e64)]))
    return torch.cat(gaps), torch.cat(sums, 1)


def _r(n: Tensor, sums: Tensor) -> Tensor:
    a, e, aa, ee, ae = sums
    covariance = ae - a * e / n
    spread = ((aa - a * a / n).clamp(min=0) * (ee - e * e / n).clamp(min=0)).sqrt()
    return torch.where(spread > 0, covariance / spread, torch.nan).clamp(-1, 1)
