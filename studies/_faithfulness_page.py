"""The page of the faithfulness study, from what has been run: nothing is written that has no run behind it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import _classifiers as classifiers
import _corpora as corpora
import _faithfulness_claims as published
import _faithfulness_texts as texts
import numpy as np

import whence
from whence.faithful.question import prepared_text, units_of
from whence.faithful.rationale import marks_of
from whence.faithful.result import Faithfulness
from whence.faithful.robustness import Robustness
from whence.faithful.statistics import FEWEST
from whence.reading.tokenised import unknown_id
from whence.results.files import write_atomically

PAGE = corpora.ROOT / "docs" / "studies" / "faithfulness.md"
INTRODUCTION = """# Which explanation is faithful?

Written by `python studies/faithfulness.py --write` from the runs of `python studies/faithfulness.py`. Δ is the area between the
two removal curves (least minus most important units first): 0 for a random order, larger is better. [ ] are 95 % bootstrap
intervals over texts. "Beats" needs a Holm-adjusted paired bootstrap p < .05 over all pairs, under both ways of removing words
(drop: ids deleted, mask: the mask token); everything else is "not separated". Only what was run is below: each part says on how
many texts. hidden_token_attribution_16 is by 16 probes a token, not exact; attention flow is left out.
"""
SECTIONS = {
    "sst2-bert-tiny": ("bert-tiny on SST-2", "First test sentences, words, both operators."),
    "sst2-minilm": (
        "MiniLM, fine-tuned, on SST-2",
        "The first test sentences of 5 to 10 words (what six layers and every method allowed in the time), both operators.",
    ),
    "imdb-bert-tiny": (
        "bert-tiny on reviews longer than its heads",
        "IMDB reviews cut at 80 tokens, beyond the head size of 64; both operators.",
    ),
    "imdb-minilm": (
        "MiniLM, fine-tuned, on reviews longer than its heads",
        "IMDB reviews cut at 42 tokens, beyond the head size of 32; some methods, both operators.",
    ),
    "blimp-stories15M": ("Contrasts: BLiMP, stories15M", ""),
    "blimp-smollm2": ("Contrasts: BLiMP, SmolLM2-135M", ""),
    "agreement-stories15M": ("Contrasts: agreement in natural sentences, stories15M", ""),
    "agreement-smollm2": ("Contrasts: agreement in natural sentences, SmolLM2-135M", ""),
}
CONTRAST = {
    "blimp": "distractor_agreement_relational_noun (“the niece of most guests”: has, not have)",
    "agreement": "Linzen et al.'s sentences up to the verb",
}
NOT_HERE = [
    "five training seeds, not the ten of ALTI's paper",
    "ALTI's own models (BERT, DistilBERT, RoBERTa) are not here: its tables are compared in kind, not in digits",
    "e-SNLI (there is no classifier of entailment here): ERASER's movies and SST's word labels stand for plausibility",
    "attention flow and exact hidden token attribution",
    "accented letters of SST-2 as they are: its files are read as Latin-1, which makes two letters of one in 2 and 1 sentences",
    "Wiegreffe & Pinter's trained adversary: it is another model",
]


def loaded(work: Path, name: str) -> Faithfulness | None:
    """A finished run, or what an unfinished one has, where it is enough for a verdict."""
    path = work / f"{name}.jsonl"
    if not path.exists():
        return None
    run = Faithfulness.load(path, unfinished=True)
    return run if len(run.paired) >= FEWEST else None


def _table(run: Faithfulness) -> list[str]:
    frame = run.table()
    exact = bool(frame["naopc"].notna().any())
    heads = [f"Δ {o} | comp − suff {o}" + (f" | NAOPC {o}" if exact else "") for o in run.operators]
    lines = ["| method | signed | " + " | ".join(heads) + " |"]
    lines.append("|---|---|" + ("---|---|" + ("---|" if exact else "")) * len(run.operators))
    for method in frame["method"].unique():
        cells = []
        for operator in run.operators:
            row = frame[(frame["method"] == method) & (frame["operator"] == operator)].iloc[0]
            cells.append(f"{row['delta']:.2f} [{row['low']:.2f}, {row['high']:.2f}] | {row['comp'] - row['suff']:.2f}")
            cells += [f"{row['naopc']:.2f}"] if exact else []
        signed = {True: "yes", False: "no"}.get(run.signed.get(method), "")  # type: ignore[arg-type]
        lines.append(f"| {method} | {signed} | {' | '.join(cells)} |")
    return lines


def _against(run: Faithfulness, reference: str) -> list[str]:
    """Differences of every gradient and mixing method to one of them."""
    frame = run.differences(reference)
    lines = []
    for method in (*published.UNSIGNED_GRADIENTS, *published.SIGNED_GRADIENTS, *published.OTHER_MIXING, "occlusion"):
        rows = frame[frame["method"] == method]
        if rows.empty:
            continue
        shown = "; ".join(
            f"{r.operator} {r.difference:+.3f} [{r.low:+.3f}, {r.high:+.3f}], Holm p {r.holm:.3f}"
            for r in rows.itertuples()
        )
        lines.append(
            f"- {method} − {reference}: {shown}: {reference} **{published.standing(run, reference, method)}** it"
        )
    return lines


def run_section(name: str, run: Faithfulness) -> list[str]:
    """One run of curves."""
    title, note = SECTIONS[name]
    if name.partition("-")[0] in CONTRAST:
        right = np.mean([run.records[i].output > 0 for i in run.paired])
        note = (
            f"{CONTRAST[name.partition('-')[0]]}. The output is logit(good) − logit(bad); the model prefers the good form in "
            f"{right:.0%}. `mask` puts the token that the tokenizer has for padding or unknown words, as there is no mask token."
        )
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
    reference = "alti-logit" if "alti-logit" in run.methods else "alti"
    return [*lines, "", f"Against {reference}:", "", *_against(run, reference)]


def leaves(run: Faithfulness, model: Any) -> Any:
    """SST's own word labels as rationales: words of the gold polarity, on sentences that the model gets right."""
    gold, trees = dict(corpora.sst2().test), texts.leaves()
    given: dict[str, list[Any]] = {m: [] for m in run.methods}
    marks = []
    for i in run.paired:
        record = run.records[i]
        tree = trees.get(record.text.lower().replace(" ", ""))
        wanted = {"positive": "34", "negative": "01"}[record.target]
        right = gold.get(record.text) == texts.NUMBERS[record.target]
        if tree is None or not right or len(tree) != len(record.text.split()):
            continue
        units = units_of(prepared_text(model, record.text), "word", None, unknown_id(model.tokenizer))
        marks.append(marks_of([int(label in wanted) for label, _ in tree], record.text, units, i))
        for m in run.methods:
            given[m].append(record.scores[m])
    return whence.plausibility(given, marks)


