"""When was each word spoken, as the alignment heads have it, and does the model's computation fix that?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from whence.attention.decided_rows import Gathered, gather_rows
from whence.attention.pushed_paths import path_of, pushed
from whence.attention.recording import FRAME, alignment_heads, read_audio, speech_inputs, words_of
from whence.attention.verified_rows import verify_rows
from whence.attention.witness import Verification
from whence.core.attention.alignment import alignment_matrix, possible_first_keys, running_median
from whence.core.attention.bounds import weight_bounds
from whence.core.attention.path_certificate import certify_path, proved_range
from whence.core.numerics.tolerances import SAME_OUTPUT, SUM_ROUNDING, UNIT_SUM
from whence.errors import InputError
from whence.model.load import as_model
from whence.reading.trace import Trace
from whence.reading.tracing import trace
from whence.results.provenance import Provenance
from whence.results.short_repr import short_repr

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Alignment:
    """Where a monotone path over several heads first reaches each query, and how far the computation fixes that.

    names: the queries, or the words they make. first: the key at which the path reaches each. early, late: the same for
    the earliest and the latest alignment found with the same head outputs. plain: the path that a range is proved for,
    without standardisation and with a median over `plain_median` keys; earliest, latest: in every attention with the
    same head outputs `plain` lies between them. All [name], in keys; `unit` seconds a key. verdicts: "refuted" where
    `early` or `late`, verified in the model, is more than `within` away; "certified" where the path itself is the plain
    one and its proved range is within `within`; else "open". duals [head, k, d_v]: the proofs (no median; with one the
    range follows from the closed-form intervals of the cells).
    """

    __repr__ = short_repr

    names: tuple[str, ...]
    verdicts: tuple[str, ...]
    first: Tensor
    early: Tensor
    late: Tensor
    plain: Tensor
    earliest: Tensor
    latest: Tensor
    within: float
    unit: float
    standardised: bool
    median: int
    plain_median: int
    keys: int
    starts: tuple[int, ...] = field(repr=False)  # the query that begins each name, and at last how many there are
    heads: tuple[tuple[int, int], ...]
    attention: str
    queries: tuple[int, ...] = field(repr=False)
    rows: Tensor = field(repr=False)  # [head, query, key], float64
    early_rows: Tensor = field(repr=False)
    late_rows: Tensor = field(repr=False)
    values: Tensor = field(repr=False)
    visible: Tensor = field(repr=False)
    duals: Tensor = field(repr=False)
    provenance: Provenance = field(repr=False)
    verifications: tuple[Verification | None, ...] = ()  # of the early and the late rows; None: none was found
    accepted: tuple[bool, ...] = ()  # whether the model took the early, and the late, rows for its own
    trace: Trace | None = field(default=None, repr=False, compare=False)

    @property
    def times(self) -> Tensor:
        """[name]: `first` in seconds (or keys, where a key is no time)."""
        return self.first * self.unit

    @property
    def ranges(self) -> Tensor:
        """[name]: how wide the proved range of the plain path is, in seconds (or keys)."""
        return (self.latest - self.earliest) * self.unit

    @property
    def fixed(self) -> int:
        """How many names have a proved range that leaves something out; the first query, where all paths begin, not counted."""
        return int((self.latest - self.earliest < self.keys - 1).sum()) - int(self.starts[0] == 0)

    @property
    def close(self) -> int:
        """How many of these have a proved range that lies within `within` of the plain path's own time."""
        far = torch.maximum(self.plain - self.earliest, self.latest - self.plain) * self.unit
        return int((far <= self.within + SUM_ROUNDING).sum()) - int(self.starts[0] == 0)

    def sentences(self) -> list[str]:
        """Each word, its time, and what was found of it."""
        said = []
        unit = " s" if self.unit != 1.0 else ""
        for i, name in enumerate(self.names):
            at, early, late, plain, low, high = (
                f"{float(t[i]) * self.unit:.2f}{unit}" if unit else str(int(t[i]))
                for t in (self.first, self.early, self.late, self.plain, self.earliest, self.latest)
            )
            own = "" if plain == at else f" (here {plain})"
            proved = f"the plain path{own} is proved to reach it between {low} and {high}"
            if int(self.latest[i] - self.earliest[i]) >= self.keys - 1:
                proved = f"nothing is proved of the plain path{own}"
            if self.starts[i] == 0:
                proved = "every path begins with it"
            said.append(
                f"{name} at {at}: {self.verdicts[i]}; attention with the same outputs puts it at {early} or at {late}; {proved}."
            )
        return said

    def summary(self) -> str:
        """What the whole alignment is worth, in one sentence."""
        moved = sum(word == "refuted" for word in self.verdicts)
        certified = sum(word == "certified" for word in self.verdicts)
        unit = " s" if self.unit != 1.0 else ""
        note = "no range can be certified"
        if self.fixed > 0:
            note = f"{self.fixed} have a certified range, {self.close} of them within {self.within:g}{unit}"
        coupled = (
            "Standardising couples all rows: nothing can be certified of this path itself. "
            if self.standardised
            else ""
        )
        return (
            f"Of {len(self.names)} times {certified} are certified to within {self.within:g}{unit}, {moved} are moved further "
            f"by attention with the same outputs. {coupled}Of the plain path's times {note}."
        )

    def check(self) -> bool:
        """Recompute the paths, the bounds and the outputs of the pushed rows from the tensors; no solver."""
        n, at = self.keys, list(self.starts[:-1])
        for rows, said in ((self.rows, self.first), (self.early_rows, self.early), (self.late_rows, self.late)):
            if not torch.equal(path_of(rows, n, self.median, self.standardised)[at], said):
                return False
        if not torch.equal(path_of(self.rows, n, self.plain_median, False)[at], self.plain):
            return False
        if not all(_same_output(rows, self.rows, self.values) for rows in (self.early_rows, self.late_rows)):
            return False
        again = [torch.from_numpy(b)[at] for b in self._proved()]
        return bool(torch.equal(again[0], self.earliest) and torch.equal(again[1], self.latest)) and (
            self.verdicts == _verdicts(self, [bool(v) for v in self.accepted])
        )

    def _proved(self) -> tuple[Any, Any]:
        if self.plain_median == 1:
            return proved_range(self.rows, self.values, self.visible, _mean(self.rows), self.keys, self.duals)
        return _cell_range(self.rows, self.values, self.visible, self.keys, self.plain_median)

    def to_frame(self) -> pd.DataFrame:
        """One line a word; times in seconds (or keys)."""
        import pandas as pd

        parts = ("first", "early", "late", "plain", "earliest", "latest")
        times = {name: (getattr(self, name) * self.unit).numpy() for name in parts}
        return pd.DataFrame({"name": self.names, "verdict": self.verdicts, **times})

    def to_dict(self) -> dict[str, Any]:
        return {
            "words": self.to_frame().to_dict("records"),
            "heads": [list(pair) for pair in self.heads],
            "sentences": self.sentences(),
            "summary": self.summary(),
            "checked": self.check(),
            "verifications": [None if v is None else v.to_dict() for v in self.verifications],
            "provenance": self.provenance.to_dict(),
        }

    def plot(self, *, ax: Any = None) -> Any:
        """The matrix with the path, and the paths of the early and the late rows; returns the Axes."""
        from whence.attention.plots_alignment import plot_alignment

        return plot_alignment(self, ax)

    @property
    def matrix(self) -> Tensor:
        """[query, key]: what the path is found on."""
        return alignment_matrix(self.rows[..., : self.keys], median=self.median, standardise=self.standardised)


