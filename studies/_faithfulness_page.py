"""The page of the faithfulness study, from what has been run: nothing is written that has no run behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from whence.faithful.result import Faithfulness
from whence.faithful.statistics import FEWEST

INTRODUCTION = """# Which explanation is faithful?

Written by `python studies/faithfulness.py --write`. Δ is the area between the two removal curves (least minus most important
units first): 0 for a random order, larger is better. [ ] are 95 % bootstrap intervals over texts. "Beats" needs a Holm-adjusted
paired bootstrap p < .05 over all pairs, under both ways of removing words (drop: ids deleted, mask: the mask token); everything
else is "not separated". Only what was run is below: each part says on how many texts.
"""


def _table(run: Faithfulness) -> list[str]:
    frame = run.table()
    lines = ["| method | signed | " + " | ".join(f"Δ {o} | comp − suff {o} | NAOPC {o}" for o in run.operators) + " |"]
    lines.append("|---|---|" + "---|---|---|" * len(run.operators))
    for method in frame["method"].unique():
        cells = []
        for operator in run.operators:
            row = frame[(frame["method"] == method) & (frame["operator"] == operator)].iloc[0]
            naopc = f"{row['naopc']:.2f}" if row["naopc"] == row["naopc"] else "–"
            cells.append(
                f"{row['delta']:.2f} [{row['low']:.2f}, {row['high']:.2f}] | {row['comp'] - row['suff']:.2f} | {naopc}"
            )
        signed = {True: "yes", False: "no"}.get(run.signed.get(method), "")  # type: ignore[arg-type]
        lines.append(f"| {method} | {signed} | {' | '.join(cells)} |")
    return lines


def _against(run: Faithfulness, reference: str, methods: tuple[str, ...]) -> list[str]:
    """The differences that the published claim is about."""
    frame = run.differences(reference)
    lines = []
    for method in methods:
        rows = frame[frame["method"] == method]
        if rows.empty:
            continue
        shown = "; ".join(
            f"{r.operator} {r.difference:+.3f} [{r.low:+.3f}, {r.high:+.3f}], Holm p {r.holm:.3f}"
            for r in rows.itertuples()
        )
        better = all(r.holm < 0.05 and r.difference > 0 for r in rows.itertuples())
        worse = all(r.holm < 0.05 and r.difference < 0 for r in rows.itertuples())
        verdict = (
            f"beats {reference}"
            if better
            else f"is worse than {reference}"
            if worse
            else f"not separated from {reference}"
        )
        lines.append(f"- {method} − {reference}: {shown}: **{verdict}**")
    return lines


def run_section(title: str, path: Path, note: str) -> list[str]:
    """One run of curves; nothing where it was not made."""
    if not path.exists():
        return []
    run = Faithfulness.load(path)
    if len(run.paired) < FEWEST:
        return []  # too few for any verdict
    lines = [
        "",
        f"## {title}",
        "",
        f"{note} {len(run.paired)} texts, {len(run.methods)} methods.",
        "",
        *_table(run),
        "",
    ]
    lines += [f"- {sentence}" for sentence in run.verdict()]
    if "alti" in run.methods:
        unsigned = (
            "gradient",
            "absolute-input-x-gradient",
            "absolute-integrated-gradients",
            "norms",
            "rollout",
            "globenc",
        )
        signed = ("input-x-gradient", "integrated-gradients", "occlusion", "alti-logit")
        lines += ["", "Against ALTI:", "", *_against(run, "alti", (*unsigned, *signed))]
    return lines


def plausibility_section(found: Any) -> list[str]:
    frame = found.table()
    lines = ["", "## Would a person mark the same words? (SST leaves)", ""]
    lines.append(
        f"bert-tiny, words of the gold polarity as rationales, {len(found.numbers)} sentences that the model gets right and that "
        f"have marked and unmarked words ({len(found.skipped)} others left out). Chance is exact."
    )
    lines += ["", "| method | AP | F1 at k | IOU at k | MRR |", "|---|---|---|---|---|"]
    order = frame.sort_values("ap", ascending=False)
    return lines + [f"| {r.method} | {r.ap:.2f} | {r.f1:.2f} | {r.iou:.2f} | {r.mrr:.2f} |" for r in order.itertuples()]


def determined_section(path: Path) -> list[str]:
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    names = [m["method"] for m in found[0]["methods"] if m["kind"] != "map"]
    moved = sum(f["total_variation"] for f in found) / len(found)
    changes = [f["logit_change"] for f in found if f["logit_change"] is not None]
    lines = ["", "## Is the explanation determined?", ""]
    lines.append(
        f"Fine-tuned MiniLM (heads of 32), {len(found)} IMDB reviews cut at 128 tokens, attention replaced by other attention "
        f"with the same head outputs (total variation {moved:.2f} a row; logits change by at most {max(changes):.0e}, relative). "
        "Spearman of each method with itself, rows rolled out, mean; rows whose largest *other* token stays. A lower bound on "
        "the change: the other attention is not aimed at the explanation."
    )
    lines += ["", "| method | kind | Spearman | largest other stays |", "|---|---|---|---|"]
    rows = []
    for name in names:
        own = [next(m for m in f["methods"] if m["method"] == name) for f in found]
        known = [m["spearman"] for m in own if m["spearman"] is not None]
        kept, total = sum(m["kept"] for m in own), sum(m["rows"] for m in own)
        rows.append((sum(known) / max(1, len(known)), f"| {name} | {own[0]['kind']} | {{:.2f}} | {kept} of {total} |"))
    lines += [text.format(value) for value, text in sorted(rows, reverse=True)]
    lines += ["", "Bounds over *every* attention with the same outputs, for chosen rows of the first review:", ""]
    return lines + [f"- {b['sentence']}" for f in found for b in f["bounds"]]


def controls_section(path: Path) -> list[str]:
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    lines = [
        "",
        "## Jain & Wallace's controls",
        "",
        f"bert-tiny, {len(found['texts'])} SST-2 sentences, 20 permutations.",
        "",
    ]
    return lines + [f"- {sentence}" for sentence in found["verdict"]]
