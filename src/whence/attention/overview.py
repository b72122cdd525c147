"""Which heads may be read on a text, and the sentences that say so: what `whence look` and the page show."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whence.attention.certify import TokenCertificate, certify
from whence.attention.heads import by_group, head_of
from whence.attention.identifiability import Identifiability, identifiability
from whence.attention.verdict import Verdict, verdict
from whence.core.attention.bounds import weight_bounds
from whence.core.attention.verdict import RowVerdict
from whence.core.numerics.threads import SHORT, one_thread
from whence.reading.trace import Layer, Stack, Trace
from whence.results.short_repr import short_repr


@dataclass(frozen=True)
class Overview:
    """One look at all heads: [layer, head] tensors, and the rows worth showing.

    `verdict`: which heads may be read. `width`: mean over rows of the closed-form width of the interval of the row's
    heaviest weight (an upper bound on the exact width). `worst`: an open row of some heads not to be read; `best`: a
    certain or unique row of some heads that may be; each with its certificate, and none where no head qualifies.
    """

    __repr__ = short_repr

    identifiability: Identifiability
    verdict: Verdict
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
                "one with its output, and may be read."
            )
            return [here, limit]
        share = float((rows > 0).double().mean())
        here = (
            f"This text has {n} tokens: {loose} of {heads} heads have rows that are not unique ({share:.0%} of all "
            f"rows), with up to {int(rows.max())} independent directions in which the attention can be moved without "
            "any change of the output."
        )
        return [*self.verdict.sentences(), here, limit]

    def plot(self, *, ax: Any = None) -> Any:
        """Layers by heads. See `whence.attention.plots`; returns the Axes."""
        from whence.attention.plots import plot_overview

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
            "verdict": self.verdict.to_dict(),
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


def overview(
    trace: Trace, *, worst: int = 3, best: int = 3, epsilon: float = 0.05, attention: str | None = None
) -> Overview:
    """The verdict on every head; exact intervals only for the rows that will be shown."""
    stack = trace.of(attention)
    # On a short text these are many small operations.
    with one_thread() if len(stack.tokens) <= SHORT else nullcontext():
        found = identifiability(trace, attention=attention)
    verdicts = verdict(trace, epsilon=epsilon, attention=attention)
    types = found.token_types
    special = [t for t in types if t not in ("punctuation", "rest")]
    columns = torch.tensor([types.index(t) for t in special], dtype=torch.long)
    widths = [_top_widths(layer) for layer in stack]
    width = torch.stack([w.mean(-1) for w in widths])

    def shown(names: tuple[str, ...], kinds: tuple[RowVerdict, ...], count: int) -> tuple[TokenCertificate, ...]:
        """Of the heads with these verdicts, those with the largest (or smallest) share of certain rows, one row each."""
        sign = -1 if "read" in names else 1
        heads = [at for name in names for at in verdicts.heads_that(name)]
        heads.sort(
            key=lambda at: (
                sign * float(verdicts.values[found.layers.index(at[0]), found.heads.index(at[1])].nan_to_num(1))
            )
        )
        rows = []
        for layer, head in heads[:count]:
            i, h = found.layers.index(layer), found.heads.index(head)
            query = _telling_row(stack, i, h, verdicts.extra["row_verdicts"][i, h], kinds)
            rows.append(certify(trace, layer, head, query, attention=attention))
        return tuple(rows)

    return Overview(
        found,
        verdicts,
        width,
        found.extra["raw_by_type"][..., columns].sum(-1),
        found.extra["effective_by_type"][..., columns].sum(-1),
        shown(("do not read",), (RowVerdict.OPEN,), worst),
        shown(("read", "unique"), (RowVerdict.CERTAIN, RowVerdict.UNIQUE), best),
        stack.layers[0].values.shape[-1],
        stack.name,
    )


def _top_widths(layer: Layer) -> Tensor:
    """[head, query]: the closed-form width of the interval of each row's heaviest weight."""
    weights, values, visible = by_group(layer)
    width = weight_bounds(weights, values, visible=visible).width
    return width.gather(-1, weights.argmax(-1, keepdim=True)).squeeze(-1).flatten(0, 1)


def _telling_row(stack: Stack, i: int, h: int, verdicts: Tensor, kinds: tuple[RowVerdict, ...]) -> int:
    """Of the rows of a head with one of these verdicts, the one that says most: an ordinary token, a heavy weight."""
    layer = stack.layers[i]
    weights, _, visible = head_of(layer, h)
    # Special tokens explain little, and so do the first rows of a causal map, which see few keys.
    plain = torch.tensor([not s for s in stack.tokens.special], dtype=torch.float64)
    seen = torch.full((len(weights),), weights.shape[-1]) if visible is None else visible.sum(-1)
    appeal = weights.amax(-1).to(torch.float64) * (0.2 + plain) * seen / seen.max()
    right = torch.isin(verdicts, torch.tensor([int(kind) for kind in kinds]))
    return int(torch.where(right, appeal, -1.0).argmax())
