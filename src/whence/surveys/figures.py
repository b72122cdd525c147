"""The figures of a survey, beside what was published for BERT-base. Every point has its 95 % interval over texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whence.errors import InputError
from whence.mixing.summaries import DISTANCES
from whence.results.plotting import new_axes
from whence.surveys.head_columns import KINDS
from whence.surveys.layer_columns import OFFSETS, distance_name, offset_name

if TYPE_CHECKING:
    import pandas as pd

    from whence.surveys.result import Survey

# Brunner et al. (2020), BERT-base, after each of its twelve layers; they count from 1, here it is from 0.
OWN_SHARE = (30.6, 22.9, 21.2, 18.8, 15.7, 14.4, 13.4, 12.6, 11.7, 10.3, 9.8, 9.9)
NOT_LARGEST = (0.0, 0.0, 0.1, 3.4, 7.6, 13.6, 15.0, 18.1, 21.4, 29.8, 31.9, 31.6)
NAIVE_COSINE = (1.00, 0.995, 0.982, 0.965, 0.90, 0.82, 0.735, 0.615, 0.55, 0.41, 0.21, 0.49)
PUBLISHED = "BERT-base, Brunner et al. 2020"


@dataclass(frozen=True)
class Line:
    """One line: its points, and their intervals where there are any. `published`: not measured here."""

    name: str
    x: tuple[Any, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    pair: int | None = None
    """Lines with the same number belong together: one colour, the second dashed."""
    published: bool = False


@dataclass(frozen=True)
class Figure:
    """A figure as data, for matplotlib and for the page alike."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    most: float | None = None
    """Where the axis ends; None: where the data does. It begins at 0."""


def _line(frame: pd.DataFrame, x: str, y: str, name: str, scale: float = 1.0, pair: int | None = None) -> Line:
    """A line with its interval."""
    values, low, high = (tuple((scale * frame[column]).tolist()) for column in (y, "low", "high"))
    return Line(name, tuple(frame[x].tolist()), values, low, high, pair)


def _published(name: str, values: Sequence[float]) -> Line:
    return Line(f"{name}, {PUBLISHED}", tuple(range(12)), tuple(values), published=True)


def _certain(survey: Survey) -> Figure:
    line = _line(survey.certain("group"), "group", "share", "all heads")
    title = "How many readings are certain, by length"
    return Figure(title, "tokens", "share of readings that are certain", (line,), 1.02)


def _certain_by_layer(survey: Survey) -> Figure:
    line = _line(survey.certain("layer"), "layer", "share", "all heads")
    title = "How many readings are certain, by layer"
    return Figure(title, "layer", "share of readings that are certain", (line,), 1.02)


def _certain_by_type(survey: Survey) -> Figure:
    frame = survey.certain_by_type("layer").dropna(subset="share")
    lines = tuple(_line(part, "layer", "share", str(kind)) for kind, part in frame.groupby("type", sort=False))
    title = "How many readings are certain, by the token with the heaviest weight"
    return Figure(title, "layer", "share of rows that are certain (unique ones aside)", lines, 1.02)


def _r_by_length(survey: Survey) -> Figure:
    lines = tuple(
        _line(part, "group", "mean", f"layer {layer}")
        for layer, part in survey.mean("r", "layer", "group").groupby("layer")
    )
    return Figure("Raw and effective attention, by length", "tokens", "r of raw and effective attention", lines)


def _special(survey: Survey) -> Figure:
    frame = survey.attention_to("layer")
    lines = tuple(
        _line(frame[(frame["type"] == kind) & (frame["side"] == side)], "layer", "mean", f"{kind}, {side}", pair=number)
        for number, kind in enumerate(KINDS)
        for side in ("raw", "effective")
    )
    title = "What attention goes to, raw and effective"
    return Figure(title, "layer", "attention to this type of token", lines)


def _own_share(survey: Survey) -> Figure:
    lines = tuple(
        _line(survey.mean(f"{method}_own_median", "layer"), "layer", "mean", method.upper(), 100)
        for method in ("alti", "hta")
        if f"{method}_own_median" in survey.layers.columns
    )
    published = _published("HTA", OWN_SHARE)
    return Figure(
        "How much of a token is its own", "layer", "own-token share, % (median of a text)", (*lines, published)
    )


