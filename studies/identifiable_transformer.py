"""Study: is a classifier with unique attention as accurate as the standard one?

Writes docs/studies/identifiable-transformer.md.

    python studies/identifiable_transformer.py           run what is missing, then write the page
    python studies/identifiable_transformer.py --write   write the page from what has been run

Every finished run is a line of runs.jsonl under $WHENCE_WORK (default ~/.cache/whence/studies); a study that was
stopped goes on with the next run. One thread; every variant has the same budget.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import _corpora as corpora
import torch

from whence.identifiable.data import Labelled
from whence.identifiable.training.compare import accuracy_of, paired
from whence.identifiable.training.fit import Settings, train
from whence.identifiable.training.variants import VARIANTS

RUNS = corpora.WORK / "identifiable_transformer" / "runs.jsonl"
PAGE = corpora.ROOT / "docs" / "studies" / "identifiable-transformer.md"
SEEDS = (0, 1, 2)
KEY_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
STANDARD_SIZE = 32
KEY_SETS = ("trec6", "agreement")
KEY_SEEDS = (0,)
BUDGETS: dict[str, dict[str, Any]] = {
    # Chosen once and the same for every variant: all training texts, so many epochs, texts cut at so many tokens.
    "trec6": {"test": 500, "epochs": 8, "max_length": 32},
    "sst2": {"test": 1821, "epochs": 4, "max_length": 48},
    "mr": {"test": 1066, "epochs": 4, "max_length": 48},
    "subj": {"test": 1000, "epochs": 3, "max_length": 48},
    "agnews": {"test": 2000, "epochs": 3, "max_length": 64},
    "imdb": {"test": 1000, "epochs": 4, "max_length": 128},
    "agreement": {"test": 1500, "epochs": 8, "max_length": 32},
}


def jobs() -> Iterator[dict[str, Any]]:
    """Seeds outermost, so that a study that is stopped early has the same seeds for every variant; key sizes last."""
    for seed in SEEDS:
        for name in BUDGETS:
            for variant in VARIANTS:
                yield {"data": name, "variant": variant, "key_size": None, "layers": 1, "seed": seed}
    for seed in KEY_SEEDS:
        for name in KEY_SETS:
            for size in KEY_SIZES:
                if size == STANDARD_SIZE:
                    continue  # that is `concat` itself
                yield {"data": name, "variant": "concat", "key_size": size, "layers": 1, "seed": seed}


def key_of(job: dict[str, Any]) -> str:
    return json.dumps(job, sort_keys=True)


def finished() -> dict[str, dict[str, Any]]:
    if not RUNS.exists():
        return {}
    lines = [
        line for line in RUNS.read_text(encoding="utf-8").split("\n") if line.endswith("}")
    ]  # a killed run may leave half a line
    entries = [entry for entry in map(json.loads, lines) if entry.get("budget") == BUDGETS[entry["job"]["data"]]]
    return {key_of(entry["job"]): entry["metrics"] for entry in entries}


def run(job: dict[str, Any]) -> dict[str, Any]:
    data = getattr(corpora, job["data"])()
    budget = BUDGETS[job["data"]]
    settings = Settings(
        variant=job["variant"], epochs=budget["epochs"], max_length=budget["max_length"], batch_size=64,
        learning_rate=1e-3, vocab_size=4000, patience=0, seed=job["seed"],
        model={"key_size": job["key_size"], "num_hidden_layers": job["layers"]},
    )  # fmt: skip
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        made = train(
            _labelled(data.train, data.name),
            _labelled(_some(data.test, budget["test"]), data.name),
            out=folder,
            settings=settings,
        )
        shutil.rmtree(folder, ignore_errors=True)
    return made.metrics | {"cpu_seconds": time.process_time() - begun}


def _labelled(rows: list[tuple[str, str]], name: str) -> Labelled:
    return Labelled(tuple(text for text, _ in rows), tuple(label for _, label in rows), name)


def _some(rows: list[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """The same random test texts for every variant and seed."""
    return random.Random(0).sample(rows, min(count, len(rows)))


def run_all(part: int, parts: int) -> None:
    """Every parts-th job, from the given one: that many processes can share the work."""
    RUNS.parent.mkdir(parents=True, exist_ok=True)
    for job in list(jobs())[part - 1 :: parts]:
        if key_of(job) in finished():
            continue
        metrics = run(job)
        with RUNS.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"job": job, "budget": BUDGETS[job["data"]], "metrics": metrics}) + "\n")
        print(job, f"{100 * accuracy_of(metrics):.2f}", f"{metrics['cpu_seconds']:.0f} s", flush=True)


# -- the page --------------------------------------------------------------------------------------------------------


def write() -> None:
    done = finished()
    names = {name: getattr(corpora, name)().name for name in BUDGETS}

    def score(**job: Any) -> float | None:
        metrics = done.get(key_of(job))
        return None if metrics is None else 100 * accuracy_of(metrics)

    def row(name: str, variant: str, layers: int = 1) -> list[tuple[int, float, float]]:
        """(seed, accuracy, accuracy of the standard one), for the seeds that both have."""
        found = []
        for seed in SEEDS:
            ours = score(data=name, variant=variant, key_size=None, layers=layers, seed=seed)
            base = score(data=name, variant="concat", key_size=None, layers=layers, seed=seed)
            if ours is not None and base is not None:
                found.append((seed, ours, base))
        return found

    total = sum(m["cpu_seconds"] for m in done.values())
    parts = [
        "# Is a classifier with unique attention as accurate as the standard one?",
        "",
        (
            "Written by `python studies/identifiable_transformer.py` (data from `../shared/data`). Encoders of width "
            "128 with 4 heads, one layer unless said otherwise, trained from scratch, vocabulary of at most 4,000 "
            "pieces, learning rate 0.001, batches of 64, all training texts, the same number of epochs for every "
            "variant, the epoch chosen on a tenth of the training texts; accuracy on the test texts. "
            f"{len(done)} runs, {total / 60:.0f} CPU minutes on one thread."
        ),
        "",
        (
            "`uniform` is the control: its attention is the mean over all tokens. Where it does as well as the "
            "others, the data set cannot show whether attention works."
        ),
        "",
        "## Accuracy, mean ± sd over seeds",
        "",
        "| data | seeds | " + " | ".join(VARIANTS) + " |",
        "|---|---|" + "---|" * len(VARIANTS),
    ]
    tasks = [(name, 1) for name in BUDGETS]
    for name, layers in tasks:
        cells = []
        seeds = 0
        for variant in VARIANTS:
            values = [a for _, a, _ in row(name, variant, layers)]
            seeds = max(seeds, len(values))
            cells.append(_spread(values))
        parts.append(f"| {names[name]}{' (2 layers)' if layers == 2 else ''} | {seeds} | " + " | ".join(cells) + " |")
    parts += [
        "",
        "## Difference to concat, points, with the 95 % interval over paired seeds",
        "",
        "| data | " + " | ".join(v for v in VARIANTS if v != "concat") + " |",
        "|---|" + "---|" * (len(VARIANTS) - 1),
    ]
    pooled: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    bases: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for name, layers in tasks:
        cells = []
        for variant in VARIANTS:
            if variant == "concat":
                continue
            pairs = row(name, variant, layers)
            pooled[variant] += [a for _, a, _ in pairs]
            bases[variant] += [b for _, _, b in pairs]
            cells.append(_gap([a for _, a, _ in pairs], [b for _, _, b in pairs]))
        parts.append(f"| {names[name]}{' (2 layers)' if layers == 2 else ''} | " + " | ".join(cells) + " |")
    cells = [_gap(pooled[v], bases[v]) for v in VARIANTS if v != "concat"]
    parts.append("| **all runs** | " + " | ".join(f"**{c}**" for c in cells) + " |")
    parts += ["", *_reading(row, tasks, names, pooled, bases)]
    parts += ["", *_cost(done)]
    parts += [
        "",
        "## Key size",
        "",
        "Concatenated heads, value size 32, key size k per head; accuracy, one seed (k = 32: mean ± sd over three).",
        "",
        "| data | " + " | ".join(f"k = {k}" for k in KEY_SIZES) + " |",
        "|---|" + "---|" * len(KEY_SIZES),
    ]
    for name in KEY_SETS:
        cells = []
        for size in KEY_SIZES:
            scores = [
                score(
                    data=name, variant="concat", key_size=size if size != STANDARD_SIZE else None, layers=1, seed=seed
                )
                for seed in SEEDS
            ]
            cells.append(_spread([s for s in scores if s is not None]))
        parts.append(f"| {names[name]} | " + " | ".join(cells) + " |")
    parts += [
        "",
        (
            "Beyond 33 tokens k ≤ 32 leaves no alternative near a row, k > 32 a whole family of them (see the "
            "identifiability statement of a model)."
        ),
    ]
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _spread(values: list[float]) -> str:
    if not values:
        return "not run"
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.1f}"
    return f"{mean:.1f} ± {(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5:.1f}"


def _gap(values: list[float], standard: list[float]) -> str:
    if len(values) < 2:
        return "–"
    mean, half = paired(values, standard)
    return f"{mean:+.1f} ± {half:.1f}"


def _reading(row: Any, tasks: list[tuple[str, int]], names: dict[str, str], pooled: Any, bases: Any) -> list[str]:
    """What the figures say, computed from them."""
    lines = ["## What this says", ""]
    needs, free = [], []
    for name, layers in tasks:
        pairs = row(name, "uniform", layers)
        if len(pairs) < 2:
            continue
        mean, half = paired([a for _, a, _ in pairs], [b for _, _, b in pairs])
        label = names[name] + (" (2 layers)" if layers == 2 else "")
        (needs if mean + half < 0 else free).append(f"{label} ({mean:+.1f} ± {half:.1f})")
    lines.append(
        "- Attention matters (uniform is worse, interval below 0): "
        + (", ".join(needs) or "nowhere in these data, at this number of seeds")
        + "."
    )
    lines.append("- Attention cannot be shown to matter: " + (", ".join(free) or "nowhere") + ".")
    for variant in ("tied", "shared", "add", "small-key"):
        if len(pooled[variant]) < 2:
            continue
        mean, half = paired(pooled[variant], bases[variant])
        verdict = "no difference found" if abs(mean) <= half else ("worse" if mean < 0 else "better")
        lines.append(
            f"- {variant} against concat over {len(pooled[variant])} paired runs: {mean:+.2f} ± {half:.2f} points, "
            f"{verdict}."
        )
    return lines


def _cost(done: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "## What it costs",
        "",
        (
            "| variant | attention parameters | unique up to, given the head output | given the block output | CPU s "
            "on IMDB |"
        ),
        "|---|---|---|---|---|",
    ]
    for variant in VARIANTS:
        found = [
            m
            for k, m in done.items()
            if (j := json.loads(k))["variant"] == variant and j["layers"] == 1 and j["key_size"] is None
        ]
        if not found:
            continue
        imdb = [
            m["cpu_seconds"]
            for k, m in done.items()
            if (j := json.loads(k))["variant"] == variant and j["data"] == "imdb"
        ]
        first = found[0]
        unique = (
            ("–", "–") if variant == "uniform" else (first["unique_from_head_up_to"], first["unique_from_block_up_to"])
        )
        time_cell = f"{sum(imdb) / len(imdb):.0f}" if imdb else "not run"
        lines.append(f"| {variant} | {first['attention_parameters']:,} | {unique[0]} | {unique[1]} | {time_cell} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="only write the page")
    parser.add_argument("--part", type=int, nargs=2, default=(1, 1), metavar=("K", "N"), help="only every N-th run")
    given = parser.parse_args()
    if not corpora.present():
        print(f"The data folder {corpora.DATA} is absent: nothing to study. Set WHENCE_DATA.")
        return
    torch.set_num_threads(1)
    if not given.write:
        run_all(*given.part)
    write()


if __name__ == "__main__":
    main()
