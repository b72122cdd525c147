"""Does a theorem say that this model's attention is unique? From its weights and from what it computes on a text.

Theorem A: every score is s·q·φ_j + b_j, with b_j the same for every query, and Φ = T·N + 1cᵀ on the visible keys. Then
each row is the only one, among all that some query reaches, with its output, at every length. Theorem B: keys of lower
rank than values make a row unique for almost every value matrix. Without either, a second row is looked for, and shown.
What is held fixed is the head's output on the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from whence.attention.probe_text import long_text, shuffled
from whence.attention.reachable_second_row import SecondRow, second_row
from whence.core.attention.score_law import ScoreLaw, score_law
from whence.core.numerics.tolerances import SCORE_FIT, TIED_WEIGHTS
from whence.model.load import Model, as_model
from whence.reading.capture.recorder import Call, expand_heads, mix
from whence.reading.inputs import Prepared
from whence.reading.rerun.run import Outcome, prove_model, run
from whence.reading.trace import KEEP
from whence.reading.wiring.proof import Proof
from whence.reading.wiring.sites import AttentionSite
from whence.results.short_repr import short_repr

THEOREM_A, THEOREM_B, NOT_COVERED = "Theorem A", "Theorem B", "none"


@dataclass(frozen=True)
class HeadUniqueness:
    """One head on the text. theorem: "Theorem A", "Theorem B" or "none". simplex: up to how many keys a row is unique
    among *all* rows (rank([V, 1]), measured). residual: share of its keys outside span[V, 1] (of [[V; 0], 1] with a
    sink). key_rank, value_rank: of the centred keys and values that the longest row sees."""

    __repr__ = short_repr

    stack: str
    layer: int
    head: int
    theorem: str
    simplex: int
    residual: float | None
    key_rank: int | None
    value_rank: int
    failing: str | None


@dataclass(frozen=True)
class Uniqueness:
    """`str()` gives the answer and its evidence; `to_dict()` the numbers.

    answer: the weakest of all heads. laws: by (stack, layer), how well scores are linear in the query. second: another
    row that some query reaches, with the same head output, verified in the model; None where none was found or needed.
    """

    __repr__ = short_repr

    model: str
    answer: str
    positions: str
    tokens: int
    heads: tuple[HeadUniqueness, ...]
    laws: Mapping[tuple[str, int], ScoreLaw | None]
    softcap: float | None
    sinks: bool
    projection: str
    second: SecondRow | None
    searched: int
    second_rows: int
    entries: bool = False  # some layers see entries beside the tokens (compressed ones)

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    @property
    def up_to(self) -> int:
        """Up to how many tokens every head's rows are unique among all rows of the simplex."""
        return min(head.simplex for head in self.heads)

    def sentences(self) -> list[str]:
        """The answer first, then what it rests on."""
        counts = Counter(head.theorem for head in self.heads)
        shares = [head.residual for head in self.heads if head.residual is not None]
        out = [f"{self.model}: attention is {self.answer}."]
        said = ", ".join(f"{counts[t]} by {t}" for t in (THEOREM_A, THEOREM_B) if counts[t])
        out.append(
            f"Of {len(self.heads)} heads, read on {self.tokens} tokens: {said + ', ' if said else ''}"
            f"{counts[NOT_COVERED]} by no theorem. Positions: {self.positions}; "
            f"{'learned sinks' if self.sinks else 'no sinks'}; "
            f"{'no soft cap' if self.softcap is None else f'soft cap {self.softcap:g}'}; {self.projection}."
        )
        if shares:
            out.append(
                f"Share of a head's keys outside span[values, 1]: {min(shares):.1e} to {max(shares):.1e} "
                f"(0 is what Theorem A asks for; up to {TIED_WEIGHTS:.0e} is rounding)."
            )
        if counts[THEOREM_A]:
            out.append(
                "Theorem A holds among rows that some query reaches, at every length; among all rows of the simplex "
                f"a row is unique up to {self.up_to} tokens."
            )
        if counts[THEOREM_B]:
            out.append(
                "Theorem B holds among rows that some query reaches, for almost every value matrix, with no bound on "
                f"near misses; among all rows of the simplex a row is unique up to {self.up_to} tokens."
            )
        if self.entries:
            out.append("Some layers see compressed entries beside tokens: this is about their weights, entry by entry.")
        reasons = dict.fromkeys(head.failing for head in self.heads if head.failing)
        out += [f"Not covered: {reason}" for reason in list(reasons)[:3]]
        if counts[NOT_COVERED]:
            out.append(f"Among all rows of the simplex, rows are unique up to {self.up_to} tokens, by measured ranks.")
        if self.searched:
            out.append(f"Second rows that some query reaches: {self.second_rows} of {self.searched} rows searched.")
        if self.second is not None:
            out.append(str(self.second))
        return out

    def plot(self, *, ax: Any = None) -> Any:
        """How many heads each statement covers; returns the Axes."""
        from whence.results.plotting import plot_bars

        counts = Counter(head.theorem for head in self.heads)
        return plot_bars(list(counts), list(counts.values()), "heads", ax)

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "answer": self.answer,
            "positions": self.positions,
            "tokens": self.tokens,
            "unique_up_to": self.up_to,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "projection": self.projection,
            "searched": self.searched,
            "second_rows": self.second_rows,
            "second": None if self.second is None else self.second.to_dict(),
            "heads": [asdict(head) for head in self.heads],
        }


