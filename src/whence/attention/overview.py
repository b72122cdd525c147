"""Which heads may be read and which must not, and the sentences that say so: what `whence look` and the page show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whence.attention.certify import TokenCertificate, certify
from whence.attention.heads import by_group
from whence.attention.identifiability import Identifiability, identifiability
from whence.core.attention.bounds import weight_bounds
from whence.reading.trace import Layer, Stack, Trace

HEADS, ROWS = 4, 2  # heads tried for each one shown, and rows of each: exact intervals for these only
LONG = 192  # beyond so many tokens a linear program takes its time: half as many heads, one row of each


@dataclass(frozen=True)
class Overview:
    """One look at all heads: [layer, head] tensors, and the rows worth showing.

    `width`: mean over rows of the closed-form width of the interval of the row's heaviest weight (an upper bound on
    the exact width). `worst`, `best`: certificates of one telling row of each of the chosen heads.
    """

    identifiability: Identifiability
    width: Tensor
    special_mass: Tensor
    effective_special_mass: Tensor
    worst: tuple[TokenCertificate, ...]
    best: tuple[TokenCertificate, ...]
    head_size: int
    stack: str

    @property
    def tokens(self) -> int:
        return len(self.identifiability.tokens)

    @property
    def free(self) -> Tensor:
        """[layer, head]: the largest simplex null dimension over the rows of each head."""
        return self.identifiability.extra["simplex_null_dimension"].amax(dim=-1)

    def sentences(self) -> list[str]:
        """What is true of the whole text, in plain words."""
        extra = self.identifiability.extra
        n, size = self.tokens, self.head_size
        heads = self.free.numel()
        rows = extra["simplex_null_dimension"]
        loose = int((self.free > 0).sum())
        limit = (
            f"A head's values have {size} dimensions, and a row sums to 1, so at most {size + 1} tokens can have one and "
            "only one attention row."
        )
        if loose == 0:
            here = (
                f"This text has {n} tokens and the measured ranks are full: every row of all {heads} heads is the only "
                "one with its output."
            )
        else:
            share = float((rows > 0).double().mean())
            here = (
                f"This text has {n} tokens: {loose} of {heads} heads have rows that are not unique ({share:.0%} of all "
                f"rows), with up to {int(rows.max())} independent directions in which the attention can be moved without "
                "any change of the output."
            )
        return [limit, here]

    def plot(self, *, ax: Any = None) -> Any:
        """Layers by heads. See `whence.results.plotting_attention`; returns the Axes."""
        from whence.results.plotting_attention import plot_overview

        return plot_overview(self, ax)

    def to_dict(self) -> dict[str, Any]:
        found = self.identifiability
        return {
            "tokens": list(found.tokens),
            "stack": self.stack,
            "head_size": self.head_size,
            "layers": [
                {
                    "layer": layer,
                    "rank": _span(found.extra["rank"][i]),
                    "null_dimension": _span(found.extra["null_dimension"][i]),
                    "simplex_null_dimension": _span(found.extra["simplex_null_dimension"][i]),
                    "null_share": float(found.values[i].median()),
                    "r": found.extra["head_r"][i].tolist(),
                    "width": self.width[i].tolist(),
                    "special_mass": self.special_mass[i].tolist(),
                    "effective_special_mass": self.effective_special_mass[i].tolist(),
                }
                for i, layer in enumerate(found.layers)
            ],
            "findings": self.sentences(),
            "worst": [_brief(c) for c in self.worst],
            "best": [_brief(c) for c in self.best],
            "provenance": found.provenance.to_dict(),
        }


def _span(t: Tensor) -> list[int]:
    return [int(t.min()), int(t.max())]


def _brief(certificate: TokenCertificate) -> dict[str, Any]:
    assert certificate.tokens is not None
    assert certificate.key_tokens is not None
    return {
        "layer": certificate.layer,
        "head": certificate.head,
        "query": certificate.query,
        "query_token": certificate.tokens[certificate.query],
        "dimension": certificate.dimension,
        "intervals": [
            {"key": k, "token": certificate.key_tokens[k], "weight": w, "lower": lo, "upper": hi}
            for k, w, lo, hi in zip(
                certificate.keys.tolist(),
                certificate.weights.tolist(),
                certificate.lower.tolist(),
                certificate.upper.tolist(),
                strict=True,
            )
        ],
        "outside": certificate.outside,
        "sentences": certificate.sentences(),
        "checked": certificate.check(),
    }


def overview(trace: Trace, *, worst: int = 3, best: int = 3, attention: str | None = None) -> Overview:
    """Closed forms for every head; exact intervals only for the rows that will be shown."""
    stack = trace.of(attention)
    found = identifiability(trace, attention=attention)
    widths = [_top_widths(layer) for layer in stack]
    width = torch.stack([w.mean(-1) for w in widths])
    types = found.token_types
    special = [t for t in types if t not in ("punctuation", "rest")]
    columns = torch.tensor([types.index(t) for t in special], dtype=torch.long)
    order = width.flatten().argsort(descending=True)
    shown: dict[bool, list[TokenCertificate]] = {}
    for is_worst, count in ((True, worst), (False, best)):
        tried = HEADS if len(stack.key_tokens) <= LONG else HEADS // 2
        picks = (order if is_worst else order.flip(0))[: count * tried].tolist()
        places = [divmod(pick, width.shape[1]) for pick in picks]
        rows = [_telling_row(trace, stack, i, h, widths, is_worst, attention) for i, h in places]
        rows.sort(key=_spread, reverse=is_worst)
        shown[is_worst] = rows[:count]
    return Overview(
        found,
        width,
        found.extra["raw_by_type"][..., columns].sum(-1),
        found.extra["effective_by_type"][..., columns].sum(-1),
        tuple(shown[True]),
        tuple(shown[False]),
        stack.layers[0].values.shape[-1],
        stack.name,
    )


def _top_widths(layer: Layer) -> Tensor:
    """[head, query]: the closed-form width of the interval of each row's heaviest weight."""
    weights, values, visible = by_group(layer)
    width = weight_bounds(weights, values, visible=visible).width.flatten(0, 1)
    return width.gather(-1, layer.attention.argmax(-1, keepdim=True)).squeeze(-1)


def _spread(certificate: TokenCertificate) -> float:
    return float((certificate.upper - certificate.lower).max())


def _telling_row(
    trace: Trace, stack: Stack, i: int, h: int, widths: list[Tensor], is_worst: bool, attention: str | None
) -> TokenCertificate:
    """Of a few promising rows of a head, the one with the widest exact interval (or the narrowest)."""
    layer = stack.layers[i]
    heaviest = layer.attention[h].amax(-1).to(torch.float64)
    # Rows of ordinary tokens with a weight worth reading come first; special tokens explain little.
    plain = torch.tensor([not s for s in stack.tokens.special], dtype=torch.float64)
    width = widths[i][h]
    appeal = heaviest * (0.2 + plain) * (width if is_worst else 1.0 - width.clamp(max=1.0))
    if layer.visible is not None:  # the first rows of a causal map see few keys; what is certain there says little
        seen = (layer.visible if layer.visible.dim() == 2 else layer.visible[h]).sum(-1)
        appeal = appeal * seen / seen.max()
    rows = appeal.argsort(descending=True)[: ROWS if len(stack.key_tokens) <= LONG else 1].tolist()
    found = [certify(trace, layer.index, layer.heads[h], row, top=3, orders=False, attention=attention) for row in rows]
    return (max if is_worst else min)(found, key=_spread)