def _mean(rows: Tensor) -> Tensor:
    return torch.full((len(rows),), 1.0 / len(rows), dtype=torch.float64)


def _cell_range(rows: Tensor, values: Tensor, visible: Tensor, n: int, median: int) -> tuple[Any, Any]:
    """The possible first keys of a path with a median: cell intervals, through the median and the mean, through the paths."""
    lower = upper = torch.zeros(rows.shape[1], n, dtype=torch.float64)
    for row, value, seen in zip(rows, values, visible, strict=True):
        bounds = weight_bounds(row, value, visible=None if bool(seen.all()) else seen)
        lower = lower + running_median(bounds.lower[:, :n], median) / len(rows)
        upper = upper + running_median(bounds.upper[:, :n], median) / len(rows)
    return possible_first_keys(lower, upper)


def _same_output(rows: Tensor, original: Tensor, values: Tensor) -> bool:
    """Whether these are attention rows with the outputs of the original ones, to 1e-10."""
    moved = torch.linalg.vector_norm((rows - original) @ values, dim=-1)
    size = torch.linalg.vector_norm(original @ values, dim=-1)
    sums = float((rows.sum(-1) - 1).abs().max())
    return bool((moved <= SAME_OUTPUT * size).all()) and float(rows.min()) >= 0 and sums <= UNIT_SUM


