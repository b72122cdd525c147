"""Residues: does a head of AntiBERTy attend to the disulfide bridge of an antibody?"""

from __future__ import annotations

from pathlib import Path

import torch

import whence
from gallery.page import command, picture, table, write
from whence import rules
from whence.attention.plots_decisions import COLOURS
from whence.results.plotting import new_axes

TRASTUZUMAB = "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS"
THRESHOLD = 0.02
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
    decided = {}
    for place in order.tolist():
        layer, head = divmod(place, heads)
        query, key = ends(layer, head)
        decided[layer, head] = whence.decide(
            trace, rules.above(f"C{key}", THRESHOLD), layer=layer, head=head, query=f"C{query}", verify=False
        )
    rows = []
    for (layer, head), found in list(decided.items())[:8]:
        query, key = ends(layer, head)
        low, high = float(found.lower[0]), float(found.upper[0])
        told = found.decisions[0].verdict
        rows.append(
            [
                f"{layer}.{head}",
                f"Cys{query} → Cys{key}",
                f"{float(found.value[0]):.3f}",
                f"[{low:.3f}, {high:.3f}]",
                told,
            ]
        )
    above = [f for f in decided.values() if float(f.value[0]) > THRESHOLD]
    sure = sum(f.decisions[0].verdict == "certified" for f in above)
    query, key = ends(*best)
    top = whence.decide(trace, rules.argmax(), layer=best[0], head=best[1], query=f"C{query}")
    contact = whence.decide(trace, rules.above(f"C{key}", THRESHOLD), layer=best[0], head=best[1], query=f"C{query}")
    low, high = float(contact.lower[0]), float(contact.upper[0])
    axes = new_axes((7.0, 3.4))
    for x, found in enumerate(decided.values()):
        colour = COLOURS[found.decisions[0].verdict]
        axes.plot([x, x], [float(found.lower[0]), float(found.upper[0])], color=colour, alpha=0.5, linewidth=2)
        axes.plot([x], [float(found.value[0])], ".", color=colour)
    axes.axhline(THRESHOLD, color="#444444", linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"all {layers * heads} heads, by their weight between Cys{FIRST} and Cys{SECOND}")
    axes.set_ylabel("weight, and its exact interval")
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
        f"and a row can be moved in {null} directions. {len(above)} heads have more "
        f"than .02 there, and {sure} of these {'is' if sure == 1 else 'are'} certified to.",
        picture(
            "residues",
            axes,
            "The weight on the disulfide in all heads, with its exact interval; blue certified, orange refuted",
        ),
        "**The counter-example.** "
        + (
            f"{contact.sentences()[0]} Put into the model: {contact.verification.sentence()}"
            if contact.verification is not None
            else contact.sentences()[0]
        ),
        f"What that row's largest weight is on: {top.sentences()[0]}",
        "**The same on the command line**",
        command(
            f'whence get antiberty\nwhence decide {TRASTUZUMAB} --model antiberty --rule "above:C{key}>0.02" '
            f"--layer {best[0]} --head {best[1]} --query C{query}",
            needs="antiberty",
        ),
        "## The eight most attentive heads",
        table(["layer.head", "from, to", "weight", "in every row with the same output", "verdict*"], rows),
        "*On the recorded tensors; the head of the counter-example was put into the model.",
        "Sequence: the variable heavy domain of trastuzumab, "
        f"`{TRASTUZUMAB}`; residues are counted along the chain from 1. Intervals are exact: linear programs with checked duals.",
    )
