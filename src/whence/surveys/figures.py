"""The figures of a survey, beside what was published for BERT-base. Every point has its 95 % interval over texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from whence.errors import InputError
from whence.mixing.summaries import DISTANCES
from whence.results.plotting import new_axes
from whence.surveys.layer_columns import OFFSETS, distance_name, offset_name

if TYPE_CHECKING:
    import pandas as pd

    from whence.surveys.result import Survey

# Brunner et al. (2020), BERT-base, layers 1 … 12.
OWN_SHARE = (30.6, 22.9, 21.2, 18.8, 15.7, 14.4, 13.4, 12.6, 11.7, 10.3, 9.8, 9.9)
NOT_LARGEST = (0.0, 0.0, 0.1, 3.4, 7.6, 13.6, 15.0, 18.1, 21.4, 29.8, 31.9, 31.6)
NAIVE_COSINE = (1.00, 0.995, 0.982, 0.965, 0.90, 0.82, 0.735, 0.615, 0.55, 0.41, 0.21, 0.49)
PUBLISHED = "BERT-base, Brunner et al. 2020"


def _line(ax: Any, frame: pd.DataFrame, x: str, y: str, label: str, scale: float = 1.0, **style: Any) -> None:
    """A line with its interval as a band."""
    at = range(len(frame)) if frame[x].dtype.name == "category" else frame[x]
    line = ax.plot(at, scale * frame[y], marker="o", ms=3, label=label, **style)[0]
    ax.fill_between(at, scale * frame["low"], scale * frame["high"], alpha=0.2, color=line.get_color())
    if frame[x].dtype.name == "category":
        ax.set_xticks(list(at), list(frame[x]))


def _certain(survey: Survey, ax: Any) -> None:
    _line(ax, survey.certain("group"), "group", "share", "all heads")
    ax.set(xlabel="tokens", ylabel="share of readings that are certain", ylim=(0, 1.02))


def _certain_by_layer(survey: Survey, ax: Any) -> None:
    _line(ax, survey.certain("layer"), "layer", "share", "all heads")
    ax.set(xlabel="layer", ylabel="share of readings that are certain", ylim=(0, 1.02))


def _r_by_length(survey: Survey, ax: Any) -> None:
    for layer, part in survey.mean("r", "layer", "group").groupby("layer"):
        _line(ax, part, "group", "mean", f"layer {layer}")
    ax.set(xlabel="tokens", ylabel="r of raw and effective attention")


def _special(survey: Survey, ax: Any) -> None:
    frame = survey.attention_to("layer")
    for kind, colour in (("start", "C0"), ("end", "C1"), ("punctuation", "C2"), ("rest", "C3")):
        for side, dash in (("raw", "-"), ("effective", "--")):
            part = frame[(frame["type"] == kind) & (frame["side"] == side)]
            _line(ax, part, "layer", "mean", f"{kind}, {side}", color=colour, ls=dash)
    ax.set(xlabel="layer", ylabel="attention to this type of token")


def _own_share(survey: Survey, ax: Any) -> None:
    for method in ("alti", "hta"):
        if f"{method}_own_median" in survey.layers.columns:
            frame = survey.mean(f"{method}_own_median", "layer")
            _line(ax, frame.assign(layer=frame["layer"] + 1), "layer", "mean", method.upper(), 100)
    ax.plot(range(1, 13), OWN_SHARE, color="0.6", ls=":", label=f"HTA, {PUBLISHED}")
    ax.set(xlabel="layer", ylabel="own-token share, % (median of a text)")


def _not_largest(survey: Survey, ax: Any) -> None:
    for method in ("alti", "hta"):
        if f"{method}_beaten" in survey.layers.columns:
            frame = survey.share_of_tokens(f"{method}_beaten")
            _line(ax, frame.assign(layer=frame["layer"] + 1), "layer", "share", method.upper(), 100)
    ax.plot(range(1, 13), NOT_LARGEST, color="0.6", ls=":", label=f"HTA, {PUBLISHED}")
    ax.set(xlabel="layer", ylabel="P̃: tokens that are not their own largest part, %")


def _tokens(survey: Survey, ax: Any) -> None:
    for metric in ("cosine", "l2"):
        frame = survey.share_of_tokens(f"tokens_{metric}")
        _line(ax, frame.assign(layer=frame["layer"] + 1), "layer", "share", f"naive, {metric}")
    ax.plot(range(1, 13), NAIVE_COSINE, color="0.6", ls=":", label=f"naive, cosine, {PUBLISHED}")
    ax.set(xlabel="layer", ylabel="tokens identified", ylim=(0, 1.02))


def _distance(survey: Survey, ax: Any) -> None:
    for index, (name, _, _) in enumerate(DISTANCES):
        _line(ax, survey.mean(f"alti_{distance_name(index)}", "layer"), "layer", "mean", f"{name} neighbour", 100)
    ax.set(xlabel="layer", ylabel="share by distance, % (ALTI)")


def _offset(survey: Survey, ax: Any) -> None:
    offsets = sorted(OFFSETS)
    for layer, _ in survey.layers.groupby("layer"):
        part = survey.layers[survey.layers["layer"] == layer]
        ax.plot(
            offsets, [part[f"alti_{offset_name(o)}"].mean() for o in offsets], marker="o", ms=3, label=f"layer {layer}"
        )
    ax.set(xlabel="offset (input − hidden)", ylabel="mean share of one token (ALTI)")


FIGURES: dict[str, tuple[str, str, Callable[[Survey, Any], None]]] = {
    "certain": ("certain", "How many readings are certain, by length", _certain),
    "certain-by-layer": ("certain", "How many readings are certain, by layer", _certain_by_layer),
    "r-by-length": ("r", "Raw and effective attention, by length", _r_by_length),
    "token-types": ("r", "What attention goes to, raw and effective", _special),
    "own-share": ("alti_own", "How much of a token is its own", _own_share),
    "not-largest": ("alti_own", "Tokens that others contribute more to", _not_largest),
    "distance": ("alti_own", "Where the rest comes from, by distance", _distance),
    "offset": ("alti_own", "Where the rest comes from, by offset", _offset),
    "tokens": ("tokens_cosine", "Can the token still be told from its state?", _tokens),
}
"""By name: a column it needs, its title, and how it is drawn."""


def available(survey: Survey) -> list[str]:
    """The figures whose columns this survey has."""
    have = {*survey.heads.columns, *survey.layers.columns}
    return [name for name, (column, _, _) in FIGURES.items() if column in have]


def plot(survey: Survey, figure: str, ax: Any = None) -> Any:
    """Draw one figure; returns the Axes."""
    if figure not in available(survey):
        raise InputError(f"this survey has no figure {figure!r}; it has: {', '.join(available(survey))}.")
    _, title, draw = FIGURES[figure]
    ax = new_axes() if ax is None else ax
    draw(survey, ax)
    ax.set_title(title)
    if len(ax.get_legend_handles_labels()[0]) > 1:
        ax.legend(fontsize=7)
    return ax
