"""How many keys does a head need? Exact sparse rows against the heaviest keys at equal budget, on SmolLM2.

    python studies/droppable_keys.py

Every row of the chosen layers is replaced by a row with the same output on at most 65 keys (values of 64), then by as many
of its heaviest keys, divided by their sum; head outputs and the perplexity of the text are compared. Writes
docs/studies/droppable-keys.md.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

import whence
from whence.attention.droppable import droppable
from whence.reading.rerun.substitution import Replace, substitute

TEXT = (
    "The harbour town had two clocks, and they had never agreed. The one on the customs house ran four minutes "
    "ahead, so that the merchants would not miss the tide; the one on the church ran three minutes behind, so that "
    "nobody would be late for the sermon. Between the two a man could live a quiet life of seven minutes that "
    "belonged to no one. Anna Brandt, who mended nets under the arches, used those minutes to read. She read "
    "whatever the sailors left: almanacs, letters that had lost their envelopes, a treatise on the diseases of "
    "potatoes, and once, for a whole winter, the second volume of a novel whose first volume had gone down with the "
    "Margarethe. She invented the beginning for herself, and it was, her brother said, far better than the real one "
    "could have been. When the new railway came, the company brought its own clock, and its own time, and a clerk "
    "who explained that there would from now on be only one. The merchants grumbled, the parson preached against "
    "it, and Anna put down her needle and walked up the hill to see whether the trains, at least, would be late."
)
LAYERS = (4, 9, 14, 19, 24)


def perplexity(logits: torch.Tensor, ids: torch.Tensor) -> float:
    return math.exp(float(torch.nn.functional.cross_entropy(logits[:-1].double(), ids[1:])))


def main() -> None:
    model = whence.load("smollm2")
    trace = whence.trace(model, TEXT, keep=("attention", "values", "outputs"))
    ids = trace.inputs["input_ids"][0]
    n = len(trace.tokens)
    plain = perplexity(trace.logits, ids)
    lines = []
    everything: dict[str, list[Replace]] = {"sparse": [], "top": []}
    for layer in LAYERS:
        changes: dict[str, list[Replace]] = {"sparse": [], "top": []}
        kept, seen, exact, by_mass = [], [], [], []
        for head in trace[layer].heads:
            found = droppable(trace, layer, head, list(range(66, n)), verify=False)
            assert found.check()
            kept.append(found.needed.double().mean())
            seen.append(found.visible.sum(-1).double().mean())
            exact.append(found.error(found.sparse).max())
            by_mass.append(found.error(found.top).median())
            for name, rows in (("sparse", found.sparse), ("top", found.top)):
                whole = trace[layer].attention[head].double().clone()
                whole[66:] = rows
                changes[name].append(Replace(layer, whole, head))
        told = {}
        for name, change in changes.items():
            told[name] = perplexity(substitute(trace, change).logits, ids)
            everything[name] += change
        mean = [float(torch.stack(x).mean()) for x in (seen, kept, by_mass)]
        lines.append(
            f"| {layer} | {mean[0]:.0f} | {mean[1]:.0f} | {float(torch.stack(exact).max()):.0e} | {mean[2]:.1%} | "
            f"{told['sparse']:.4f} | {told['top']:.4f} |"
        )
        print(lines[-1])
    both = {name: perplexity(substitute(trace, change).logits, ids) for name, change in everything.items()}
    lines.append(f"| all five | | | | | {both['sparse']:.4f} | {both['top']:.4f} |")
    page = f"""# Which keys could a head do without?

<!-- Made by: python studies/droppable_keys.py. Do not edit by hand. -->

A head output is a mixture of value vectors. By Carathéodory's theorem at most d_v + 1 of them are needed to make it, however
long the text: every row has an *equal-output* row on at most 65 keys in SmolLM2 (values of 64). `whence.droppable` finds one
by a linear program, checks it, and puts it into the model.

A text of our own, {n} tokens; rows 66 and up of all nine heads of five layers. Perplexity of the text as the model has it:
{plain:.4f}. *By mass*: as many of the row's heaviest keys, divided by their sum.

| layer | keys seen | kept | output error, sparse (largest) | by mass (mean of medians) | perplexity, sparse | by mass |
|---|---|---|---|---|---|---|
{chr(10).join(lines)}

The sparse rows change nothing: the perplexity is the model's own to the digits shown, with all five layers replaced at once
({both["sparse"] / plain - 1:+.4%}). Keeping the heaviest keys at the same budget moves a head output by a few per cent and the
perplexity by {both["top"] / plain - 1:+.2%}: on this text mass is a good guide to which keys matter at a budget of 65, and the
exact row is better only in that it costs nothing at all. Three cautions. The sparse row is found *from* the full output, so
this saves no computation by itself: it says how much of a row is redundant, not how to know it beforehand. Each row drops keys of
its own: a key may leave the cache only if every later row of every head can do without it. And one text of one small model is
one text of one small model.

<!-- needs: smollm2 -->
```python
import whence

trace = whence.trace(whence.load("smollm2"), "The harbour town had two clocks, and they had never agreed. " * 6)
print(whence.droppable(trace, layer=14, head=3, queries=[70, 78]).sentences()[0])
```
"""
    Path(__file__).resolve().parents[1].joinpath("docs/studies/droppable-keys.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
