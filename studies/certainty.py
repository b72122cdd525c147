"""How often can a reading of attention be certified? By model, layer, head, length and type of token.

    python studies/certainty.py [--models minilm bert-tiny stories15M smollm2]

Surveys of at least 200 film reviews cut to length for each model. Writes docs/studies/certainty.md and its figures.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from _corpora import ROOT
from _papers import MODELS, TIMES, Subject, cell, subjects, table, write_page

from whence.surveys.head_columns import KINDS
from whence.surveys.result import Survey, certain_share

FIGURES = ROOT / "docs" / "studies"
KIND_NAMES = {
    "start": "special first token",
    "end": "other special tokens",
    "punctuation": "punctuation",
    "rest": "words",
}


def by_times(subject: Subject, survey: Survey) -> pd.DataFrame:
    """The lines of heads with their length in widths of a head."""
    width = subject.shape[2]
    return survey.heads.assign(times=[min(TIMES, key=lambda t: abs(t * width - n)) for n in survey.heads["length"]])


def percent(row: Any) -> str:
    """ "72 ± 4 %"; where every row agrees, the end of the interval that is left."""
    if row["share"] in (0.0, 1.0) and row["low"] == row["low"]:
        return f"0 (up to {row['high']:.0%})" if row["share"] == 0 else f"100 % (at least {row['low']:.0%})"
    return "–" if row["share"] != row["share"] else cell({k: 100 * float(row[k]) for k in row}, "share", 0) + " %"


def lengths_table(found: dict[Subject, Survey]) -> str:
    rows = []
    for subject, survey in found.items():
        frame = by_times(subject, survey)
        each = {float(t): certain_share(part, unique=True) for t, part in frame.groupby("times")}
        rows.append([subject.title, subject.shape[2], *(percent(each[t]) if t in each else "–" for t in TIMES)])
    return table(["model", "d_v", *(f"{t:g} d_v" for t in TIMES)], rows)


def long_rows(subject: Subject, survey: Survey) -> pd.DataFrame:
    frame = by_times(subject, survey)
    return frame[frame["times"] >= 2]


def types_table(found: dict[Subject, Survey]) -> str:
    rows = []
    for subject, survey in found.items():
        frame = long_rows(subject, survey)
        cells = []
        for kind in KINDS:
            part = frame.assign(certain=frame[f"certain_{kind}"], open=frame[f"open_{kind}"])
            count = int((part["certain"] + part["open"]).sum())
            cells.append(f"{percent(certain_share(part))} ({count})" if count else "–")
        rows.append([subject.title, *cells])
    return table(["model", *(KIND_NAMES[kind] for kind in KINDS)], rows)


def heads_at(subject: Subject, survey: Survey) -> tuple[float, dict[str, int], list[str]]:
    """Verdicts on heads at the longest length: how many of each, and the names of those that may be read."""
    frame = by_times(subject, survey)
    longest = float(frame["times"].max())
    counts: dict[str, int] = {}
    readable = []
    for (layer, head), part in frame[frame["times"] == longest].groupby(["layer", "head"]):
        found = certain_share(part)
        told = int((part["certain"] + part["open"]).sum())
        name = (
            "too few rows"
            if told < 10
            else "read"
            if found["share"] >= 0.95
            else "careful"
            if found["share"] >= 0.5
            else "do not read"
        )
        counts[name] = counts.get(name, 0) + 1
        if name == "read":
            readable.append(f"{layer}.{head}")
    return longest, counts, readable


def disagreement(subject: Subject, survey: Survey) -> tuple[float, int, int]:
    """Over heads at two widths and more: Spearman's ρ of r and certainty, and how many heads the two put apart."""
    frame = long_rows(subject, survey)
    rows = []
    for _, part in frame.groupby(["layer", "head"]):
        told = int((part["certain"] + part["open"]).sum())
        if told >= 10:
            rows.append((float(part["r"].mean()), certain_share(part)["share"]))
    both = pd.DataFrame(rows, columns=["r", "certain"])
    apart = int(
        ((both["r"] < both["r"].median()) & (both["certain"] >= 0.5)).sum()
        + ((both["r"] > 0.8) & (both["certain"] < 0.5)).sum()
    )
    return float(both["r"].corr(both["certain"], method="spearman")), apart, len(both)


