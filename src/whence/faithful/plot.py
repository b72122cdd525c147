"""Removal curves as a figure; matplotlib comes with the extra 'plot'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whence.errors import InputError
from whence.results.plotting import new_axes

if TYPE_CHECKING:
    from whence.faithful.result import Faithfulness

COLOURS = ("#0d4a8c", "#b35806", "#35827b", "#8c2d6b", "#6b6f76", "#c79a1b", "#4a7fd0", "#a33b2f", "#5c8a2f", "#7a5bb5")


def plot_curves(result: Faithfulness, operator: str, methods: Sequence[str] | None, ax: Any) -> Any:
    """Solid: the most important units go first (low is good). Dashed: the least important go first (high is good)."""
    if operator not in result.operators:
        raise InputError(f"operator {operator!r} was not run; there are: {', '.join(result.operators)}.")
    frame = result.curves()
    names = list(methods) if methods is not None else frame["method"].unique().tolist()
    axes = ax if ax is not None else new_axes((6.4, 4.4))
    for k, name in enumerate(names):
        lines = frame[(frame["method"] == name) & (frame["operator"] == operator)]
        if lines.empty:
            raise InputError(f"{name!r} is not among the methods compared: {', '.join(result.methods)}.")
        colour = "#9a9ea6" if name == "random" else COLOURS[k % len(COLOURS)]
        for direction, style in (("most important first", "-"), ("least important first", "--")):
            line = lines[lines["removed"] == direction]
            label = name if style == "-" else None
            axes.plot(100 * line["share"], line["output"], style, color=colour, label=label, linewidth=1.4)
    watched = "logit(target) − logit(foil)" if result.settings.get("foil") else "p(target)"
    axes.set(xlabel=f"units removed, % ({operator})", ylabel=f"mean {watched}")
    axes.set_title(f"{result.model}, {len(result.paired)} texts", fontsize="medium")
    axes.legend(frameon=False, fontsize="small")
    return axes
