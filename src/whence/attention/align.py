"""When was each word spoken, as the alignment heads have it, and does the model's computation fix that?"""

from __future__ import annotations

import os
import wave
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from whence.attention.decided_rows import Gathered, gather_rows
from whence.attention.verified_rows import verify_rows
from whence.attention.witness import Verification
from whence.core.attention.alignment import alignment_matrix, first_keys, possible_first_keys, running_median
from whence.core.attention.bounds import weight_bounds
from whence.core.attention.decision import SAME_OUTPUT, Heads
from whence.errors import InputError
from whence.model.load import Model, as_model
from whence.reading.trace import Trace
from whence.reading.tracing import trace
from whence.results.provenance import Provenance
from whence.results.short_repr import short_repr

if TYPE_CHECKING:
    import pandas as pd

RATE = 16_000  # Whisper hears 16,000 samples a second
FRAME = 0.02  # ... and its encoder gives a frame every two hundredths


@dataclass(frozen=True)
class Alignment:
    """Where a monotone path over several heads first reaches each query, and how far the computation fixes that.

    names: the queries, or the words they make. first: the key at which the path reaches each. early, late: the same for
    attention rows with the same head outputs, every row pushed to the front or to the back. plain: the path without
    standardisation; earliest, latest: in every attention with the same head outputs `plain` lies between them (proved
    from the intervals of the cells). All [name], in keys; `unit` seconds a key. verdicts: "refuted" where `early` or
    `late`, verified in the model, is more than `within` away; "certified" where the path is not standardised and its proved
    range is within `within`; else "open".
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
    provenance: Provenance = field(repr=False)
    verifications: tuple[Verification, ...] = ()
    trace: Trace | None = field(default=None, repr=False, compare=False)

    @property
    def times(self) -> Tensor:
        """[name]: `first` in seconds (or keys, where a key is no time)."""
        return self.first * self.unit

    @property
    def fixed(self) -> int:
        """How many names have a proved range that leaves something out."""
        return int((self.latest - self.earliest < self.keys - 1).sum()) - int(self.starts[0] == 0)

    def sentences(self) -> list[str]:
        """Each word, its time, and what was found of it."""
        said = []
        for i, name in enumerate(self.names):
            at, early, late = (float(t[i]) * self.unit for t in (self.first, self.early, self.late))
            low, high = (float(t[i]) * self.unit for t in (self.earliest, self.latest))
            proved = f"the plain path is proved to reach it between {low:.2f} and {high:.2f}"
            said.append(
                f"{name} at {at:.2f}: {self.verdicts[i]}; attention with the same outputs puts it at {early:.2f} or at "
                f"{late:.2f}; {proved}."
            )
        return said

    def summary(self) -> str:
        """What the whole alignment is worth, in one sentence."""
        moved = sum(word == "refuted" for word in self.verdicts)
        certified = sum(word == "certified" for word in self.verdicts)
        note = "no range can be certified" if self.fixed <= 0 else f"{self.fixed} have a certified range"
        return (
            f"Of {len(self.names)} times {certified} are certified to within {self.within:g}, {moved} are moved further "
            f"by attention with the same outputs; of the un-standardised path {note}."
        )

    def check(self) -> bool:
        """Recompute the paths, the bounds and the outputs of the pushed rows from the tensors; no solver."""
        n = self.keys
        for rows, said in ((self.rows, self.first), (self.early_rows, self.early), (self.late_rows, self.late)):
            if not torch.equal(_firsts(rows, n, self.median, self.standardised)[list(self.starts[:-1])], said):
                return False
        if not all(_same_output(rows, self.rows, self.values) for rows in (self.early_rows, self.late_rows)):
            return False
        bounds = _proved(self.rows, self.values, self.visible, n, self.median)
        again = [torch.from_numpy(b)[list(self.starts[:-1])] for b in bounds]
        return bool(torch.equal(again[0], self.earliest) and torch.equal(again[1], self.latest))

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
            "summary": self.summary(),
            "checked": self.check(),
            "verifications": [v.to_dict() for v in self.verifications],
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


def _firsts(rows: Tensor, n: int, median: int, standardised: bool) -> Tensor:
    return torch.from_numpy(first_keys(alignment_matrix(rows[..., :n], median=median, standardise=standardised)))


def _proved(rows: Tensor, values: Tensor, visible: Tensor, n: int, median: int) -> tuple[Any, Any]:
    """The possible first keys of the plain path: cell intervals, through the median and the mean, through the paths."""
    lower = upper = torch.zeros(rows.shape[1], n, dtype=torch.float64)
    for row, value, seen in zip(rows, values, visible, strict=True):
        bounds = weight_bounds(row, value, visible=None if bool(seen.all()) else seen)
        lower = lower + running_median(bounds.lower[:, :n], median) / len(rows)
        upper = upper + running_median(bounds.upper[:, :n], median) / len(rows)
    return possible_first_keys(lower, upper)


def pushed(gathered: Gathered, path: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """Rows with the same outputs aimed at an earlier, and at a later, path; both [head, query, key].

    Every row is moved as far as it goes towards the keys up to `reach` before (after) the one where the path is now. A
    tenth of the original row is left in, so that no key loses all its weight.
    """
    solver = Heads(gathered.rows, gathered.values, torch.ones(len(gathered.rows)), gathered.visible)
    ends = gathered.rows.repeat(2, 1, 1, 1)
    for i in range(gathered.rows.shape[1]):
        away = np.arange(gathered.rows.shape[-1], dtype=np.float64) - float(path[i])
        for side, sign in enumerate((1.0, -1.0)):
            cost = np.where(np.abs(away) <= reach, sign * away / max(reach, 1), 1.0)
            for h, row in enumerate(solver.at(i)):
                best = torch.from_numpy(row.polished(row.exact(cost)[2]))
                other = 0.9 * best + 0.1 * gathered.rows[h, i]
                if _same_output(other[None], gathered.rows[h, i][None], gathered.values[h]):
                    ends[side, h, i] = other
    return ends[0], ends[1]


def _same_output(rows: Tensor, original: Tensor, values: Tensor) -> bool:
    """Whether these are attention rows with the outputs of the original ones, to 1e-10."""
    moved = torch.linalg.vector_norm((rows - original) @ values, dim=-1)
    size = torch.linalg.vector_norm(original @ values, dim=-1)
    sums = float((rows.sum(-1) - 1).abs().max())
    return bool((moved <= SAME_OUTPUT * size).all()) and float(rows.min()) >= 0 and sums <= 1e-11


def align_rows(
    source: Trace,
    gathered: Gathered,
    heads: Sequence[tuple[int, int]],
    *,
    median: int = 7,
    keys: int | None = None,
    within: float = 0.0,
    unit: float = 1.0,
    standardise: bool = False,
    reach: int = 50,
    words: Sequence[tuple[str, int]] | None = None,
    verify: bool = True,
) -> Alignment:
    """The alignment of these rows; `words`: (name, the query it begins with), None: every query by its own name.

    `reach`: how many keys earlier or later the aimed alternatives are aimed.
    """
    n = min(keys or len(gathered.key_names), len(gathered.key_names))
    named = words or [(gathered.query_names[q], i) for i, q in enumerate(gathered.queries)]
    at = [start for _, start in named]
    path = _firsts(gathered.rows, n, median, standardise)
    first = path[at]
    early_rows, late_rows = pushed(gathered, path, reach)
    early, late = (_firsts(rows, n, median, standardise)[at] for rows in (early_rows, late_rows))
    earliest, latest = (
        torch.from_numpy(b)[at] for b in _proved(gathered.rows, gathered.values, gathered.visible, n, median)
    )
    result = Alignment(
        names=tuple(name for name, _ in named),
        verdicts=("open",) * len(named),
        first=first,
        early=early,
        late=late,
        plain=_firsts(gathered.rows, n, median, False)[at],
        earliest=earliest,
        latest=latest,
        within=within,
        unit=unit,
        standardised=standardise,
        median=median,
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
        provenance=source.provenance.by(
            "align", heads=[list(h) for h in heads], median=median, standardise=standardise
        ),
        trace=source,
    )
    return _judged(result, verify and source.model is not None)


def _judged(alignment: Alignment, verify: bool) -> Alignment:
    """The verdicts: the pushed rows count once the model has taken them for its own."""
    accepted, outcomes = [], []
    if verify and alignment.trace is not None:
        for rows in (alignment.early_rows, alignment.late_rows):
            places = [(alignment.heads, q, alignment.rows[:, i], rows[:, i]) for i, q in enumerate(alignment.queries)]
            good, outcome = verify_rows(alignment.trace, alignment.attention, places)
            accepted.append(all(good))
            outcomes.append(outcome)
    far = torch.zeros(len(alignment.names), dtype=torch.bool)
    for same, moved in zip(accepted, (alignment.early, alignment.late), strict=False):
        if same:
            far |= (moved - alignment.first).abs() * alignment.unit > alignment.within + 1e-9
    farthest = torch.maximum(alignment.first - alignment.earliest, alignment.latest - alignment.first)
    near = farthest * alignment.unit <= alignment.within + 1e-9
    proved = near & (not alignment.standardised)
    verdicts = tuple(
        "certified" if bool(p) else "refuted" if bool(f) else "open" for p, f in zip(proved, far, strict=True)
    )
    return replace(alignment, verdicts=verdicts, verifications=tuple(outcomes))


def align(
    model: Any,
    audio: Any,
    words: str | None = None,
    *,
    heads: Sequence[tuple[int, int]] | None = None,
    within: float = 0.2,
) -> Alignment:
    """The time of every word in a recording, by Whisper's alignment heads, and how far the computation fixes it.

    `audio`: a WAV file, 16,000 samples a second as an array, or (samples, rate). `words`: the text spoken; None: what the
    model hears. `heads`: (layer, head) pairs of the cross-attention; None: those that the model's generation
    configuration names. `within`: seconds that a time may move and still count as the same. Times are those of
    transformers' `return_token_timestamps`: the recipe in `whence.core.attention.alignment`.
    """
    chosen = as_model(model)
    samples = read_audio(audio)
    inputs, count, frames = _inputs(chosen, samples, words)
    pairs = [(int(a), int(b)) for a, b in heads or _alignment_heads(chosen)]
    found = trace(chosen, inputs, keep=("attention", "values", "outputs"))
    ids = inputs["decoder_input_ids"][0].tolist()
    queries = list(range(count, len(ids) - 1))
    if not queries:
        raise InputError("the recording has no words: the model heard nothing. Give the words that are spoken.")
    rows = gather_rows(found, pairs, queries, "cross")
    median = int(getattr(chosen.model.config, "median_filter_width", 7))
    return align_rows(
        found, rows, pairs, median=median, keys=frames, within=within, unit=FRAME, standardise=True,
        words=_words(chosen, ids[count:-1]),
    )  # fmt: skip


def read_audio(audio: Any) -> Tensor:
    """Mono samples at 16,000 a second, between −1 and 1."""
    rate = RATE
    if isinstance(audio, (str, os.PathLike)):
        try:
            with wave.open(str(Path(audio).expanduser()), "rb") as file:
                rate, channels, width = file.getframerate(), file.getnchannels(), file.getsampwidth()
                raw = file.readframes(file.getnframes())
        except (OSError, wave.Error, EOFError) as problem:
            raise InputError(f"{str(audio)!r} cannot be read as a WAV file: {problem}.") from problem
        if width != 2:
            raise InputError(f"{str(audio)!r} has samples of {width} bytes; 16-bit WAV files are read.")
        samples = np.frombuffer(raw, dtype="<i2").reshape(-1, channels).mean(1) / 32768.0
    else:
        given, rate = audio if isinstance(audio, tuple) else (audio, RATE)
        samples = np.asarray(given, dtype=np.float64)
    if samples.ndim != 1 or not len(samples) or not np.isfinite(samples).all():
        raise InputError(f"sound of shape {samples.shape}: give finite samples of one channel.")
    if rate != RATE:
        from math import gcd

        from scipy.signal import resample_poly

        common = gcd(int(rate), RATE)
        samples = resample_poly(samples, RATE // common, int(rate) // common)
    if len(samples) > 30 * RATE:
        raise InputError(f"the recording lasts {len(samples) / RATE:.1f} s; Whisper hears 30 s at a time: cut it.")
    return torch.tensor(np.asarray(samples), dtype=torch.float32)


def _inputs(model: Model, samples: Tensor, words: str | None) -> tuple[dict[str, Tensor], int, int]:
    """What the model reads, how many of the decoder's tokens come before the words, and how many frames have sound."""
    if model.processor is None or model.tokenizer is None:
        raise InputError(
            f"{model.name} has no feature extractor and tokenizer: align needs a speech model like 'whisper'."
        )
    features = model.processor(samples.numpy(), sampling_rate=RATE, return_tensors="pt")["input_features"]
    prompt = model.tokenizer("")["input_ids"][:-1]
    if words is None:
        with torch.no_grad():
            text = model.model.generate(features.to(model.device), do_sample=False, num_beams=1).cpu()[0].tolist()
        special = set(model.tokenizer.all_special_ids) | set(range(min(prompt), model.model.config.vocab_size))
        text = [t for t in text if t not in special]
    else:
        text = model.tokenizer(words if words.startswith(" ") else f" {words}")["input_ids"][len(prompt) : -1]
    ids = torch.tensor([[*prompt, *text, model.tokenizer.eos_token_id]])
    frames = max(1, min(-(-len(samples) // 160) // 2, features.shape[-1] // 2))
    return {"input_features": features, "decoder_input_ids": ids}, len(prompt), frames


def _alignment_heads(model: Model) -> list[tuple[int, int]]:
    known = getattr(getattr(model.model, "generation_config", None), "alignment_heads", None)
    if not known:
        raise InputError(f"{model.name} does not say which heads align: give them with heads=[(layer, head), …].")
    return [(a, b) for a, b in known]


def _words(model: Model, ids: Sequence[int]) -> list[tuple[str, int]]:
    """(word, its first token): a token that begins with a space begins a word, punctuation stays with the word before."""
    words: list[tuple[str, int]] = []
    for i, number in enumerate(ids):
        piece = model.tokenizer.decode([number])
        if not words or (piece.startswith(" ") and piece.strip(" .,!?;:'\"")):
            words.append((piece.strip(), i))
        else:
            words[-1] = (words[-1][0] + piece.strip(), words[-1][1])
    return words
