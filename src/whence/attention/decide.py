"""Does the model's computation fix a decision that was made from its attention?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from whence.attention.decided_arrays import ARRAYS, OF_A_ROW, check_decisions
from whence.attention.decided_rows import Gathered, gather_rows
from whence.attention.verified_rows import verify_rows
from whence.attention.witness import Verification
from whence.core.attention.claim import Claim
from whence.core.attention.decision import RowDecision, decide_row
from whence.core.attention.decision_check import check_decision
from whence.core.attention.head_rows import Heads
from whence.errors import InputError
from whence.reading.trace import Trace
from whence.results.provenance import Provenance
from whence.results.short_repr import short_repr
from whence.results.tensor_file import load_tensors, savable, save_tensors, understood
from whence.rules import Key, Path, Question, Row, Rule

if TYPE_CHECKING:
    import pandas as pd

    from whence.attention.align import Alignment

Combine = Literal["mean", "sum"]


@dataclass(frozen=True)
class Decisions:
    """One rule, asked of some queries of one head or of several together.

    verdicts: for each query "certified" (every attention row with the same head outputs decides the same; proved),
    "refuted" (another row with the same outputs decides otherwise; put into the model, which did not notice) or "open".
    answers: what was decided. value: the number it was decided by (for argmax the gap to the runner-up); lower, upper:
    where that number lies in every row with the same output (NaN for argmax); margin: by how much the decision holds
    at least (below 0: by how much the other row breaks it). All [query].
    """

    __repr__ = short_repr

    rule: str
    heads: tuple[tuple[int, int], ...]
    combine: str
    attention: str
    queries: tuple[int, ...]
    query_names: tuple[str, ...]
    key_names: tuple[str, ...]
    answers: tuple[str, ...]
    verdicts: tuple[str, ...]
    value: Tensor
    decisions: tuple[RowDecision, ...] = field(repr=False)
    claims: tuple[tuple[Claim, ...], ...] = field(repr=False)
    rows: Tensor = field(repr=False)  # [head, query, key], float64, a sink as the last key
    values: Tensor = field(repr=False)  # [head, key, d_v]
    visible: Tensor = field(repr=False)  # [head, query, key]
    weights: Tensor = field(repr=False)  # [head]
    provenance: Provenance = field(repr=False)
    verification: Verification | None = None
    trace: Trace | None = field(default=None, repr=False, compare=False)

    def _each(self, name: str) -> Tensor:
        return torch.tensor([getattr(d, name) for d in self.decisions], dtype=torch.float64)

    @property
    def lower(self) -> Tensor:
        return self._each("lower")

    @property
    def upper(self) -> Tensor:
        return self._each("upper")

    @property
    def margin(self) -> Tensor:
        return self._each("margin")

    @property
    def counts(self) -> dict[str, int]:
        """How many queries have each verdict."""
        return {word: self.verdicts.count(word) for word in ("certified", "refuted", "open")}

    def __len__(self) -> int:
        return len(self.queries)

    def alternative(self, query: int | str) -> Tensor | None:
        """The other rows [head, key] of a refuted query, or None."""
        return self.decisions[self._index_of(query)].alternative

    def _index_of(self, query: int | str) -> int:
        for i, (number, name) in enumerate(zip(self.queries, self.query_names, strict=True)):
            if query in (number, name):
                return i
        raise InputError(f"query {query!r} was not asked; these were: {', '.join(self.query_names)}.")

    def sentences(self) -> list[str]:
        """Each decision and what is known of it, in words."""
        return [self._sentence(i) for i in range(len(self))]

    def _sentence(self, i: int) -> str:
        verdict, found = self.verdicts[i], self.decisions[i]
        begin = f"{self.query_names[i]} → {self.answers[i]}"
        span = f", in every row with the same output between {found.lower:.3f} and {found.upper:.3f}"
        told = f" (observed {float(self.value[i]):.3f}{'' if found.quantity is None else span})"
        if not self.claims[i]:
            return f"{begin}. Certified: there is no other candidate."
        if verdict == "certified":
            by = f"by at least {found.margin:.3g}" if found.margin > 0 else "exactly"
            return f"{begin}{told}. Certified: it holds {by} in every attention row with the same output."
        if verdict == "refuted":
            return (
                f"{begin}{told}. Refuted: another row with the same output decides otherwise, by {-found.margin:.3g}."
            )
        if found.alternative is not None:
            return (
                f"{begin}{told}. Open: another row with the same output decides otherwise, but it was not verified in the "
                "model."
            )
        return f"{begin}{told}. Open: neither a proof nor a counter-example was found."

    def summary(self) -> str:
        """One sentence over all queries."""
        counts = self.counts
        where = ", ".join(f"layer {layer} head {head}" for layer, head in self.heads)
        return (
            f"{self.rule} ({where}): of {len(self)} decisions {counts['certified']} certified, "
            f"{counts['refuted']} refuted, {counts['open']} open."
        )

    def check(self) -> bool:
        """Verify every verdict from the stored tensors: dual proofs and other rows, by dot products, no solver.

        With the trace at hand, that these are its rows, too.
        """
        rows = [self.rows[:, i] for i in range(len(self))]
        sound = all(
            check_decision(found, rows[i], self.values, self.visible[:, i], self.weights, self.claims[i])
            and (verdict == found.verdict or (verdict == "open" and found.verdict == "refuted"))
            for i, (found, verdict) in enumerate(zip(self.decisions, self.verdicts, strict=True))
        )
        if sound and self.trace is not None:
            again = gather_rows(self.trace, self.heads, self.queries, self.attention)
            sound = bool(torch.equal(again.rows, self.rows) and torch.equal(again.values, self.values))
        return sound

    def verify(self, model: Any = None, *, seed: int = 0) -> Decisions:
        """Put the other rows of every query that has some into the model, and give the verdicts that follow."""
        if self.trace is None:
            raise InputError("these decisions were loaded from a file and have no trace: decide again to verify them.")
        others = {i: d.alternative for i, d in enumerate(self.decisions) if d.alternative is not None}
        places = [(self.heads, self.queries[i], self.rows[:, i], other) for i, other in others.items()]
        verified, outcome = verify_rows(self.trace, self.attention, places, model=model, seed=seed)
        accepted = {i for i, good in zip(others, verified, strict=True) if good}
        verdicts = tuple(
            "open" if d.verdict == "refuted" and i not in accepted else d.verdict for i, d in enumerate(self.decisions)
        )
        return replace(self, verdicts=verdicts, verification=outcome)

    def to_frame(self) -> pd.DataFrame:
        """One line a query."""
        import pandas as pd

        return pd.DataFrame(
            {
                "query": self.queries,
                "name": self.query_names,
                "decision": self.answers,
                "verdict": self.verdicts,
                "value": self.value.numpy(),
                "lower": self.lower.numpy(),
                "upper": self.upper.numpy(),
                "margin": self.margin.numpy(),
                "programs": [d.programs for d in self.decisions],
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; without the proofs, which `save` keeps."""
        return {
            "rule": self.rule,
            "heads": [list(pair) for pair in self.heads],
            "combine": self.combine,
            "attention": self.attention,
            "decisions": self.to_frame().to_dict("records"),
            "sentences": self.sentences(),
            "counts": self.counts,
            "checked": self.check(),
            "verification": None if self.verification is None else self.verification.to_dict(),
            "provenance": self.provenance.to_dict(),
        }

    def plot(self, *, ax: Any = None) -> Any:
        """Every decision with its range, coloured by verdict; returns the Axes."""
        from whence.attention.plots_decisions import plot_decisions

        return plot_decisions(self, ax)

    def save(self, path: str | os.PathLike[str]) -> FilePath:
        """One safetensors file with the rows, the values and every proof: enough to check it elsewhere."""
        with savable(path, "decisions"):
            check_decisions(self)
        tensors = {name: getattr(self, name) for name in ARRAYS}
        plain = []
        for i, (found, claims) in enumerate(zip(self.decisions, self.claims, strict=True)):
            tensors |= {f"{i}.{n}": getattr(found, n) for n in OF_A_ROW if getattr(found, n) is not None}
            tensors |= {f"{i}.claim.{k}": claim.costs for k, claim in enumerate(claims)}
            asked = [{"threshold": c.threshold, "rivals": list(c.rivals), "strict": c.strict} for c in claims]
            plain.append({**{n: _text(getattr(found, n)) for n in _SAVED}, "claims": asked})
        header = {name: getattr(self, name) for name in _HEADER} | {
            "decisions": plain,
            "provenance": self.provenance.to_dict(),
            "verification": None if self.verification is None else self.verification.to_dict(),
        }
        return save_tensors(path, "decisions", tensors, header)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Decisions:
        """Saved decisions. They check themselves; to put other rows into a model, decide again."""
        tensors, header = load_tensors(path, "decisions")
        with understood(path, "decisions"):
            decisions, claims = [], []
            for i, plain in enumerate(header["decisions"]):
                parts = {name: tensors.get(f"{i}.{name}") for name in OF_A_ROW}
                numbers = {n: float(v) if isinstance(v, str) and n != "verdict" else v for n, v in plain.items()}
                decisions.append(RowDecision(**parts, **{n: numbers[n] for n in _SAVED}))  # type: ignore[arg-type]
                claims.append(
                    tuple(
                        Claim(tensors[f"{i}.claim.{k}"], c["threshold"], tuple(c["rivals"]), c["strict"])
                        for k, c in enumerate(plain["claims"])
                    )
                )
            named = {name: header[name] for name in _HEADER}
            named |= {n: tuple(v) for n, v in named.items() if isinstance(v, list)}
            known = header["verification"]
            if known is not None:
                known = Verification(**{name: known[name] for name in Verification.__dataclass_fields__})
            stored: dict[str, Any] = {n: tensors[n] for n in ARRAYS}
            loaded = cls(
                **{**named, "heads": tuple((a, b) for a, b in header["heads"])},
                **stored,
                decisions=tuple(decisions),
                claims=tuple(claims),
                provenance=Provenance.from_dict(header["provenance"]),
                verification=known,
            )
            check_decisions(loaded)
        return loaded


