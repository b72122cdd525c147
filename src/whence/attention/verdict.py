"""May this head be read on this text? Absolute verdicts, to an ε that is shown, over rows and never by rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from whence.attention.heads import head_of
from whence.core.attention.verdict import RowVerdict, check_epsilon, rows_not_unique, unique_rows
from whence.core.numerics.threads import one_thread, workers_for
from whence.errors import InputError
from whence.reading.trace import Layer, Trace
from whence.results.declared import Array
from whence.results.labels import Tokens
from whence.results.result import Result

if TYPE_CHECKING:
    import pandas as pd

READ, AVOID = 0.95, 0.5
VERDICTS = ("unique", "read", "careful", "do not read", "flat")
COUNTS = ("unique", "certain", "flat", "open")


@dataclass(frozen=True)
class Verdict(Result):
    """`values` [layer, head]: the share of certain rows among those that are neither unique nor flat (NaN: none are).

    `extra`: unique [layer, head], how many of all rows are; certain, flat, open [layer, head], how many of the rows
    looked at are; sampled and rows [layer, head], how many rows that are not unique were looked at, and of how many;
    row_verdicts [layer, head, query] (`RowVerdict`; −1: not looked at); epsilon.
    """

    kind: ClassVar[str] = "verdict"
    arrays: ClassVar[Mapping[str, Array]] = {
        "values": Array("layer head"),
        **dict.fromkeys((*COUNTS, "sampled", "rows"), Array("layer head", "integer")),
        "row_verdicts": Array("layer head query", "integer"),
        "epsilon": Array(""),
    }

    @property
    def epsilon(self) -> float:
        """What counts as a weight, as certain, and as outweighing."""
        return float(self.extra["epsilon"])

    def of(self, layer: int, head: int) -> str:
        """One of "unique", "read", "careful", "do not read", "flat"."""
        return self._verdict(self.layers.index(layer), self.heads.index(head))

    def _verdict(self, i: int, h: int) -> str:
        if int(self.extra["rows"][i, h]) == 0:
            return "unique"
        share = float(self.values[i, h])
        if np.isnan(share):
            return "flat"
        return "read" if share >= READ else "careful" if share >= AVOID else "do not read"

    def names(self) -> list[list[str]]:
        """The verdicts: a list for each layer, with a word for each head."""
        return [[self._verdict(i, h) for h in range(len(self.heads))] for i in range(len(self.layers))]

    def heads_that(self, verdict: str) -> list[tuple[int, int]]:
        """Layer and head of those with this verdict."""
        if verdict not in VERDICTS:
            raise InputError(f"verdict {verdict!r} is unknown; there are {', '.join(VERDICTS)}.")
        return [
            (layer, head)
            for layer, line in zip(self.layers, self.names(), strict=True)
            for head, name in zip(self.heads, line, strict=True)
            if name == verdict
        ]

    def interval(self, layer: int, head: int) -> tuple[float, float]:
        """The share of certain rows of all rows, from those looked at: Wilson's 95 % interval (a point: all were)."""
        i, h = self.layers.index(layer), self.heads.index(head)
        certain, wrong = int(self.extra["certain"][i, h]), int(self.extra["open"][i, h])
        share = float(self.values[i, h])
        if int(self.extra["sampled"][i, h]) == int(self.extra["rows"][i, h]) or certain + wrong == 0:
            return share, share
        return wilson(certain, certain + wrong)

    def sentence(self, layer: int, head: int) -> str:
        """The verdict on one head, with its counts."""
        i, h = self.layers.index(layer), self.heads.index(head)
        unique, certain, flat, loose = (int(self.extra[name][i, h]) for name in COUNTS)
        sampled, rows = int(self.extra["sampled"][i, h]), int(self.extra["rows"][i, h])
        begin = f"Layer {layer} head {head}: {self.of(layer, head)}"
        parts = [f"{unique} of {len(self.tokens)} rows are unique"] if unique and rows else []
        if rows == 0:
            return f"{begin}; every row is the only one with its output."
        if certain + loose:
            sample = "" if sampled == rows else f" (a sample of {sampled} of {rows}"
            if sample:
                low, high = self.interval(layer, head)
                sample += f"; 95 % interval {low:.2f}–{high:.2f})"
            parts.append(
                f"{certain} of {certain + loose} rows with a weight above {self.epsilon:g} are certain{sample}"
            )
        if flat:
            parts.append(f"{flat} are flat")
        return f"{begin}; {', '.join(parts)}."

    def sentences(self) -> list[str]:
        """How many heads may be read, and which; none where none may."""
        total = len(self.layers) * len(self.heads)
        count = {name: self.heads_that(name) for name in VERDICTS}
        good = [*count["unique"], *count["read"]]
        eps = f"{self.epsilon:g}"
        if len(count["unique"]) == total:
            return [f"All {total} heads may be read: every row is the only one with its output."]
        which = _listed(good)
        first = (
            f"{len(good)} of {total} heads may be read on this text: {which}."
            if good
            else f"None of the {total} heads may be read on this text."
        )
        rule = (
            f"Read: at least {READ:.0%} of a head's rows with a weight above {eps} are certain, which means that in every "
            f"attention row with the same output the heaviest weight stays within {eps} and no other key outweighs it "
            f"by more. That a row is not unique does not forbid reading it: all its alternatives may be this close."
        )
        rest = (
            f"{len(count['careful'])} with care, {len(count['do not read'])} not (fewer than half of their rows are "
            f"certain), {len(count['flat'])} are flat (no weight can exceed {eps})."
        )
        return [first, rest, rule]

    def to_frame(self) -> pd.DataFrame:
        """A line for each head: verdict, counts, share of certain rows and its interval."""
        import pandas as pd

        lines = []
        for i, layer in enumerate(self.layers):
            for h, head in enumerate(self.heads):
                low, high = self.interval(layer, head)
                counts = {name: int(self.extra[name][i, h]) for name in (*COUNTS, "sampled", "rows")}
                share = float(self.values[i, h])
                lines.append(
                    {"layer": layer, "head": head, "verdict": self._verdict(i, h), **counts, "share": share}
                    | {"low": low, "high": high}
                )
        return pd.DataFrame(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and words, for JSON."""
        lines = self.to_frame().to_dict("records")
        for line in lines:
            for name in ("share", "low", "high"):
                line[name] = None if np.isnan(line[name]) else line[name]
        return {
            "epsilon": self.epsilon,
            "read": READ,
            "avoid": AVOID,
            "heads": lines,
            "sentences": self.sentences(),
            "provenance": self.provenance.to_dict(),
        }


def _listed(heads: list[tuple[int, int]], most: int = 6) -> str:
    shown = [f"{layer}.{head}" for layer, head in heads[:most]]
    more = len(heads) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "") + " (layer.head)"


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share.

    >>> [round(x, 3) for x in wilson(29, 32)]
    [0.758, 0.968]
    """
    z = 1.959963984540054
    p, factor = hits / n, 1 + z * z / n
    middle = (p + z * z / (2 * n)) / factor
    half = z * ((p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5) / factor
    return max(0.0, middle - half), min(1.0, middle + half)


def verdict(trace: Trace, *, epsilon: float = 0.05, rows: int | None = None, attention: str | None = None) -> Verdict:
    """Which heads may be read on this text.

    A row is unique, certain (to `epsilon`: its heaviest weight exceeds ε, keeps to an interval of that width in every
    attention row with the same output, and no other key outweighs it by more), flat (no weight can exceed ε) or open to
    other readings. A head is *unique* when all its rows are; over its rows that are neither unique nor flat it is to be
    *read* when at least 95 % are certain, *do not read* when fewer than half are, *careful* between; *flat* when there
    are none. `rows`: look at no more than so many rows of a head, drawn at random, seeded by tokens, layer and head; None:
    about 2,000 rows in all, at least 8 of each head. 0: every row.

    >>> import whence
    >>> found = whence.verdict(whence.trace(whence.load(), "The bank raised its rates."))
    >>> found.sentences()
    ['All 72 heads may be read: every row is the only one with its output.']
    """
    check_epsilon(epsilon)
    if rows is not None and rows < 0:
        raise InputError(f"rows={rows!r}; give how many rows of each head to look at, 0 for all.")
    stack = trace.of(attention)
    total = sum(len(layer.heads) for layer in stack)
    limit = max(8, 2000 // max(total, 1)) if rows is None else rows or len(stack.tokens)
    places = [(layer, place) for layer in stack for place in range(len(layer.heads))]
    with one_thread(), ThreadPoolExecutor(workers_for(len(stack.key_tokens))) as pool:
        found = list(pool.map(lambda at: _head(at[0], at[1], epsilon, limit, stack.tokens), places))
    grid = (len(stack), len(stack.layers[0].heads))
    per_row = torch.stack([one for one, _ in found]).reshape(*grid, -1)
    unique = torch.stack([one for _, one in found]).reshape(*grid, -1)
    counts = {name: (per_row == int(RowVerdict[name.upper()])).sum(-1) for name in COUNTS[1:]}
    sampled = sum(counts.values(), torch.zeros(grid, dtype=torch.int64))
    extra = {
        "unique": unique.sum(-1),
        **counts,
        "sampled": sampled,
        "rows": (~unique).sum(-1),
        "row_verdicts": per_row,
        "epsilon": torch.tensor(epsilon, dtype=torch.float64),
    }
    told = counts["certain"] + counts["open"]
    share = torch.where(told > 0, counts["certain"] / told.to(torch.float64), torch.nan)
    origin = trace.provenance.by("verdict", epsilon=epsilon, rows=limit, attention=stack.name)
    return Verdict.of_stack(stack, share, origin, axes=("layer", "head"), extra=extra)


def _head(layer: Layer, index: int, epsilon: float, limit: int, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The verdicts on the rows of one head that were looked at, and which of all its rows are unique; [query] each."""
    weights, values, visible = head_of(layer, index)
    unique = unique_rows(weights, values, visible=visible)
    rows = (~unique).nonzero().squeeze(-1).numpy()
    if len(rows) > limit:
        # Tokens, layer and head, and no computed number: another thread count or processor rounds otherwise, and would
        # look at other rows.
        content = json.dumps([tokens.raw, layer.index, layer.heads[index]]).encode()
        seed = int.from_bytes(hashlib.sha256(content).digest()[:8], "little")
        rows = np.sort(np.random.default_rng(seed).choice(rows, size=limit, replace=False))
    found = rows_not_unique(weights, values, unique, epsilon=epsilon, rows=rows.tolist(), visible=visible)
    return torch.where(unique, int(RowVerdict.UNIQUE), found), unique