def subjects(run: Faithfulness) -> Any:
    """The noun that the verb agrees with: the word before "of"."""
    given: dict[str, list[Any]] = {m: [] for m in run.methods}
    marks = []
    for i in run.paired:
        words = run.records[i].text.split()
        units = run.records[i].units
        if "of" not in words or len(units) != len(words) - 1:  # the last word asks, and stays
            continue
        marks.append([int(k == words.index("of") - 1) for k in range(len(units))])
        for m in run.methods:
            given[m].append(run.records[i].scores[m])
    return whence.plausibility(given, marks) if marks else None


def plausibility_section(found: Mapping[str, Any]) -> list[str]:
    """Average precision (and MRR where one word is marked) of every method, a column for each data set."""
    if not found:
        return []
    lines = [
        "",
        "## Would a person mark the same words?",
        "",
        "Average precision, mean over texts; chance is exact.",
        "",
    ]
    tables = {name: dict(zip(p.table()["method"], p.table()["ap"], strict=True)) for name, p in found.items()}
    lines += ["| method | " + " | ".join(f"{n} ({len(found[n].numbers)} texts)" for n in tables) + " |"]
    lines += ["|---|" + "---|" * len(tables)]
    methods = sorted(
        {m for t in tables.values() for m in t}, key=lambda m: -np.mean([t[m] for t in tables.values() if m in t])
    )
    for m in methods:
        lines.append(f"| {m} | " + " | ".join(f"{t[m]:.2f}" if m in t else "–" for t in tables.values()) + " |")
    return lines