def align_rows(
    source: Trace,
    gathered: Gathered,
    heads: Sequence[tuple[int, int]],
    *,
    median: int = 1,
    keys: int | None = None,
    within: float = 0.0,
    unit: float = 1.0,
    standardise: bool = False,
    words: Sequence[tuple[str, int]] | None = None,
    programs: int = 4000,
    verify: bool = True,
) -> Alignment:
    """The alignment of these rows; `words`: (name, the query it begins with), None: every query by its own name.

    A standardised path is proved nothing of; then the plain path is the one without standardisation and median.
    """
    n = min(keys or len(gathered.key_names), len(gathered.key_names))
    named = words or [(gathered.query_names[q], i) for i, q in enumerate(gathered.queries)]
    at = [start for _, start in named]
    plain_median = 1 if standardise else median
    duals = torch.zeros(len(gathered.rows), 0, gathered.values.shape[-1], dtype=torch.float64)
    if plain_median == 1:
        proof = certify_path(
            gathered.rows, gathered.values, gathered.visible, _mean(gathered.rows), n, programs=programs
        )
        earliest, latest, duals = proof.first, proof.last, proof.duals
    else:
        earliest, latest = _cell_range(gathered.rows, gathered.values, gathered.visible, n, plain_median)
    early_rows, late_rows = pushed(gathered, n, at, median=median, standardise=standardise, unit=unit)
    first, early, late = (path_of(rows, n, median, standardise)[at] for rows in (gathered.rows, early_rows, late_rows))
    result = Alignment(
        names=tuple(name for name, _ in named),
        verdicts=("open",) * len(named),
        first=first,
        early=early,
        late=late,
        plain=path_of(gathered.rows, n, plain_median, False)[at],
        earliest=torch.from_numpy(earliest)[at],
        latest=torch.from_numpy(latest)[at],
        within=within,
        unit=unit,
        standardised=standardise,
        median=median,
        plain_median=plain_median,
        keys=n,
        starts=(*at, len(gathered.queries)),
        heads=tuple(heads),
        attention=gathered.stack.name,
        queries=gathered.queries,
        rows=gathered.rows,
        early_rows=early_rows,
        late_rows=late_rows,
        values=gathered.values,
        visible=gathered.visible,
        duals=duals,
        provenance=source.provenance.by(
            "align", heads=[list(h) for h in heads], median=median, standardise=standardise
        ),
        trace=source,
    )
    accepted: list[bool] = []
    outcomes: list[Verification | None] = []
    if verify and source.model is not None:
        for rows in (early_rows, late_rows):
            if torch.equal(rows, gathered.rows):  # none was found that goes further that way
                accepted.append(False)
                outcomes.append(None)
                continue
            places = [(heads, q, gathered.rows[:, i], rows[:, i]) for i, q in enumerate(gathered.queries)]
            good, outcome = verify_rows(source, gathered.stack.name, places)
            accepted.append(all(good))
            outcomes.append(outcome)
    return replace(
        result, verdicts=_verdicts(result, accepted), verifications=tuple(outcomes), accepted=tuple(accepted)
    )


def _verdicts(alignment: Alignment, accepted: Sequence[bool]) -> tuple[str, ...]:
    """Certified where the path itself is proved near; refuted where rows that the model took for its own move it."""
    far = torch.zeros(len(alignment.names), dtype=torch.bool)
    for same, moved in zip(accepted, (alignment.early, alignment.late), strict=False):
        if same:
            far |= (moved - alignment.first).abs() * alignment.unit > alignment.within + SUM_ROUNDING
    near = (
        torch.maximum(alignment.first - alignment.earliest, alignment.latest - alignment.first) * alignment.unit
        <= alignment.within + SUM_ROUNDING
    )
    proved = near & (not alignment.standardised)
    return tuple("certified" if bool(p) else "refuted" if bool(f) else "open" for p, f in zip(proved, far, strict=True))


def align(
    model: Any,
    audio: Any,
    words: str | None = None,
    *,
    heads: Sequence[tuple[int, int]] | None = None,
    within: float = 0.2,
    rows: Literal["token", "before"] = "token",
) -> Alignment:
    """The time of every word in a recording, by Whisper's alignment heads, and how far the computation fixes it.

    `audio`: a WAV file, 16,000 samples a second as an array, or (samples, rate). `words`: the text spoken; None: what the
    model hears. `heads`: (layer, head) pairs of the cross-attention; None: those that the model's generation
    configuration names. `within`: seconds that a time may move and still count as the same. Times are those of
    transformers' `return_token_timestamps`: the recipe in `whence.core.attention.alignment`.

    `rows`: which row tells the time of a token. "token", the row of the token itself, as transformers reads it; "before",
    the row of the token before it, from which it was predicted, as OpenAI's own code reads it. The first
    already looks at what comes next: on four words spoken by espeak-ng it was off by .38 s (median), the second by .14 s.

    Nothing can be certified of the recipe's own path: standardising a frame over the tokens couples all rows. The range
    that is proved is that of the plain path: the mean of the heads, neither standardised nor filtered
    (`whence.core.attention.path_certificate`).
    """
    if rows not in ("token", "before"):
        raise InputError(
            f"rows={rows!r} is unknown; the time of a token is read off its own row, 'token', or 'before'."
        )
    chosen = as_model(model)
    samples = read_audio(audio)
    inputs, count, frames = speech_inputs(chosen, samples, words)
    pairs = [(int(a), int(b)) for a, b in heads or alignment_heads(chosen)]
    found = trace(chosen, inputs, keep=("attention", "values", "outputs"))
    ids = inputs["decoder_input_ids"][0].tolist()
    queries = list(range(count - (rows == "before"), len(ids) - 1))
    if len(ids) - 1 <= count:
        raise InputError("the recording has no words: the model heard nothing. Give the words that are spoken.")
    gathered = gather_rows(found, pairs, queries, "cross")
    median = int(getattr(chosen.model.config, "median_filter_width", 7))
    return align_rows(
        found, gathered, pairs, median=median, keys=frames, within=within, unit=FRAME, standardise=True,
        words=words_of(chosen, ids[count:-1]),
    )  # fmt: skip
