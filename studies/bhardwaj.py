"""Bhardwaj et al. (ACL 2021) run again: is attention identifiable once the keys are counted in, and at which lengths?

    python studies/bhardwaj.py [--models minilm bert-tiny stories15M smollm2]

Writes docs/studies/bhardwaj.md. (Their accuracy table: docs/studies/identifiable-transformer.md.)
"""

from __future__ import annotations

import json

import torch
from _corpora import WORK, imdb
from _papers import Subject, cut_to, subjects, table, write_page

import whence
from whence.attention.key_constraint import key_constrained_witness, key_constraint
from whence.reading.tokenised import position_limit

HEAD = ("model", "d_v", "tokens", "dimension without keys", "with keys, nearby", "undecided in float64", "second rows found",
        "largest total variation")  # fmt: skip
LENGTHS, ROWS, STARTS = (32, 64, 128, 256), 24, 32


def rows_of(trace: whence.Trace, count: int) -> list[tuple[int, int, int]]:
    """(layer, head, query): layers and heads spread evenly, the row that sees most keys."""
    layers, n = len(trace.layers), len(trace.tokens)
    causal = trace[0].causal
    places = []
    for i in range(count):
        layer = i * layers // count
        heads = len(trace[layer].heads)
        places.append((layer, (7 * i) % heads, n - 1 if causal else (11 * i + 1) % n))
    return places


def measured(subject: Subject, length: int, text: str) -> dict[str, float]:
    """At one length: dimensions without and with the keys, and second rows found by the search."""
    saved = WORK / "papers" / f"bhardwaj-{subject.name}-{length}.json"
    if saved.exists():
        return dict(json.loads(saved.read_text()))
    trace = whence.trace(subject.model, cut_to(subject.model.tokenizer, text, length))
    found = whence.identifiability(trace, leverage=False).extra["simplex_null_dimension"]
    without, local, undecided, second, far = [], [], 0, 0, []
    known = {layer: key_constraint(trace[layer])["reachable_dimension"] for layer, _, _ in rows_of(trace, ROWS)}
    for layer, head, query in rows_of(trace, ROWS):
        without.append(int(found[layer, head, query]))
        dimension = int(known[layer][head, query])
        undecided += dimension < 0
        local += [dimension] if dimension >= 0 else []
        _, distance, _, exists, _ = key_constrained_witness(trace[layer], head, query, STARTS, 0)
        second += exists
        far += [distance] if exists else []
    result = {
        "tokens": len(trace.tokens),
        "without": sum(without) / ROWS,
        "local": sum(local) / len(local) if local else float("nan"),
        "undecided": undecided,
        "second": second,
        "far": max(far, default=0.0),
    }
    saved.parent.mkdir(parents=True, exist_ok=True)
    saved.write_text(json.dumps(result))
    print(subject.title, result, flush=True)
    return result


def main() -> None:
    reviews = list(dict.fromkeys(t for t, _ in imdb().test if len(t.split()) >= 400))
    rows, verdicts = [], []
    for subject in subjects(__doc__ or ""):
        limit = position_limit(subject.model.model) or 10**6
        width = subject.shape[2]
        long = []
        for length, review in zip(LENGTHS, reviews, strict=False):
            if length > limit:
                continue
            with torch.no_grad():
                r = measured(subject, length, review)
            decided = f"{r['local']:.1f}" if r["local"] == r["local"] else "–"
            rows.append([subject.title, width, r["tokens"], f"{r['without']:.0f}", decided, f"{r['undecided']} of {ROWS}",
                         f"{r['second']} of {ROWS}", f"{r['far']:.2f}"])  # fmt: skip
            long += [r] if r["tokens"] > width + 1 else []
        local = max((r["local"] for r in long if r["local"] == r["local"]), default=float("nan"))
        hits, tried = sum(int(r["second"]) for r in long), ROWS * len(long)
        verdicts.append(
            f"{subject.title}: with keys the row is unique *nearby* at every length "
            f"**{'cannot be told' if local != local else 'agrees' if local == 0 else 'differs'}** (largest mean dimension "
            f"{local:.1f} beyond {width + 1} tokens); that it is unique at all **{'differs' if hits else 'is not refuted'}**: "
            f"{hits} of {tried} rows beyond {width + 1} tokens have a second one."
        )
    body = f"""
Bhardwaj, Majumder, Poria and Hovy, *More Identifiable yet Equally Performant Transformers for Text Classification* (ACL 2021):
the
null space of the values alone is too large a set, because attention is also a softmax of queries and keys; with the keys
counted in,
far fewer alternatives are left. Made exact (see [methods](../methods.md)): *without* the keys, the dimension of the rows of the
simplex with the same head output; *with* them, the dimension of those that some query reaches near the row; and a search
({STARTS} starts, Levenberg–Marquardt) for a second such row anywhere. {ROWS} rows at every length, of layers and heads spread
evenly.

{chr(10).join("- " + line for line in verdicts)}

{table(HEAD, rows)}

So the paper is right that keys take the dimension away, and "identifiable" follows from that only nearby. A second row, from
another
query altogether, is what the search finds; that it finds none proves nothing. Keys that are tied to the values have none at any
length, by a theorem: [tied keys](tied-keys.md), [the identifiable transformer](identifiable-transformer.md) with the paper's
table
of accuracies, [the decoder](identifiable-decoder.md).
"""
    write_page("bhardwaj", "Bhardwaj et al. 2021, run again", "bhardwaj.py", body)


if __name__ == "__main__":
    main()