def robustness_section(robust: Robustness | None) -> list[str]:
    if robust is None:
        return []
    n = len(robust.runs[0].paired)
    lines = ["", "## Do training seeds agree?", ""]
    lines.append(
        f"Classifiers of {len(robust.runs)} seeds (ALTI's paper has ten), {n} SST-2 sentences of 5 to 10 words; mean Spearman "
        "over pairs of models and texts with the same prediction, over words; Δ is the mean over models."
    )
    lines += ["", "| method | Spearman | Δ drop | Δ mask |", "|---|---|---|---|"]
    return lines + [
        f"| {r.method} | {r.spearman:.2f} | {r.delta_drop:.2f} | {r.delta_mask:.2f} |"
        for r in robust.table().itertuples()
    ]


def determined_runs(work: Path) -> dict[str, list[dict[str, Any]]]:
    """By model and length, a result per text."""
    names = {"minilm": "MiniLM, fine-tuned", "bert-tiny": "bert-tiny", "stories15M": "stories15M"}
    runs: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(work.glob("determined-*-*-*.json")):
        model, tokens, _ = path.stem.removeprefix("determined-").rsplit("-", 2)
        runs.setdefault(f"{names[model]}, {tokens} tokens", []).append(json.loads(path.read_text()))
    return runs


def agreement_of(found: list[dict[str, Any]]) -> dict[str, float]:
    """Mean Spearman of each method with itself."""
    by: dict[str, list[float]] = {}
    for one in found:
        for m in one["methods"]:
            if m["kind"] != "map" and m["spearman"] is not None:
                by.setdefault(m["method"], []).append(m["spearman"])
    return {m: float(np.mean(v)) for m, v in by.items()}


