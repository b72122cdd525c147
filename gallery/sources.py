"""Sources: which of three documents does an answer rest on, by the attention of the last token?"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

import whence
from gallery.page import command, picture, table, write
from whence import rules
from whence.results.plotting import new_axes

DOCUMENTS = (
    "Document A. The bridge over the Lind was built in 1911 by the engineer Marta Oslen and was closed to carts in the war.",
    "Document B. The mill beside the river grinds rye and barley. Its wheel was renewed by the smith of Aldby last spring.",
    "Document C. The school has ninety children and two teachers. On Fridays the older children learn to row on the lake.",
)
# A decoder's first token draws attention whatever it is: it must not be a token of a document.
OPENING = "Read these three documents and answer the question."
QUESTION = "Question: Who built the bridge? Answer: The bridge was built by"


def spans(trace: whence.Trace) -> dict[str, list[int]]:
    """The tokens of each document, by where they stand in the text."""
    text = trace.text or ""
    found = {}
    for document in DOCUMENTS:
        begin = text.index(document)
        end = begin + len(document)
        places = [i for i, s in enumerate(trace.tokens.spans or ()) if s is not None and begin <= s[0] and s[1] <= end]
        found[document[:10]] = places
    return found


def make() -> Path:
    model = whence.load("smollm2")
    text = "\n".join((OPENING, *DOCUMENTS, QUESTION))
    trace = whence.trace(model, text, keep=("attention", "values", "outputs"))
    last = len(trace.tokens) - 1
    places = spans(trace)
    rows, picks = [], []
    counts = {"certified": 0, "refuted": 0, "open": 0}
    wide: list[float] = []
    refuted: list[tuple[float, int, int, str]] = []
    for layer in trace.of():
        for head in layer.heads:
            masses = {}
            for name, keys in places.items():
                found = whence.decide(
                    trace,
                    rules.mass(keys, at_least=0.25, label=name),
                    layer=layer.index,
                    head=head,
                    query=last,
                    verify=False,
                )
                masses[name] = (float(found.value[0]), float(found.lower[0]), float(found.upper[0]))
                counts[found.decisions[0].verdict] += 1
                wide.append(float(found.upper[0] - found.lower[0]))
                if found.decisions[0].verdict == "refuted":
                    refuted.append((wide[-1], layer.index, head, name))
            picks.append((layer.index, head, masses))
    picks.sort(key=lambda p: -max(m[0] for m in p[2].values()))
    for layer_index, head, masses in picks[:10]:
        rows.append([f"{layer_index}.{head}", *(f"{v:.2f} [{lo:.2f}, {hi:.2f}]" for v, lo, hi in masses.values())])
    axes = new_axes((7.0, 3.6))
    for k, (name, colour) in enumerate(zip(places, ("#1f6fb4", "#d95f02", "#5a8f29"), strict=True)):
        for i, (_, _, masses) in enumerate(picks[:20]):
            v, lo, hi = masses[name]
            axes.plot([i + 0.22 * k] * 2, [lo, hi], color=colour, alpha=0.5, linewidth=3)
            axes.plot([i + 0.22 * k], [v], ".", color=colour, label=name if i == 0 else None)
    axes.set_xticks(range(min(20, len(picks))), [f"{a}.{b}" for a, b, _ in picks[:20]], fontsize=6, rotation=90)
    axes.set_ylabel("share of the last token's attention")
    axes.set_xlabel("layer.head, the twenty with most on one document")
    axes.legend(fontsize=8)
    best = picks[0]
    name = max(best[2], key=lambda n: best[2][n][0])
    keys = places[name]
    one = whence.decide(trace, rules.mass(keys, at_least=0.25, label=name), layer=best[0], head=best[1], query=last)
    against = ""
    if refuted:
        _, layer_index, head, other = max(refuted)
        rule = rules.mass(places[other], at_least=0.25, label=other)
        counter = whence.decide(trace, rule, layer=layer_index, head=head, query=last)
        against = f"**The counter-example.** Layer {layer_index} head {head}: {counter.sentences()[0]}"
        if counter.verification is not None:
            against += f" Put into the model: {counter.verification.sentence()}"
    with torch.no_grad():
        told = model.tokenizer.decode(
            int(model.model(**model.tokenizer(text, return_tensors="pt")).logits[0, -1].argmax())
        )
    total = sum(counts.values())
    return write(
        "sources",
        "Sources: which document supports the answer?",
        f"**The question.** SmolLM2 reads three short documents and a question ({len(trace.tokens)} tokens) and goes on with "
        f"‘{told.strip()}’. Attention from the last token is often summed by document and shown as 'sources'. How much of that share does "
        "the computation fix?",
        "**The rule.** At least a quarter of a head's attention lies on a document, or less: `mass(keys, at_least=0.25)`.",
        f"**The verdict.** Of {total} shares ({len(picks)} heads, three documents) {counts['certified']} are certified on "
        f"their side of a quarter, {counts['refuted']} are not (another row with the same output is on the other side), {counts['open']} "
        f"open. The exact intervals are {statistics.median(wide):.3f} wide (median), {max(wide):.2f} at most.",
        picture("sources", axes, "Shares of attention on each document with their exact intervals"),
        f"**The head with most on one document.** Layer {best[0]} head {best[1]}: {one.sentences()[0]}",
        against,
        "A certified share says what the head's attention is. It does not say that the answer was *caused* by that document: "
        "much of the attention of a decoder goes to its first token and carries nothing.",
        "**The same on the command line**",
        command(
            f'whence decide "$(cat documents.txt)" --model smollm2 --rule "mass:{keys[0]}-{keys[-1]}>=0.25" '
            f"--layer {best[0]} --head {best[1]} --query {last}",
            needs="smollm2",
        ),
        "## The ten heads with most on one document",
        table(["layer.head", *(f"{n} (share, interval)" for n in places)], rows),
        "## The documents (`documents.txt`, one a line)",
        "\n\n".join(f"> {d}" for d in (OPENING, *DOCUMENTS, QUESTION)),
    )
