"""How much of each attention row does the model's output pin down? Per layer, head and row, and by token type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from whence.attention.effective_attention import of_layer
from whence.attention.heads import by_group, identifying_values
from whence.core.attention.leverage import leverage
from whence.core.attention.null_space import NullSpace, null_space
from whence.reading.trace import Layer, Stack, Trace
from whence.results.result import Result

if TYPE_CHECKING:
    import pandas as pd

ROW_MEASURES = (
    "length", "rank", "simplex_rank", "null_dimension", "simplex_null_dimension", "condition", "simplex_condition",
    "null_share", "r", "width",
)  # fmt: skip


@dataclass(frozen=True)
class Identifiability(Result):
    """Null share per layer, head and row (`values`), and in `extra` everything else.

    `extra`: length, rank, simplex_rank, null_dimension, simplex_null_dimension, condition, simplex_condition,
    null_share, r (Pearson, of the row) as [layer, head, query]; head_r as [layer, head]; leverage as [layer, head,
    query, key] (or query 1 where every row sees the same keys); raw_by_type and effective_by_type as
    [layer, head, type]; with keys=True also reachable_dimension and near_tied_bound.
    """

    kind: ClassVar[str] = "identifiability"

    @property
    def token_types(self) -> tuple[str, ...]:
        return token_types(self.key_tokens or self.tokens)

    def to_frame(self) -> pd.DataFrame:
        """A line per layer, head and row: length, ranks, null dimensions, condition, leverage, null share and r."""
        import pandas as pd

        shape = self.values.shape
        index = pd.MultiIndex.from_product([self.layers, self.heads, range(shape[2])], names=list(self.axes))
        names = [n for n in self.extra if tuple(self.extra[n].shape) == tuple(shape)]
        columns = {name: self.extra[name].reshape(-1).cpu().numpy() for name in names}
        lever = self.extra["leverage"]
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


def identifiability(trace: Trace, *, keys: bool = False, attention: str | None = None) -> Identifiability:
    """Rank, null space, condition, leverage, null share and raw–effective correlation of every attention row.

    With `keys=True` also, for each row, the local dimension of the alternatives that some query could have produced
    (`reachable_dimension`; −1: undetermined) and for each head the bound of the near-tied theorem (`near_tied_bound`).

    >>> import whence
    >>> found = whence.identifiability(whence.trace(whence.load(), "The bank raised its rates."))
    >>> int(found.extra["null_dimension"].max())        # 8 tokens, heads of 32: nothing is free
    0
    """
    stack = trace.of(attention)
    layers = [_layer(layer, stack, space) for layer, space in zip(stack, _null_spaces(stack), strict=True)]
    names = list(layers[0])
    extra = {name: torch.stack([found[name] for found in layers]) for name in names}
    if keys:
        from whence.attention.key_constraint import key_constraint

        found_keys = [key_constraint(layer) for layer in stack]
        extra |= {name: torch.stack([f[name] for f in found_keys]) for name in found_keys[0]}
    return Identifiability(
        values=extra["null_share"],
        axes=("layer", "head", "query"),
        tokens=stack.tokens,
        key_tokens=None if stack.key_tokens is stack.tokens else stack.key_tokens,
        layers=tuple(layer.index for layer in stack),
        heads=stack.layers[0].heads,
        provenance=trace.provenance.by("identifiability", keys=keys, attention=stack.name),
        extra=extra,
    )


def _null_spaces(stack: Stack) -> list[NullSpace]:
    """The null space of every layer. Layers under one mask go together: small problems are faster in one batch."""
    parts = [by_group(layer)[1:] for layer in stack]
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


def _layer(layer: Layer, stack: Stack, space: NullSpace) -> dict[str, Tensor]:
    raw = layer.attention
    heads, n_query, _ = raw.shape
    weights, values, visible = by_group(layer)
    group = weights.shape[1]
    full = (*weights.shape[:2], n_query)

    def per_row(t: Tensor) -> Tensor:
        return (t if visible is not None else t[..., None]).expand(full).reshape(heads, n_query)

    found = {name: per_row(t) for name, t in space.to_dict().items() if name != "largest"}
    effective = of_layer(layer)
    gap = (raw - effective).abs().sum(-1)
    found["null_share"] = (gap / raw.abs().sum(-1)).to(torch.float64)
    found["r"], found["head_r"] = _correlations(raw, effective, layer.visible)
    lever = leverage(identifying_values(layer)[:, None], visible=visible)
    if visible is None:
        lever = lever[..., None, :]
    found["leverage"] = lever.expand(values.shape[0], group, *lever.shape[-2:]).flatten(0, 1).to(torch.float32)
    kinds = stack.key_tokens.kinds()
    types = token_types(stack.key_tokens)
    picks = torch.tensor([[k == t for t in types] for k in kinds], dtype=raw.dtype, device=raw.device)
    found["raw_by_type"] = raw.mean(1) @ picks
    found["effective_by_type"] = effective.mean(1) @ picks
    return found


def _correlations(raw: Tensor, effective: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Pearson r of raw against effective over the visible keys, per row [head, query] and per head [head].

    From five sums, in float64, without copies of the maps: hidden keys are zero on both sides and add nothing.
    A row or head whose weights are all equal has no r (NaN).
    """
    n = raw.shape[-1] if visible is None else visible.sum(-1)
    count = torch.as_tensor(n, dtype=torch.float64, device=raw.device).expand(raw.shape[:-1])
    sums = [
        t.to(torch.float64)
        for t in (
            raw.sum(-1, dtype=torch.float64),
            effective.sum(-1, dtype=torch.float64),
            torch.linalg.vecdot(raw, raw),
            torch.linalg.vecdot(effective, effective),
            torch.linalg.vecdot(raw, effective),
        )
    ]
    return _r(count, sums), _r(count.sum(-1), [s.sum(-1) for s in sums])


def _r(n: Tensor, sums: list[Tensor]) -> Tensor:
    a, e, aa, ee, ae = sums
    covariance = ae - a * e / n
    spread = ((aa - a * a / n).clamp(min=0) * (ee - e * e / n).clamp(min=0)).sqrt()
    return torch.where(spread > 0, covariance / spread, torch.nan).clamp(-1, 1)
