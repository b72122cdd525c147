"""What is proved of attention, as figures for a paper; each returns the Axes. matplotlib comes with the extra 'plot'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from whence.core.attention.plots import BLUE, key_names, without_formulas
from whence.results.plotting import SEQUENTIAL, new_axes

if TYPE_CHECKING:
    from whence.attention.joint import LayerStatement
    from whence.attention.overview import Overview
    from whence.attention.witness import RowWitness, Verification

ORANGE = "#b35806"
MOST = 16


def plot_witness(witness: RowWitness, ax: Any = None) -> Any:
    """The row beside another with the same output: the keys that either gives most to."""
    heaviest = (
        torch.maximum(witness.row, witness.alternative).to(torch.float64).topk(min(MOST, len(witness.row))).indices
    )
    keys = heaviest[witness.row[heaviest].argsort(descending=True, stable=True)].tolist()
    axes = ax if ax is not None else new_axes((5.2, 0.34 * len(keys) + 1.2))
    stack = witness.trace.of(witness.attention)
    for shift, row, colour, name in (
        (-0.2, witness.row, BLUE, "as computed"),
        (0.2, witness.alternative, ORANGE, "just as good"),
    ):
        axes.barh([k + shift for k in range(len(keys))], row[keys].tolist(), height=0.4, color=colour, label=name)
    axes.set_yticks(range(len(keys)), key_names(stack.key_tokens, keys))
    axes.invert_yaxis()
    axes.set(xlabel="weight", xlim=(0, None))
    axes.set_title(
        f"layer {witness.layer}, head {witness.head}, from {without_formulas(stack.tokens[witness.query])}: "
        f"{witness.total_variation:.2f} moved",
        fontsize="medium",
    )
    axes.legend(loc="lower right", frameon=False)
    return axes


def plot_verification(verification: Verification, ax: Any = None) -> Any:
    """What changed in the model, with the other row and with a random row as far away, on a logarithmic scale."""
    axes = ax if ax is not None else new_axes((5.2, 2.4))
    lines = [
        (name, getattr(verification, key), getattr(verification, f"control_{key}"))
        for name, key in (("head output", "head_output"), ("final states", "final_states"), ("logits", "logits"))
        if getattr(verification, key) is not None
    ]
    least = 1e-17  # a change of exactly nothing has no place on this scale: at its left end
    for shift, which, colour, label in ((-0.2, 1, BLUE, "the other row"), (0.2, 2, ORANGE, "a random row as far away")):
        places = [k + shift for k in range(len(lines))]
        axes.barh(places, [max(line[which], least) for line in lines], height=0.4, color=colour, label=label)
    axes.set_xscale("log")
    axes.set_yticks(range(len(lines)), [name for name, *_ in lines])
    axes.invert_yaxis()
    axes.set(xlabel="relative change")
    axes.set_title(f"{verification.total_variation:.2f} of the attention moved", fontsize="medium")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncol=2, frameon=False, fontsize="small")
    return axes


def plot_layer_statement(statement: LayerStatement, ax: Any = None) -> Any:
    """In how many directions the rows of all heads can move together: as measured, and with random values."""
    axes = ax if ax is not None else new_axes((4.6, 2.0))
    joint = statement.joint
    parts = [("measured", joint.null_dimension), ("random values", joint.generic_null_dimension)]
    shown = [(name, value) for name, value in parts if value is not None]
    axes.barh(
        [name for name, _ in shown], [value for _, value in shown], color=[BLUE, "#9a9ea6"][: len(shown)], height=0.5
    )
    axes.invert_yaxis()
    axes.set(xlabel="directions that leave the block's output as it is")
    axes.set_title(f"layer {statement.layer}, token {statement.query}, {joint.heads} heads", fontsize="medium")
    return axes


def plot_overview(overview: Overview, ax: Any = None) -> Any:
    """Layers × heads: the mean width of the bounds of each row's heaviest weight."""
    layers, heads = overview.identifiability.layers, overview.identifiability.heads
    axes = ax if ax is not None else new_axes((max(4.5, 0.45 * len(heads) + 1.5), max(2.6, 0.4 * len(layers) + 1.2)))
    image = axes.imshow(overview.width.numpy(), cmap=SEQUENTIAL, vmin=0.0, aspect="auto", interpolation="nearest")
    axes.set_xticks(range(len(heads)), [str(h) for h in heads])
    axes.set_yticks(range(len(layers)), [str(i) for i in layers])
    axes.set(xlabel="head", ylabel="layer")
    axes.set_title(f"width of the bounds, {overview.tokens} tokens", fontsize="medium")
    axes.figure.colorbar(image, ax=axes, shrink=0.85)
    return axes
