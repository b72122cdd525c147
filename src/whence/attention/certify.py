"""In what interval could this weight lie? Certificates for rows and heads of a trace, with their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from whence.attention.heads import find_row, head_of, key_labels, row_of
from whence.core.attention.certificate import Certificate, certify_row
from whence.core.attention.head_certificate import HeadCertificate, certify_head
from whence.core.numerics.tolerances import measured_in
from whence.reading.joined_layers import ChosenLayer
from whence.reading.streaming import Stream
from whence.reading.trace import Trace
from whence.results.labels import Tokens
from whence.results.provenance import Provenance
from whence.results.short_repr import short_repr

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class TokenCertificate(Certificate):
    """A certificate that knows which row of which head it speaks of."""

    __repr__ = short_repr

    layer: int = -1
    head: int = -1
    query: int = -1
    tokens: Tokens | None = None
    key_tokens: Tokens | None = None
    provenance: Provenance | None = None
    exact: TokenCertificate | None = None  # with a tolerance: the same row without one

    @property
    def widest(self) -> int:
        """Which of `keys` has the widest interval."""
        return int((self.upper - self.lower).argmax())

    def sentence(self, k: int) -> str:
        """What is proved of the k-th of `keys`, in words."""
        assert self.tokens is not None
        assert self.key_tokens is not None
        key, weight = int(self.keys[k]), float(self.weights[k])
        low, high = float(self.lower[k]), float(self.upper[k])
        digits = 3 if 0.005 <= high - low < 0.02 else 2  # two ends that read the same would say nothing
        begin = (
            f"Layer {self.layer} head {self.head} puts {weight:.{digits}f} on {self.key_tokens.name(key)} "
            f"from {self.tokens.name(self.query)}"
        )
        if self.dimension == 0 and self.tolerance == 0:
            return f"{begin}; no other value would give the same output."
        what = "the same output" if self.tolerance == 0 else f"an output within {self.tolerance:.0%}"
        if high - low < 0.005:
            return f"{begin}; whatever gives {what} is within {high - low:.0e} of that."
        return f"{begin}; any value from {low:.{digits}f} to {high:.{digits}f} would give {what}."

    def sentences(self) -> list[str]:
        """What is proved of each of the heaviest weights, in words."""
        return [self.sentence(k) for k in range(len(self.keys))]

    def to_frame(self) -> pd.DataFrame:
        frame = super().to_frame()
        assert self.key_tokens is not None
        frame.insert(1, "token", [self.key_tokens[int(k)] for k in frame["key"]])
        return frame

    def to_dict(self) -> dict[str, Any]:
        data = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("tokens", "key_tokens", "provenance", "exact")
        }
        numbers = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in data.items()}
        assert self.tokens is not None
        assert self.key_tokens is not None
        assert self.provenance is not None
        numbers["query_token"] = self.tokens[self.query]
        numbers["key_tokens"] = list(self.key_tokens)
        numbers["provenance"] = self.provenance.to_dict()
        numbers["checked"] = self.check()
        numbers["exact"] = None if self.exact is None else self.exact.to_dict()
        return numbers


def certify(
    trace: Trace | Stream,
    layer: int,
    head: int,
    query: int | str,
    top: int | None = 5,
    tolerance: float = 0.0,
    *,
    orders: bool = True,
    attention: str | None = None,
) -> TokenCertificate:
    """The exact interval of each of the heaviest weights of one row, and what else is certain, with proofs.

    `query`: a position, or a token that stands once in the text. `top`: how many weights; None, all. `tolerance`:
    allow the head's contribution to the output to move by this share of its root mean square, per coordinate; the answer
    without it comes along as `exact`.
    On a stream the pass ends at that layer, and no other row of attention is made.
    `orders`: also say which of these weights are certainly above which. `Certificate.check()` verifies all of it
    again without a solver.

    >>> import whence
    >>> trace = whence.trace(whence.load(), "The bank raised its rates.")
    >>> row = whence.certify(trace, layer=0, head=0, query="bank")
    >>> row.dimension, row.check()                 # 8 tokens, heads of 32: this row is unique
    (0, True)
    """
    if isinstance(trace, Stream):
        piece = trace.read(ChosenLayer(layer), attention)
        return certify(piece, layer, head, query, top, tolerance, orders=orders, attention=attention)
    stack, found, place, row = find_row(trace, layer, head, query, attention)
    weights, values, visible = row_of(found, place, row)
    if tolerance > 0 and found._projection is not None:
        # A tolerance is meant on what the head adds to the block's output, so it is put on T = V W.
        kind = measured_in(values.dtype)
        values = pad(found.values[place], (0, 0, 0, len(weights) - found.values.shape[1])).to(kind)
        projection = found.row_projection
        rotated = values if projection.rows is None else values @ projection.rows[row].to(kind)
        values = rotated @ projection.weight[place].to(kind)
    plain = certify_row(weights, values, top=top, tolerance=tolerance, visible=visible, orders=orders)
    exact = certify(trace, layer, head, row, top, orders=orders, attention=attention) if tolerance > 0 else None
    return TokenCertificate(
        **{name: getattr(plain, name) for name in plain.__dataclass_fields__},
        layer=layer,
        head=head,
        query=row,
        tokens=stack.tokens,
        key_tokens=key_labels(stack),
        provenance=trace.provenance.by(
            "certify", layer=layer, head=head, query=row, top=top, tolerance=tolerance, attention=stack.name
        ),
        exact=exact,
    )


def certify_whole_head(
    trace: Trace, layer: int, head: int, *, rows: int = 24, attention: str | None = None
) -> HeadCertificate:
    """Proved intervals for every weight of every row of a head, from the duals of a few rows."""
    _, found, place, _ = find_row(trace, layer, head, 0, attention)
    weights, values, visible = head_of(found, place)
    return certify_head(weights, values, rows=rows, visible=visible)