def uniqueness(model: Any, text: Any = None, *, search: int = 6, starts: int = 32, seed: int = 0) -> Uniqueness:
    """Is this model's attention unique, by which theorem, up to which length, or what is the second row?

    `text`: what to read; None: a passage long enough that no key is in the span of the values by chance. `search`: in
    how many heads that no theorem covers a second row is looked for.

    >>> import whence
    >>> whence.uniqueness(whence.load(), search=1, starts=8).up_to
    33
    """
    chosen = as_model(model)
    prepared = long_text(chosen, text)
    proof = prove_model(chosen, prepared)
    first = _run(chosen, proof, prepared)
    other = shuffled(prepared)
    second = None if other is None else _run(chosen, proof, other)
    laws: dict[tuple[str, int], ScoreLaw | None] = {}
    heads: list[HeadUniqueness] = []
    for site, call in zip(proof.sites, first.calls, strict=True):
        law = _law(call, None if second is None else second.calls[site.number])
        laws[site.stack, site.layer] = law
        heads += [_head(site, call, law, h) for h in range(site.heads)]
    wanted = [(site, h.head) for h in heads if h.theorem == NOT_COVERED for site in proof.sites
              if (site.stack, site.layer) == (h.stack, h.layer)]  # fmt: skip
    step = max(1, len(wanted) // max(1, search))
    rows = [
        row
        for site, head in wanted[::step][: max(0, search)]
        if (row := _search(chosen, proof, first, site, head, laws[site.stack, site.layer], starts, seed)) is not None
    ]
    hits = [row for row in rows if row.total_variation > 0]
    best = max(hits, key=lambda row: row.total_variation) if hits else None
    caps = [call.cap for call in first.calls if call.cap is not None]
    return Uniqueness(
        model=chosen.name,
        answer=_answer(heads, best, len(rows)),
        positions=_positions(chosen, laws),
        tokens=max(call.weights.shape[-1] for call in first.calls),
        heads=tuple(heads),
        laws=laws,
        softcap=caps[0][1] if caps else None,
        sinks=any(call.sink is not None for call in first.calls),
        projection=_projection(proof),
        second=best,
        searched=len(rows),
        second_rows=len(hits),
        entries="encoder" not in proof.stacks and any(c.weights.shape[-1] > c.weights.shape[-2] for c in first.calls),
    )


def _answer(heads: list[HeadUniqueness], second: SecondRow | None, searched: int) -> str:
    theorems = {head.theorem for head in heads}
    if theorems == {THEOREM_A}:
        return "unique at every length by Theorem A"
    if NOT_COVERED not in theorems:
        return "generically unique (small keys)"
    if second is not None:
        return "not unique, here is a second row"
    tail = f"; beyond, no theorem applies and none of {searched} searches found a second row" if searched else ""
    return f"unique up to {min(head.simplex for head in heads)} tokens{tail}"


# -- what is read ----------------------------------------------------------------------------------------------------


def _run(model: Model, proof: Proof, prepared: Prepared) -> Outcome:
    return run(model, proof, dict(prepared.inputs), 1, frozenset(KEEP), fused=False)


# -- what is measured ------------------------------------------------------------------------------------------------


def products(call: Call) -> Tensor | None:
    """q·k of every pair (head, query, key), before any factor; with a soft cap the capped score itself."""
    if call.query is None or call.key is None or call.query.shape[1] % call.key.shape[1]:
        return None
    if call.query.shape[-1] != call.key.shape[-1]:
        return None
    raw = mix(call.query.double(), call.key.double().transpose(-1, -2))[0]
    if call.cap is None:
        return raw
    factor, cap = call.cap
    return cap * torch.tanh(raw * factor / cap)


def _law(call: Call, other: Call | None) -> ScoreLaw | None:
    if other is None or call.weights.shape != other.weights.shape:
        return None
    one, two = products(call), products(other)
    if one is None or two is None or one.shape != call.weights.shape[1:]:
        return None
    sinks = None if call.sink is None or other.sink is None else (call.sink[0], other.sink[0])
    scale = 1.0 if call.cap is not None else None
    return score_law((call.weights[0], other.weights[0]), (one, two), scale, sinks)


def longest_row(call: Call, head: int) -> tuple[int, Tensor]:
    """The query that sees most keys, the last of them, and which keys it sees."""
    seen = call.weights[0, head] > 0
    counts = seen.sum(-1)
    query = int((counts == counts.max()).nonzero()[-1])
    return query, seen[query]


def _head(site: AttentionSite, call: Call, law: ScoreLaw | None, head: int) -> HeadUniqueness:
    _, seen = longest_row(call, head)
    values = expand_heads(call.value, site.heads)[0, head][seen].double()
    sink = call.sink is not None
    values = torch.cat([values, values.new_zeros(1, values.shape[1])]) if sink else values
    value_rank = _centred_rank(values)
    key_rank, residual = None, None
    if call.key is not None and not site.heads % call.key.shape[1] and call.key.shape[-2] == seen.shape[0]:
        keys = expand_heads(call.key, site.heads)[0, head][seen].double()
        keys = torch.cat([keys, keys.new_zeros(1, keys.shape[1])]) if sink else keys
        key_rank, residual = _centred_rank(keys), _outside(keys, values)
    theorem, failing = _theorem(site, call, law, residual, key_rank, value_rank, len(values))
    simplex = value_rank + 1 - int(sink)  # keys: the sink is one of the rows that the rank was taken of
    return HeadUniqueness(site.stack, site.layer, head, theorem, simplex, residual, key_rank, value_rank, failing)


def _theorem(
    site: AttentionSite, call: Call, law: ScoreLaw | None, residual: float | None, key_rank: int | None,
    value_rank: int, rows: int,
) -> tuple[str, str | None]:  # fmt: skip
    """Which theorem covers a head, and otherwise the condition that fails."""
    if call.cap is not None:
        return NOT_COVERED, f"scores are bent by a soft cap ({call.cap[1]:g}), so they are not linear in the query."
    if law is None or residual is None or key_rank is None:
        return NOT_COVERED, "its queries and keys could not be followed to its scores."
    if law.residual > SCORE_FIT:
        return NOT_COVERED, (
            f"its scores are not s·q·k plus a bias that the text does not change ({law.residual:.1e} is left over)."
        )
    if law.sink is not None and law.sink > SCORE_FIT:
        return NOT_COVERED, f"its sink's logit changes with the query (by up to {law.sink:.1e})."
    if site.projection is not None and not site.projection.full_rank:
        return NOT_COVERED, "its output projection loses part of the head output, so that more than the output is free."
    if rows <= value_rank + 1:
        return (
            NOT_COVERED,
            f"the text is too short to tell: {rows} rows lie in the span of values of rank {value_rank}.",
        )
    if residual <= TIED_WEIGHTS:
        return THEOREM_A, None
    if key_rank < value_rank:
        return THEOREM_B, None
    return NOT_COVERED, "part of its keys lies outside span[values, 1]: keys and values are separate, or turned apart."


def _centred_rank(x: Tensor) -> int:
    singular = torch.linalg.svdvals(x - x.mean(0))
    largest = torch.linalg.svdvals(x)[0]
    return int((singular > largest * max(x.shape) * torch.finfo(torch.float32).eps).sum())


def _outside(keys: Tensor, values: Tensor) -> float:
    """‖K outside span[V, 1]‖ / ‖K − mean‖."""
    keys, values = keys - keys.mean(0), values - values.mean(0)
    size = torch.linalg.matrix_norm(keys)
    if float(size) == 0:
        return 0.0
    left, singular, _ = torch.linalg.svd(values, full_matrices=False)
    basis = left[:, singular > singular[0] * max(values.shape) * torch.finfo(torch.float64).eps]
    return float(torch.linalg.matrix_norm(keys - basis @ (basis.mT @ keys)) / size)


def _search(
    model: Model, proof: Proof, outcome: Outcome, site: AttentionSite, head: int, law: ScoreLaw | None, starts: int,
    seed: int,
) -> SecondRow | None:  # fmt: skip
    """A second row of one head's longest row; total variation 0: none was found. None: it cannot be searched."""
    call = outcome.calls[site.number]
    linear = law is not None and law.residual <= SCORE_FIT and (law.sink is None or law.sink <= SCORE_FIT)
    if not linear or call.key is None or site.heads % call.key.shape[1]:
        return None
    query, seen = longest_row(call, head)
    assert law is not None
    return second_row(model, proof, outcome, site, head, query, seen, law.scale, starts=starts, seed=seed)


# -- what it is called -------------------------------------------------------------------------------------------------


def _positions(model: Model, laws: Mapping[tuple[str, int], ScoreLaw | None]) -> str:
    config: Any = getattr(model.model, "config", None)
    config = getattr(config, "text_config", config)
    kind = str(getattr(config, "position_embedding_type", "") or "")
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None)
    names = []
    if (rotary and kind not in ("alibi", "bias", "none", "learned")) or kind == "rope":
        names.append("rotary (RoPE)")
    if any(law is not None and law.residual <= SCORE_FIT and law.biased > SCORE_FIT for law in laws.values()):
        names.append("a bias on the scores that no query changes (ALiBi, relative distance)")
    return " and ".join(names) or "in the embeddings, or none"


def _projection(proof: Proof) -> str:
    if any(site.projection is None for site in proof.sites):
        return "the output projection is not proved, so this is about the head's own output"
    if any(site.projection is not None and site.projection.rows is not None for site in proof.sites):
        return "head outputs are turned back row by row before the projection"
    return "output projection of full row rank" if all(
        site.projection is not None and site.projection.full_rank for site in proof.sites
    ) else "an output projection that loses part of the head output"  # fmt: skip