def _not_largest(survey: Survey) -> Figure:
    lines = tuple(
        _line(survey.share_of_tokens(f"{method}_beaten"), "layer", "share", method.upper(), 100)
        for method in ("alti", "hta")
        if f"{method}_beaten" in survey.layers.columns
    )
    label = "P̃: tokens that are not their own largest part, %"
    return Figure("Tokens that others contribute more to", "layer", label, (*lines, _published("HTA", NOT_LARGEST)))


def _tokens(survey: Survey) -> Figure:
    lines = tuple(
        _line(survey.share_of_tokens(f"tokens_{metric}"), "layer", "share", f"naive, {metric}")
        for metric in ("cosine", "l2")
    )
    published = _published("naive, cosine", NAIVE_COSINE)
    return Figure(
        "Can the token still be told from its state?", "layer", "tokens identified", (*lines, published), 1.02
    )


def _distance(survey: Survey) -> Figure:
    lines = tuple(
        _line(survey.mean(f"alti_{distance_name(index)}", "layer"), "layer", "mean", f"{name} neighbour", 100)
        for index, (name, _, _) in enumerate(DISTANCES)
    )
    return Figure("Where the rest comes from, by distance", "layer", "share by distance, % (ALTI)", lines)


def _offset(survey: Survey) -> Figure:
    offsets = tuple(sorted(OFFSETS))
    lines = tuple(
        Line(f"layer {layer}", offsets, tuple(float(part[f"alti_{offset_name(o)}"].mean()) for o in offsets))
        for layer, part in survey.layers.groupby("layer")
    )
    title = "Where the rest comes from, by offset"
    return Figure(title, "offset (input − hidden)", "mean share of one token (ALTI)", lines)


FIGURES: dict[str, tuple[str, Callable[[Survey], Figure]]] = {
    "certain": ("certain", _certain),
    "certain-by-layer": ("certain", _certain_by_layer),
    "certain-by-type": ("certain_rest", _certain_by_type),
    "r-by-length": ("r", _r_by_length),
    "token-types": ("r", _special),
    "own-share": ("alti_own", _own_share),
    "not-largest": ("alti_own", _not_largest),
    "distance": ("alti_own", _distance),
    "offset": ("alti_own", _offset),
    "tokens": ("tokens_cosine", _tokens),
}
"""By name: a column it needs, and how it is made."""


def available(survey: Survey) -> list[str]:
    """The figures whose columns this survey has."""
    have = {*survey.heads.columns, *survey.layers.columns}
    return [name for name, (column, _) in FIGURES.items() if column in have]


def figure(survey: Survey, name: str) -> Figure:
    """One figure of the survey, as data."""
    if name not in available(survey):
        raise InputError(f"this survey has no figure {name!r}; it has: {', '.join(available(survey))}.")
    return FIGURES[name][1](survey)


def plot(survey: Survey, name: str, ax: Any = None) -> Any:
    """Draw one figure; returns the Axes."""
    drawn = figure(survey, name)
    ax = new_axes() if ax is None else ax
    for line in drawn.lines:
        words = any(isinstance(v, str) for v in line.x)
        at = range(len(line.x)) if words else line.x
        style: dict[str, Any] = {"color": "0.6", "ls": ":"} if line.published else {"marker": "o", "ms": 3}
        if line.pair is not None:
            style |= {"color": f"C{line.pair}", "ls": "--" if line.name.endswith("effective") else "-"}
        shown = ax.plot(at, line.y, label=line.name, **style)[0]
        if line.low is not None and line.high is not None:
            ax.fill_between(at, line.low, line.high, alpha=0.2, color=shown.get_color())
        if words:
            ax.set_xticks(list(at), list(line.x))
    ax.set(xlabel=drawn.x_label, ylabel=drawn.y_label, title=drawn.title)
    if drawn.most is not None:
        ax.set_ylim(0, drawn.most)
    if len(drawn.lines) > 1:
        ax.legend(fontsize=7)
    return ax
