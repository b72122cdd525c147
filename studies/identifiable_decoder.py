"""Study: is a language model with unique attention as good as the standard one, and is the gain the tie's?

Writes docs/studies/identifiable-decoder.md.

    python studies/identifiable_decoder.py           run what is missing, then write the page
    python studies/identifiable_decoder.py --next    run the next missing job and stop (exit code 3: none is missing)
    python studies/identifiable_decoder.py --write   write the page from what has been run

Every finished run is a JSON file under $WHENCE_WORK (default ~/.cache/whence/studies), its model beside it; a run that
was killed goes on from its last checkpoint. One thread; every variant has the same budget, text and order of blocks.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import _corpora as corpora
import torch

import whence
from whence.core.attention.search_reachable import search_reachable
from whence.identifiable import IdentifiableDecoderConfig, IdentifiableForCausalLM
from whence.identifiable.training.compare import paired
from whence.identifiable.training.documents import Documents
from whence.identifiable.training.language_model import LanguageModelSettings, train_language_model
from whence.identifiable.training.variants import decoder_overrides

WORK = corpora.WORK / "identifiable_decoder"
PAGE = corpora.ROOT / "docs" / "studies" / "identifiable-decoder.md"
VARIANTS = ("rope", "rope-rotary-values", "rope-tied", "alibi", "alibi-tied", "uniform")
SEEDS = (0, 1, 2)
LENGTHS = (32, 64, 128)
TRAIN_REVIEWS, VALIDATION_REVIEWS = 3200, 200
MODEL = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 192}
TEXT: dict[str, Any] = {"epochs": 1, "batch_size": 16, "learning_rate": 2e-3, "context": 128, "vocab_size": 1024}
RECALL: dict[str, Any] = {"pairs": 6, "symbols": 12, "questions": 12, "steps": 1200, "batch": 32, "learning_rate": 3e-3}
RECALL_MODEL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}


def jobs() -> Iterator[dict[str, Any]]:
    """Seeds outermost, so that a study that is stopped early has the same seeds for every variant."""
    for seed in SEEDS:
        for task in ("text", "recall"):
            for variant in VARIANTS:
                yield {"task": task, "variant": variant, "seed": seed}


def name_of(job: dict[str, Any]) -> str:
    return f"{job['task']}-{job['variant']}-{job['seed']}"


def finished(job: dict[str, Any]) -> dict[str, Any] | None:
    file = WORK / f"{name_of(job)}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def run(job: dict[str, Any]) -> dict[str, Any]:
    begun = time.process_time()
    done = run_text(job) if job["task"] == "text" else run_recall(job)
    done["cpu_seconds"] = time.process_time() - begun
    (WORK / f"{name_of(job)}.json").write_text(json.dumps(done), encoding="utf-8")
    return done


# -- text ------------------------------------------------------------------------------------------------------------


def reviews() -> Documents:
    """IMDB reviews: one file to train on, another to measure on; line breaks written as such."""

    def read(part: str) -> list[str]:
        with (corpora.DATA / "imdb-subset" / f"{part}.csv").open(encoding="utf-8", newline="") as file:
            return [row["review"].replace("<br />", "\n") for row in csv.DictReader(file)]

    return Documents(tuple(read("train")[:TRAIN_REVIEWS]), tuple(read("test")[:VALIDATION_REVIEWS]), "IMDB reviews")


def run_text(job: dict[str, Any]) -> dict[str, Any]:
    settings = LanguageModelSettings(variant=job["variant"], seed=job["seed"], model=MODEL, **TEXT)
    return train_language_model(reviews(), out=WORK / name_of(job), settings=settings).metrics


# -- associative recall ----------------------------------------------------------------------------------------------


def recall_batch(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """k₁ v₁ … k_p v_p, then keys drawn among them, each followed by its value: only values that were asked for count.

    Keys and values come from two sets of symbols, paired anew for every line, so that nothing can be learned by heart.
    """
    pairs, symbols = RECALL["pairs"], RECALL["symbols"]
    keys = torch.rand(count, symbols, generator=generator).argsort(-1)[:, :pairs]
    values = torch.rand(count, symbols, generator=generator).argsort(-1)[:, :pairs] + symbols
    asked = torch.randint(pairs, (count, RECALL["questions"]), generator=generator)
    shown = torch.stack((keys, values), dim=-1).flatten(1)
    questions = torch.stack((keys.gather(1, asked), values.gather(1, asked)), dim=-1).flatten(1)
    ids = torch.cat((shown, questions), dim=1)
    labels = ids.clone()
    labels[:, : 2 * pairs] = -100
    labels[:, 2 * pairs :: 2] = -100  # which key is asked for cannot be known
    return ids, labels


def run_recall(job: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(job["seed"])
    fields = RECALL_MODEL | {"vocab_size": 2 * RECALL["symbols"]}
    model = IdentifiableForCausalLM(IdentifiableDecoderConfig(**decoder_overrides(job["variant"], **fields)))
    generator = torch.Generator().manual_seed(1000 + job["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RECALL["learning_rate"], weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RECALL["learning_rate"], total_steps=RECALL["steps"], pct_start=0.1
    )
    for _ in range(RECALL["steps"]):
        ids, labels = recall_batch(RECALL["batch"], generator)
        model(ids, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    ids, labels = recall_batch(512, torch.Generator().manual_seed(7))
    with torch.no_grad():
        guess = model.eval()(ids).logits[:, :-1].argmax(-1)
    asked = labels[:, 1:] != -100
    model.save_pretrained(WORK / name_of(job))
    return {"accuracy": float((guess == labels[:, 1:])[asked].double().mean()), "parameters": model.num_parameters()}


# -- second rows -----------------------------------------------------------------------------------------------------


def second_rows(job: dict[str, Any]) -> dict[str, Any]:
    """Of the trained model, at several lengths: in how many rows another query gives the same head output.

    The search takes no short-cut for tied keys: it is run on them as on any other.
    """
    file = WORK / f"{name_of(job)}.rows.json"
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    model = whence.load(str(WORK / name_of(job)))
    ids = model.tokenizer(reviews().validation[0], verbose=False)["input_ids"]
    found: dict[str, Any] = {}
    for n in LENGTHS:
        trace = whence.trace(model, torch.tensor(ids[:n]), keep=["attention", "keys", "values"])
        hits = []
        for layer in trace:
            for head in range(len(layer.heads)):
                row = layer.attention[head, -1].double()
                keys, values = layer.keys[head].double(), layer.values[head].double()
                hits.append(search_reachable(row / row.sum(), keys, values, starts=24, use_theorem=False).exists)
        found[str(n)] = [sum(hits), len(hits)]
    file.write_text(json.dumps(found), encoding="utf-8")
    return found


# -- the page --------------------------------------------------------------------------------------------------------


def write() -> None:
    """The page, from what has been run; what has not is said to be missing."""
    done = {v: {s: r for s in SEEDS if (r := finished({"task": "text", "variant": v, "seed": s}))} for v in VARIANTS}
    recall = {v: [r["accuracy"] for s in SEEDS if (r := finished({"task": "recall", "variant": v, "seed": s}))]
              for v in VARIANTS}  # fmt: skip
    missing = [name_of(job) for job in jobs() if finished(job) is None]
    some = next((r for runs in done.values() for r in runs.values()), None)
    lines = [
        "# Is a language model with unique attention as good?",
        "",
        "`python studies/identifiable_decoder.py` runs what is missing and writes this page.",
        "",
        f"Model: {MODEL['num_hidden_layers']} × {MODEL['hidden_size']}, {MODEL['num_attention_heads']} heads, context "
        f"{TEXT['context']}, byte-level vocabulary of {TEXT['vocab_size']}. Text: {TRAIN_REVIEWS:,} IMDB reviews, "
        f"{TEXT['epochs']} epoch"
        + (f" = {some['train_tokens']:,} tokens" if some else "")
        + f"; measured on {VALIDATION_REVIEWS} other reviews. AdamW, highest rate {TEXT['learning_rate']}, cosine; one thread.",
        "",
    ]
    if missing:
        lines += [
            (
                f"**Not finished: {len(missing)} of {len(list(jobs()))} runs are missing** ({', '.join(missing)}). Nothing "
                "may be concluded from a variant that has not been run, nor from one seed."
            ),
            "",
        ]
    lines += [
        "| variant | seeds | bits per byte | difference to rope, paired (95 %) | parameters | cache, numbers a token | "
        "tokens per processor second | cond(W_O) | second rows at n = " + " / ".join(map(str, LENGTHS)) + " |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for variant, runs in done.items():
        if not runs:
            continue
        bits = [r["validation_bits_per_byte"] for r in runs.values()]
        common = [s for s in runs if s in done["rope"]]
        gap = ""
        if variant != "rope" and common:
            mean, half = paired(*([done[v][s]["validation_bits_per_byte"] for s in common] for v in (variant, "rope")))
            gap = f"{mean:+.4f} ± {half:.4f}" if len(common) > 1 else f"{mean:+.4f} (one seed)"
        one = next(iter(runs.values()))
        speed = sum(r["tokens_seen"] / r["cpu_seconds"] for r in runs.values()) / len(runs)
        rows = (
            [second_rows({"task": "text", "variant": variant, "seed": s}) for s in runs] if variant != "uniform" else []
        )
        seconds = " / ".join(f"{sum(r[str(n)][0] for r in rows)} of {sum(r[str(n)][1] for r in rows)}" for n in LENGTHS)
        lines.append(
            f"| {variant} | {len(runs)} | {sum(bits) / len(bits):.4f} | {gap} | {one['parameters']:,} | "
            f"{one['cache_numbers_per_token']:,} | {speed:,.0f} | "
            f"{max(r['output_condition'] for r in runs.values()):.3g} | {seconds if rows else '–'} |"
        )
    if any(recall.values()):
        lines += ["", f"Associative recall ({RECALL['pairs']} pairs, {RECALL['steps']} steps):", ""]
        lines += ["| variant | seeds | share of values recalled |", "|---|---|---|"]
        lines += [f"| {v} | {len(a)} | {sum(a) / len(a):.3f} |" for v, a in recall.items() if a]
    PAGE.write_text("\n".join([*lines, ""]), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--next", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    WORK.mkdir(parents=True, exist_ok=True)
    for job in () if given.write else jobs():
        if finished(job) is not None:
            continue
        print(name_of(job), {k: v for k, v in run(job).items() if k != "settings"}, flush=True)
        if given.next:
            return 0
    if given.next:
        return 3
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
