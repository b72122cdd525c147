"""Of one text: a line for each layer and head. Is its attention determined, what does it go to, how far may it be read?"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from whence.attention.heads import head_of, key_labels
from whence.attention.identifiability import Identifiability, identifiability
from whence.core.attention.bounds import weight_bounds
from whence.core.attention.verdict import RowVerdict, by_bounds, solved_rows
from whence.core.numerics.arrays import AnyArray
from whence.mixing.local_vs_global import local_vs_global
from whence.reading.trace import Layer, Stack, Trace
from whence.surveys.settings import SurveySettings

Columns = dict[str, AnyArray]
KINDS = ("start", "end", "punctuation", "rest")
"""What attention goes to: a special first token ([CLS], BOS), other special tokens ([SEP], a sink), punctuation, words."""


def head_columns(trace: Trace, settings: SurveySettings, seed: int) -> Columns:
    """Columns of length layers · heads, layer by layer. Empty where no measure has lines for heads."""
    stack = trace.of(settings.attention)
    columns: Columns = {}
    if "attention" in settings.measures:
        found = identifiability(trace, leverage=False, attention=settings.attention)
        columns |= attention_columns(stack, found)
        if "certainty" in settings.measures:
            columns |= certainty_columns(stack, found, settings.epsilon, settings.rows, seed)
    if "local-global" in settings.measures:
        both = local_vs_global(trace, attention=settings.attention, mode="probes", probes=settings.probes, seed=seed)
        for name, values in (
            ("pearson", both.values),
            ("spearman", both.extra["spearman"]),
            ("jsd", both.extra["jsd"]),
        ):
            columns[f"local_global_{name}"] = values.nanmean(-1).flatten().numpy()
    return columns


def attention_columns(stack: Stack, identifiability: Identifiability) -> Columns:
    """Rank, null dimension, null share, r, raw and effective mass by type, entropy and the heaviest weight: row means.

    rank and null_dimension (simplex) are the largest of a head's rows: those of the whole text under a causal mask.
    """
    kinds = _kind_of_type(identifiability, stack)
    columns: dict[str, Tensor] = {
        "rank": identifiability.extra["rank"].amax(-1).to(torch.int32),
        "null_dimension": identifiability.extra["simplex_null_dimension"].amax(-1).to(torch.int32),
        "null_share": identifiability.extra["null_share"].mean(-1),
        "r": identifiability.extra["head_r"],
    }
    for side in ("raw", "effective"):
        by_type = identifiability.extra[f"{side}_by_type"].to(torch.float64)
        for kind in KINDS:
            at = [i for i, name in enumerate(kinds) if name == kind]
            columns[f"{side}_{kind}"] = by_type[..., at].sum(-1)
    weights = [layer.attention.detach().to(torch.float64) for layer in stack]
    columns["entropy"] = torch.stack([-torch.special.xlogy(a, a).sum(-1).mean(-1) for a in weights])
    columns["top"] = torch.stack([a.amax(-1).mean(-1) for a in weights])
    return {name: values.flatten().numpy() for name, values in columns.items()}


def _kind_of_type(identifiability: Identifiability, stack: Stack) -> list[str]:
    first = _start(stack)
    return [_kind(name, first) for name in identifiability.token_types]


def key_kinds(stack: Stack) -> list[str]:
    """The type, of `KINDS`, of every key."""
    first = _start(stack)
    return [_kind(name, first) for name in key_labels(stack).kinds()]


def _start(stack: Stack) -> str | None:
    """The name of a special first token."""
    labels = key_labels(stack)
    return labels.kinds()[0] if labels.special[0] else None


def _kind(name: str, first: str | None) -> str:
    return name if name in ("punctuation", "rest") else "start" if name == first else "end"


def certainty_columns(stack: Stack, identifiability: Identifiability, epsilon: float, limit: int, seed: int) -> Columns:
    """How many rows are unique; of a sample of the others, how many are certain, flat and open, and the mean width.

    certain_…, open_…: of these, the rows whose heaviest weight is on that type of token (`KINDS`). The sample is `limit`
    of the text's rows that are not unique (0: all), whatever their layer and head, drawn by the text's own seed: the same
    text gives the same rows anywhere. width: of the heaviest weight of each sampled row, the closed-form bound where that
    already decides the row, else exact.
    """
    free = identifiability.extra["simplex_null_dimension"]
    unique = free == 0
    by_kind = [f"{verdict}_{kind}" for verdict in ("certain", "open") for kind in KINDS]
    names = ("unique", "certain", "flat", "open", "sampled", "rows", *by_kind)
    kind_of_key = key_kinds(stack)
    counts = {name: torch.zeros(free.shape[:2], dtype=torch.int32) for name in names}
    counts["unique"][:], counts["rows"][:] = unique.sum(-1), (~unique).sum(-1)
    width = torch.full(free.shape[:2], torch.nan, dtype=torch.float64)
    sample = (~unique).nonzero()
    if limit and len(sample) > limit:
        sample = sample[np.sort(np.random.default_rng(seed).choice(len(sample), size=limit, replace=False))]
    for i, h in dict.fromkeys((i, h) for i, h, _ in sample.tolist()):
        rows = sample[(sample[:, 0] == i) & (sample[:, 1] == h), 2]
        verdicts, widths, heaviest = _verdicts(stack.layers[i], h, rows, epsilon)
        for name in ("certain", "flat", "open"):
            counts[name][i, h] = (verdicts == int(RowVerdict[name.upper()])).sum()
        for name in ("certain", "open"):
            for key in heaviest[verdicts == int(RowVerdict[name.upper()])].tolist():
                counts[f"{name}_{kind_of_key[key]}"][i, h] += 1
        counts["sampled"][i, h] = len(rows)
        width[i, h] = widths.mean()
    return {**{name: t.flatten().numpy() for name, t in counts.items()}, "width": width.flatten().numpy()}


def _verdicts(layer: Layer, index: int, rows: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """The verdict on each of the `rows` of one head, the width of its heaviest weight, and the key that has it."""
    weights, values, visible = head_of(layer, index)
    chosen = weights[rows]
    seen = torch.ones(chosen.shape, dtype=torch.bool) if visible is None else visible.expand(weights.shape)[rows]
    bounds = weight_bounds(chosen, values, visible=None if visible is None else seen)
    verdicts = by_bounds(chosen, bounds, epsilon)
    heaviest = chosen.argmax(-1)
    widths = bounds.width.gather(-1, heaviest[:, None]).squeeze(-1)
    left = verdicts == int(RowVerdict.NONE)
    if bool(left.any()):
        solved = solved_rows(chosen[left], values, seen[left], bounds.upper[left], epsilon, widths=True)
        verdicts[left], widths[left] = solved
    return verdicts, widths, heaviest