def draw(found: dict[Subject, Survey]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2, 3.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for subject, survey in found.items():
        frame = by_times(subject, survey)
        each = [(t, certain_share(part, unique=True)) for t, part in frame.groupby("times")]
        x = [t for t, _ in each]
        left.plot(x, [s["share"] for _, s in each], marker="o", ms=3, label=subject.title)
        left.fill_between(x, [s["low"] for _, s in each], [s["high"] for _, s in each], alpha=0.2)
        long = long_rows(subject, survey)
        layers = [(k, certain_share(part)) for k, part in long.groupby("layer")]
        depth = [k / max(1, len(layers) - 1) for k, _ in layers]
        middle.plot(depth, [s["share"] for _, s in layers], marker="o", ms=3, label=subject.title)
        heads = [(float(p["r"].mean()), certain_share(p)["share"]) for _, p in long.groupby(["layer", "head"])
                 if int((p["certain"] + p["open"]).sum()) >= 10]  # fmt: skip
        right.scatter([r for r, _ in heads], [c for _, c in heads], s=8, alpha=0.6, label=subject.title)
    left.set(xscale="log", xlabel="length, in widths of a head", ylabel="readings unique or certain", ylim=(0, 1.02))
    left.set_xticks([0.5, 1, 2, 4, 8], ["½", "1", "2", "4", "8"])
    left.minorticks_off()
    middle.set(xlabel="depth (first layer 0, last 1)", ylabel="rows certain, from 2 widths on", ylim=(0, 1.02))
    right.set(xlabel="r of raw and effective attention", ylabel="rows certain, by head", ylim=(-0.02, 1.02))
    left.legend(fontsize=7)
    figure.savefig(FIGURES / "certainty.png", dpi=160)


def main() -> None:
    found = {subject: subject.by_length() for subject in subjects(__doc__ or "")}
    draw(found)
    heads, apart = [], []
    for subject, survey in found.items():
        longest, counts, readable = heads_at(subject, survey)
        names = ", ".join(readable[:12]) + (" …" if len(readable) > 12 else "") if readable else "none"
        heads.append([subject.title, f"{longest:g} d_v = {int(longest * subject.shape[2])}",
                      *(counts.get(k, 0) for k in ("read", "careful", "do not read", "too few rows")), names])  # fmt: skip
        rho, wrong, of = disagreement(subject, survey)
        apart.append([subject.title, of, f"{rho:.2f}" if rho == rho else "–", wrong])
    texts = ", ".join(f"{s.title} {int(v.texts['reason'].isna().sum())}" for s, v in found.items())
    sampled = ", ".join(f"{s.title} {int(v.heads['sampled'].sum()):,}" for s, v in found.items())
    models = "; ".join(f"{s.title}, {s.shape[0]} layers of {s.shape[1]} heads of {s.shape[2]}" for s in found)
    left = [name for name in MODELS if name not in {s.name for s in found}]
    without = f" Not run for this page: {', '.join(left)}." if left else ""
    body = f"""
**Question.** Beyond as many tokens as a head is wide, infinitely many attention rows give the same head output. Does that
matter to
somebody who reads the row? A reading is *unique* if there is no other row; *certain* (to .05) if in every row with the same
head output
its heaviest weight stays within an interval of .05 and no other key outweighs it by more than .05; *flat* if no weight can exceed
.05; *open* otherwise ([methods](../methods.md), 1.3). How often can a reading be certified, and when?

**Data.** Film reviews (IMDB), cut to {TIMES[0]:g} to {TIMES[-1]:g} widths of a head (at most 512 tokens, or what the model
reads), each
review used once; texts: {texts}. In each text 32 of its rows (SmolLM2: 8) that are not unique are drawn by content and decided
exactly
(closed-form
bounds, else linear programs); rows decided: {sampled}. Intervals are 95 % over texts. The models, all
small: {models}.{without}

## Results

![Certainty by length, by depth, and against r](certainty.png)

**By length.** Readings (rows that are not flat) that are unique or certain:

{lengths_table(found)}

**By what is read.** From two widths on, of the rows that are neither unique nor flat, those that are certain, by the type of
the token
with the heaviest weight (in brackets: rows decided).

{types_table(found)}

**By head, at the greatest length.** A head may be *read* where 95 % of its rows are certain, with *care* from 50 %:

{table(["model", "length", "read", "careful", "do not read", "too few rows", "heads that may be read (layer.head)"], heads)}

**Certainty and r.** The correlation of raw with effective attention is what has been reported of a head. Over heads with ten
decided rows
or more:

{table(["model", "heads", "Spearman ρ of r and certainty", "heads that the two put apart"], apart)}

"Put apart": r below the median where at least half the rows are certain, or r above .8 where fewer than half are. r says how
much of the
weight lies in the null space, not how far the row could move within the simplex: a row with one weight near 1 may have a low r
and no
room, and a broad row a high r and much.

## What this does not say

A certain row is the model's; whether it is an explanation is [another question](faithfulness.md). Rows are sampled, so that a
head
with few decided rows has no verdict. {len(found)} small models on one kind of text are that.
"""
    write_page("certainty", "How often can a reading be certified?", "certainty.py", body)


if __name__ == "__main__":
    main()
