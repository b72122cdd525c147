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
import statistics
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


# -- second rows and certificates -------------------------------------------------------------------------------------


def readings(job: dict[str, Any]) -> dict[str, Any]:
    """Of the trained model, at several lengths, the last row of every head: is there a second one, and how free is it?

    second: in how many rows another query gives the same head output; the search takes no short-cut for tied keys.
    width: the median over heads of the exact interval of the heaviest weight, over *all* rows of the simplex with the same
    head output, whether or not a query reaches them: that is what a certificate says, with or without a theorem.
    """
    file = WORK / f"{name_of(job)}.readings.json"
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    model = whence.load(str(WORK / name_of(job)))
    ids = model.tokenizer(reviews().validation[0], verbose=False)["input_ids"]
    answer: dict[str, Any] = {}
    for n in LENGTHS:
        trace = whence.trace(model, torch.tensor(ids[:n]), keep=["attention", "keys", "values", "outputs"])
        hits, widths = [], []
        for i, layer in enumerate(trace):
            for head in range(len(layer.heads)):
                row = layer.attention[head, -1].double()
                keys, values = layer.keys[head].double(), layer.values[head].double()
                hits.append(search_reachable(row / row.sum(), keys, values, starts=24, use_theorem=False).exists)
                certificate = whence.certify(trace, layer=i, head=head, query=n - 1, top=1, orders=False)
                widths.append(float((certificate.upper - certificate.lower).max()))
        answer[str(n)] = {"second": [sum(hits), len(hits)], "width": statistics.median(widths)}
    file.write_text(json.dumps(answer), encoding="utf-8")
    return answer


# -- the page --------------------------------------------------------------------------------------------------------

CONTRASTS = (
    ("rope-rotary-values", "rope", "the rotation of the values, keys free"),
    ("rope-tied", "rope-rotary-values", "the tie, values rotated in both"),
    ("rope-tied", "rope", "both"),
    ("alibi-tied", "alibi", "the tie, ALiBi"),
    ("alibi", "rope", "ALiBi for RoPE, keys free"),
)


def contrast(measure: dict[str, dict[int, float]], variant: str, other: str) -> str:
    """The paired difference over common seeds, with its 95 % interval, and what it allows to say."""
    common = sorted(set(measure[variant]) & set(measure[other]))
    if len(common) < 2:
        return "not measured"
    mean, half = paired([measure[variant][s] for s in common], [measure[other][s] for s in common])
    word = "not separated" if abs(mean) <= half else "higher" if mean > 0 else "lower"
    return f"{mean:+.4f} ± {half:.4f}: {word}"