_SAVED = ("verdict", "margin", "residual", "programs", "lower", "upper")
_HEADER = ("rule", "heads", "combine", "attention", "queries", "query_names", "key_names", "answers", "verdicts")


def _text(value: Any) -> Any:
    """Numbers as JSON has them; NaN and infinity, which it has not, as text."""
    return repr(value) if isinstance(value, float) and not abs(value) < float("inf") else value


class _Options(TypedDict, total=False):
    layer: int | None
    head: int | None
    heads: Sequence[int] | Sequence[tuple[int, int]] | None
    query: Key | None
    queries: Sequence[Key] | None
    combine: Combine
    attention: str | None
    names: Sequence[str] | None
    verify: bool


@overload
def decide(trace: Trace, rule: Path, **options: Unpack[_Options]) -> Alignment: ...  # type: ignore[overload-overlap]  # a Path is a Rule that gives more
@overload
def decide(trace: Trace, rule: Rule, **options: Unpack[_Options]) -> Decisions: ...
def decide(
    trace: Trace,
    rule: Rule,
    *,
    layer: int | None = None,
    head: int | None = None,
    heads: Sequence[int] | Sequence[tuple[int, int]] | None = None,
    query: Key | None = None,
    queries: Sequence[Key] | None = None,
    combine: Combine = "mean",
    attention: str | None = None,
    names: Sequence[str] | None = None,
    verify: bool = True,
) -> Decisions | Alignment:
    """Ask of each query whether the model's computation fixes what `rule` decides there.

    `layer` and `head` name one head; `heads` several of that layer, or (layer, head) pairs, of which the mean or the sum
    is read (`combine`). `query`, `queries`: positions, token texts or names; none: every query. `names`: what to call
    the keys (and the queries, where they are the same tokens); None: the tokens themselves, seconds for sound.
    `verify`: put the other rows of refuted decisions into the model, three runs in all; without it (or without a model)
    no decision is called refuted.

    >>> import whence
    >>> trace = whence.trace(whence.load(), "The bank raised its rates.")
    >>> found = whence.decide(trace, whence.rules.argmax(), layer=0, head=0, query="bank")
    >>> found.verdicts, found.check()              # 8 tokens, heads of 32: every row is unique
    (('certified',), True)
    """
    pairs = _pairs(layer, head, heads)
    if combine not in ("mean", "sum"):
        raise InputError(f"combine={combine!r} is unknown; heads are read as their 'mean' or their 'sum'.")
    if query is not None and queries is not None:
        raise InputError(f"query={query!r} and queries={queries!r} were both given; give one of them.")
    asked = [query] if query is not None else queries
    found = gather_rows(trace, pairs, asked, attention, names)
    weights = torch.full((len(pairs),), 1.0 / len(pairs) if combine == "mean" else 1.0, dtype=torch.float64)
    if isinstance(rule, Path):
        from whence.attention.align import align_rows

        return align_rows(trace, found, pairs, median=rule.median, keys=rule.keys, within=rule.within, verify=verify)
    questions = [_ask(rule, found, i, weights) for i in range(len(found.queries))]
    solver = Heads(found.rows, found.values, weights, found.visible)
    decisions = [
        decide_row(solver, i, [found.padded(c) for c in q.claims], found.padded_costs(q.quantity))
        for i, q in enumerate(questions)
    ]
    result = Decisions(
        rule=rule.text,
        heads=pairs,
        combine=combine,
        attention=found.stack.name,
        queries=found.queries,
        query_names=tuple(found.query_names[q] for q in found.queries),
        key_names=found.key_names,
        answers=tuple(q.answer for q in questions),
        verdicts=tuple("open" if d.verdict == "refuted" else d.verdict for d in decisions),
        value=torch.tensor([q.value for q in questions], dtype=torch.float64),
        decisions=tuple(decisions),
        claims=tuple(tuple(found.padded(c) for c in q.claims) for q in questions),
        rows=found.rows,
        values=found.values,
        visible=found.visible,
        weights=weights,
        provenance=trace.provenance.by(
            "decide", rule=rule.text, heads=[list(p) for p in pairs], combine=combine, attention=found.stack.name
        ),
        trace=trace,
    )
    refuted = any(d.verdict == "refuted" for d in decisions)
    return result.verify() if verify and refuted and trace.model is not None else result


