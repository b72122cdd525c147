"""Decisions as a figure: what each was decided by, the range it can take, and the verdict as colour and letter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whence.results.plotting import new_axes

if TYPE_CHECKING:
    from whence.attention.decide import Decisions

# Blue, orange and grey are told apart by the colour-blind; the marker says it without colour.
COLOURS = {"certified": "#1f6fb4", "refuted": "#d95f02", "open": "#777777"}
MARKERS = {"certified": "o", "refuted": "X", "open": "s"}
MOST = 60


def plot_decisions(decisions: Decisions, ax: Any = None) -> Any:
    """One line a query (the first 60): the observed value, its range in every row with the same output, the verdict."""
    shown = range(min(len(decisions), MOST))
    axes = new_axes((6.4, 1.2 + 0.22 * len(shown))) if ax is None else ax
    lower, upper, margin = decisions.lower.tolist(), decisions.upper.tolist(), decisions.margin.tolist()
    for i in shown:
        word, value = decisions.verdicts[i], float(decisions.value[i])
        # NaN: no range was asked for; the margin is what is proved.
        low = lower[i] if lower[i] == lower[i] else margin[i]
        high = upper[i] if upper[i] == upper[i] else value
        axes.plot([low, high], [i, i], color=COLOURS[word], linewidth=3, alpha=0.45, solid_capstyle="butt")
        axes.plot([value], [i], MARKERS[word], color=COLOURS[word], markersize=5)
    labels = [f"{decisions.query_names[i]} → {decisions.answers[i]}".replace("$", r"\$") for i in shown]
    axes.set_yticks(list(shown), labels, fontsize=7)
    axes.invert_yaxis()
    for word in COLOURS:
        axes.plot([], [], MARKERS[word], color=COLOURS[word], label=f"{word} ({decisions.counts[word]})")
    axes.legend(fontsize=7, loc="best")
    axes.set_xlabel("observed value, and its range in every row with the same head output", fontsize=8)
    axes.set_title(decisions.rule, fontsize=9)
    return axes