def write() -> None:
    """The page, from what has been run; what has not is said to be missing."""
    done = {v: {s: r for s in SEEDS if (r := finished({"task": "text", "variant": v, "seed": s}))} for v in VARIANTS}
    recall = {v: {s: r["accuracy"] for s in SEEDS if (r := finished({"task": "recall", "variant": v, "seed": s}))}
              for v in VARIANTS}  # fmt: skip
    bits = {v: {s: r["validation_bits_per_byte"] for s, r in runs.items()} for v, runs in done.items()}
    missing = [name_of(job) for job in jobs() if finished(job) is None]
    some = next((r for runs in done.values() for r in runs.values()), None)
    hours = sum(r["cpu_seconds"] for job in jobs() if (r := finished(job))) / 3600
    lines = [
        "# Is a language model with unique attention as good?",
        "",
        "`python studies/identifiable_decoder.py` runs what is missing and writes this page.",
        "",
        f"Model: {MODEL['num_hidden_layers']} × {MODEL['hidden_size']}, {MODEL['num_attention_heads']} heads of "
        f"{MODEL['hidden_size'] // MODEL['num_attention_heads']}, context {TEXT['context']}, byte-level vocabulary of "
        f"{TEXT['vocab_size']:,}. Text: {TRAIN_REVIEWS:,} IMDB reviews, {TEXT['epochs']} epoch"
        + (f" = {some['train_tokens']:,} tokens" if some else "")
        + f"; measured on {VALIDATION_REVIEWS} other reviews. AdamW, highest rate {TEXT['learning_rate']}, cosine; one "
        f"thread, {hours:.1f} processor hours in all. Every variant has the same budget, text and order of blocks; a seed "
        "changes the first weights and the order. Small models, little text: what holds here may not hold at size.",
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
        "## Is it as good, and is a gain the tie's or the rotation's?",
        "",
        (
            "Paired differences over seeds, 95 % intervals (Student's t). Bits per byte: lower is better. Recall: the share of "
            f"values recalled in a task that this script makes ({RECALL['pairs']} pairs, {RECALL['steps']:,} steps, chance "
            f"{1 / RECALL['pairs']:.2f} among the values shown); higher is better."
        ),
        "",
        "| what changes | bits per byte | share recalled |",
        "|---|---|---|",
    ]
    lines += [
        f"| {said} (`{a}` − `{b}`) | {contrast(bits, a, b)} | {contrast(recall, a, b)} |" for a, b, said in CONTRASTS
    ]
    learned = [v for v, a in recall.items() if a and max(a.values()) > 2 / RECALL["pairs"]]
    lines += [
        "",
        (
            f"Recall was learned within these steps, in one seed or more, only by: {', '.join(learned) or 'none'}. Where "
            "nothing was learned the differences say nothing about what a longer training would give."
        ),
    ]
    lengths = " / ".join(map(str, LENGTHS))
    lines += [
        "",
        "## The variants",
        "",
        (
            "| variant | seeds | bits per byte | share recalled | parameters | cache, numbers a token | tokens per processor "
            "second | cond(W_O) |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for variant, runs in done.items():
        if not runs:
            continue
        one, each, told = next(iter(runs.values())), list(bits[variant].values()), list(recall[variant].values())
        speed = sum(r["tokens_seen"] / r["cpu_seconds"] for r in runs.values()) / len(runs)
        lines.append(
            f"| {variant} | {len(runs)} | {sum(each) / len(each):.4f} | {f'{sum(told) / len(told):.3f}' if told else '–'} | "
            f"{one['parameters']:,} | {one['cache_numbers_per_token']:,} | {speed:,.0f} | "
            f"{max(r['output_condition'] for r in runs.values()):.3g} |"
        )
    lines += [
        "",
        "## Second rows and certificates",
        "",
        (
            "The last row of every head on a validation review, all seeds. Second rows: another query with the same head output "
            "was found by a search that knows of no theorem. Width: how far the heaviest weight is free among *all* rows with "
            "the same head output, whether or not a query reaches them (median over heads, mean over seeds). Tying keys makes "
            "the row unique among those that a query reaches; it does not make the intervals of a certificate narrow."
        ),
        "",
        f"| variant | second rows at n = {lengths} | width at n = {lengths} |",
        "|---|---|---|",
    ]
    for variant, runs in done.items():
        if variant == "uniform" or not runs:
            continue
        rows = [readings({"task": "text", "variant": variant, "seed": s}) for s in runs]
        at = [[r[str(n)] for r in rows] for n in LENGTHS]
        second = " / ".join(f"{sum(r['second'][0] for r in n)} of {sum(r['second'][1] for r in n)}" for n in at)
        width = " / ".join(f"{sum(r['width'] for r in n) / len(n):.3f}" for n in at)
        lines.append(f"| {variant} | {second} | {width} |")
    lines += [
        "",
        (
            "At 32 tokens, fewer than d_v + 1, a row is unique unless the values themselves are dependent. In layer 0 of `rope` "
            "they are: a token that stands twice has the same value twice and, turned, two different keys. The second rows of "
            "`rope` at 32 tokens are those of layer 0; with turned values there are none."
        ),
        "",
        (
            "`rope`: rotary positions, free keys, values as they are. `rope-rotary-values`: values turned like keys and the "
            "output turned back, keys free: the control that tells the rotation from the tie. `rope-tied`: one tensor is key and "
            "value. `alibi`, `alibi-tied`: linear biases. `uniform`: every visible token weighs the same."
        ),
    ]
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