def _pairs(
    layer: int | None, head: int | None, heads: Sequence[int] | Sequence[tuple[int, int]] | None
) -> tuple[tuple[int, int], ...]:
    """Which heads are read, as (layer, head)."""
    given = [head] if head is not None and heads is None else list(heads or ())
    if not given or (head is not None and heads is not None):
        raise InputError(f"head={head!r}, heads={heads!r}: give one head, or a list of heads.")
    pairs: list[tuple[Any, ...]] = [(layer, h) if isinstance(h, int) else tuple(h) for h in given]  # type: ignore[arg-type]
    if any(len(p) != 2 or p[0] is None for p in pairs):
        raise InputError(f"layer={layer!r}, heads={heads!r}: give the layer, or (layer, head) pairs.")
    if len(set(pairs)) != len(pairs):
        raise InputError(f"heads={heads!r} names a head twice.")
    return tuple((int(a), int(b)) for a, b in pairs)


def _ask(rule: Rule, gathered: Gathered, i: int, weights: Tensor) -> Question:
    """The rule's decision on one query: on the mean or sum of its rows, sinks left out."""
    n = len(gathered.key_names)
    return rule.ask(
        Row(
            query=gathered.queries[i],
            weights=(weights @ gathered.rows[:, i])[:n],
            visible=gathered.visible[:, i, :n].any(0),
            names=gathered.key_names,
            find=gathered.find_key,
        )
    )