def determined_section(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    if not runs:
        return []
    lines = ["", "## Is the explanation determined?", ""]
    lines.append(
        "IMDB reviews cut at so many tokens; attention replaced by other attention with the same head outputs. Spearman of each "
        "method with itself, rows rolled out, mean over rows and texts. A lower bound on the change: the other attention is not "
        "aimed at the explanation."
    )
    lines += ["", "| | " + " | ".join(runs) + " |", "|---|" + "---|" * len(runs)]
    lines.append("| texts | " + " | ".join(str(len(f)) for f in runs.values()) + " |")
    moved = [f"{np.mean([one['total_variation'] for one in f]):.2f}" for f in runs.values()]
    lines.append("| total variation of a row | " + " | ".join(moved) + " |")
    change = [max(one["logit_change"] or 0.0 for one in f) for f in runs.values()]
    lines.append("| largest change of a logit (relative) | " + " | ".join(f"{c:.0e}" for c in change) + " |")
    tables = [agreement_of(f) for f in runs.values()]
    for m in sorted({m for t in tables for m in t}, key=lambda m: -np.mean([t[m] for t in tables if m in t])):
        lines.append(f"| {m} | " + " | ".join(f"{t[m]:.2f}" if m in t else "–" for t in tables) + " |")
    bounds = [(name, b["sentence"]) for name, f in runs.items() for one in f for b in one["bounds"]]
    lines += [
        "",
        "Bounds over *every* attention with the same outputs, for chosen rows of the first review of each:",
        "",
    ]
    return lines + [f"- {name}. {said}" for name, said in bounds]


def controls_section(found: Mapping[str, Any]) -> list[str]:
    lines = ["", "## Jain & Wallace's controls"] if found else []
    for name, one in found.items():
        lines += ["", f"{name}, {len(one['texts'])} texts, 20 permutations:", ""]
        lines += [f"- {sentence}" for sentence in one["verdict"]]
    return lines


CONTROLS = {
    "controls-bert-tiny": "bert-tiny, SST-2",
    "controls-minilm": "MiniLM, SST-2",
    "controls-imdb-minilm": "MiniLM, IMDB cut at 64 tokens",
}


def _picture(run: Faithfulness, name: str) -> list[str]:
    """Mean removal curves of a few methods."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [m for m in ("integrated-gradients", "occlusion", "alti", "gradient", "rollout") if m in run.methods]
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    for ax, operator in zip(axes, run.operators, strict=True):
        run.plot(operator, methods=[*shown, "random"], ax=ax)
        ax.set_title(f"words removed by {operator}")
    names = axes[0].get_legend_handles_labels()
    for ax in axes:
        ax.get_legend().remove()
    figure.legend(*names, loc="lower center", ncol=len(names[1]), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path = PAGE.parent / f"faithfulness-{name}.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return ["", f"![Mean output while words are removed, {SECTIONS[name][0]}](faithfulness-{name}.png)"]


def write(work: Path) -> None:
    """The page, from what has been run."""
    runs = {name: run for name in SECTIONS if (run := loaded(work, name)) is not None}
    seeds = [run for seed in range(5) if (run := loaded(work, f"seed-{seed}")) is not None]
    robust = Robustness(tuple(seeds)) if len(seeds) > 1 else None
    controls = {
        words: json.loads((work / f"{name}.json").read_text())
        for name, words in CONTROLS.items()
        if (work / f"{name}.json").exists()
    }
    fixed = determined_runs(work)
    trained = [json.loads(p.read_text()) for p in sorted(classifiers.FOLDER.glob("*/training.json"))]
    lines = [INTRODUCTION]
    if trained:
        said = ", ".join(f"{100 * t['accuracy']:.1f}" for t in trained)
        minutes = sum(t["cpu_seconds"] for t in trained) / 60
        lines.append(
            f"The six-layer classifiers are the embedded MiniLM, fine-tuned on SST-2's 6,920 sentences for two epochs by "
            f"`python studies/_classifiers.py 0 1 2 3 4` ({minutes:.0f} processor minutes); accuracy on the 1,821 test "
            f"sentences: {said} %. bert-tiny (2 layers) has 83 %."
        )
    lines += published.claims(
        runs,
        robust,
        {n: published.controls_word(c) for n, c in controls.items()},
        {n: agreement_of(f) for n, f in fixed.items()},
    )
    for name, run in runs.items():
        lines += run_section(name, run)
        if name in ("sst2-bert-tiny", "sst2-minilm"):
            lines += _picture(run, name)
    lines += robustness_section(robust)
    lines += plausibility_section(_plausible(work, runs))
    lines += determined_section(fixed)
    lines += controls_section(controls)
    missing = [f"{title}: not run" for name, (title, _) in SECTIONS.items() if name not in runs]
    missing += [f"{words}, controls: not run" for words in CONTROLS.values() if words not in controls]
    missing += [
        f"{SECTIONS[name][0]}: {len(run.paired)} of the {wanted} sentences that the script runs"
        for name, wanted in (("sst2-bert-tiny", 300), ("sst2-minilm", 300))
        if (run := runs.get(name)) is not None and len(run.paired) < wanted - 5
    ]
    missing += (
        [] if len(seeds) == 5 else [f"robustness: {len(seeds)} of five seeds are run, {len(trained)} are trained"]
    )
    missing += [] if fixed else ["determinedness"]
    missing += [f"{name}, plausibility" for name in ("eraser-bert-tiny", "eraser-minilm") if loaded(work, name) is None]
    lines += ["", "## Not run", "", *(f"- {one}" for one in [*missing, *NOT_HERE])]
    write_atomically(PAGE, ("\n".join(lines) + "\n").encode())


def _plausible(work: Path, runs: dict[str, Faithfulness]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, words, folder in (
        ("sst2-bert-tiny", "SST leaves, bert-tiny", classifiers.TINY),
        ("sst2-minilm", "SST leaves, MiniLM", classifiers.folder(0)),
    ):
        if name in runs:
            found[words] = leaves(runs[name], whence.load(str(folder)))
    for name, words in (("eraser-bert-tiny", "ERASER movies, bert-tiny"), ("eraser-minilm", "ERASER movies, MiniLM")):
        run = loaded(work, name)
        if run is not None:
            found[words] = whence.plausibility(run)
    for name, words in (
        ("blimp-stories15M", "BLiMP's subject, stories15M"),
        ("blimp-smollm2", "BLiMP's subject, SmolLM2"),
    ):
        if name in runs and (made := subjects(runs[name])) is not None:
            found[words] = made
    return found
