"""Residues: does a head of AntiBERTy attend to the disulfide bridge of an antibody?"""

from __future__ import annotations

from pathlib import Path

import torch

import whence
from gallery.page import command, picture, table, write
from whence import rules
from whence.core.attention.bounds import weight_bounds
from whence.results.plotting import new_axes

TRASTUZUMAB = "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS"
FIRST, SECOND = 22, 96  # the cysteines, as residues of the chain


def make() -> Path:
    model = whence.load("antiberty")
    trace = whence.trace(model, TRASTUZUMAB)
    stack = trace.of()
    # The bridge has two ends: each head is asked from the end where it attends more to the other.
    there = torch.stack([layer.attention[:, FIRST, SECOND] for layer in stack])
    back = torch.stack([layer.attention[:, SECOND, FIRST] for layer in stack])
    weight = torch.maximum(there, back)
    layers, heads = weight.shape

    def ends(layer: int, head: int) -> tuple[int, int]:
        return (FIRST, SECOND) if there[layer, head] >= back[layer, head] else (SECOND, FIRST)

    order = weight.flatten().argsort(descending=True)
    best = divmod(int(order[0]), heads)
    rows, sure, widest = [], 0, 0.0
    for place in order[:8].tolist():
        layer, head = divmod(place, heads)
        query, key = ends(layer, head)
        found = whence.decide(
            trace, rules.above(f"C{key}", 0.02), layer=layer, head=head, query=f"C{query}", verify=False
        )
        low, high = float(found.lower[0]), float(found.upper[0])
        widest = max(widest, high - low)
        rows.append(
            [
                f"{layer}.{head}",
                f"Cys{query} → Cys{key}",
                f"{float(found.value[0]):.3f}",
                f"[{low:.3f}, {high:.3f}]",
                found.sentences()[0].split(". ")[-1],
            ]
        )
    query, key = ends(*best)
    top = whence.decide(trace, rules.argmax(), layer=best[0], head=best[1], query=f"C{query}")
    contact = whence.decide(trace, rules.above(f"C{key}", 0.02), layer=best[0], head=best[1], query=f"C{query}")
    low, high = float(contact.lower[0]), float(contact.upper[0])
    # Closed-form bounds for every head: wide, but valid for all 64 at once.
    lows, highs = [], []
    for layer in stack:
        bounds = weight_bounds(layer.attention, layer.values)
        places = [ends(layer.index, h) for h in layer.heads]
        lows.append(torch.stack([bounds.lower[h, q, k] for h, (q, k) in enumerate(places)]))
        highs.append(torch.stack([bounds.upper[h, q, k] for h, (q, k) in enumerate(places)]))
    low_all, high_all = torch.stack(lows), torch.stack(highs)
    sure = int((low_all > 0.02).sum())
    axes = new_axes((7.0, 3.4))
    own = weight.flatten()
    at = own.argsort(descending=True).tolist()
    for x, place in enumerate(at):
        axes.plot(
            [x, x], [float(low_all.flatten()[place]), float(high_all.flatten()[place])], color="#1f6fb4", alpha=0.4
        )
        axes.plot([x], [float(own[place])], ".", color="#1f6fb4")
    axes.set_xlabel(f"all {layers * heads} heads, by their weight between Cys{FIRST} and Cys{SECOND}")
    axes.set_ylabel("weight, and proved bounds")
    null = int(whence.identifiability(trace).extra["simplex_null_dimension"].max())
    return write(
        "residues",
        "Residues: is this head looking at the disulfide?",
        f"**The question.** In the heavy chain of trastuzumab, Cys{FIRST} and Cys{SECOND} are bound to each other. Attention of "
        "protein language models is read as contacts. May one read this contact off a head of AntiBERTy?",
        f"**The rule.** The weight from one of the two to the other (the larger of the two directions) is above .02 (an even spread would give {1 / len(trace.tokens):.3f}): "
        "`above(key, threshold)`.",
        f"**The verdict.** **A reading that must not be made.** The most attentive of the {layers * heads} heads, layer "
        f"{best[0]} head {best[1]}, has {float(contact.value[0]):.3f} from Cys{query} to Cys{key}, and in attention rows with the same output "
        f"anything from {low:.3f} to {high:.3f}: {contact.verdicts[0]}. The sequence has {len(trace.tokens)} tokens, heads of 64, "
        f"and a row can be moved in {null} directions. Of all {layers * heads} heads, {sure} "
        f"{'is' if sure == 1 else 'are'} shown by closed-form bounds to have more than .02 there.",
        picture("residues", axes, "The weight on the disulfide in all heads, with bounds"),
        "**The counter-example.** "
        + (
            f"{contact.sentences()[0]} Put into the model: {contact.verification.sentence()}"
            if contact.verification is not None
            else contact.sentences()[0]
        ),
        f"What that row's largest weight is on: {top.sentences()[0]}",
        "**The same on the command line**",
        command(
            f'whence get antiberty\nwhence decide {TRASTUZUMAB} --model antiberty --rule "above:C{SECOND}>0.02" '
            f"--layer {best[0]} --head {best[1]} --query C{query}"
        ),
        "## The eight most attentive heads",
        table(["layer.head", "from, to", "weight", "in every row with the same output", "above .02?"], rows),
        "Sequence: the variable heavy domain of trastuzumab, "
        f"`{TRASTUZUMAB}`; residues are counted along the chain from 1. Intervals are exact (linear programs with checked duals); "
        "those of the picture are closed-form bounds, which are wider.",
    )
