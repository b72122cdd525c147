"""Results as figures for a paper. matplotlib is imported when a plot is asked for, and without pyplot: no window, no state."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whence.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from whence.results.labels import Tokens
    from whence.results.result import Result

ROWS, COLUMNS = ("query", "hidden", "explained"), ("key", "input")
MOST_LABELS = 80
SEQUENTIAL, DIVERGING = "Blues", "PuOr_r"  # safe for the colour-blind


def new_axes(size: tuple[float, float] = (6.4, 4.8)) -> Any:
    """Axes on a figure of their own."""
    try:
        figure = importlib.import_module("matplotlib.figure")
        importlib.import_module("matplotlib.backends.backend_agg")
    except ImportError as problem:
        raise MissingExtraError("a plot needs matplotlib: pip install 'whence[plot]'.") from problem
    return figure.Figure(figsize=size, layout="constrained").subplots()


def plot_bars(names: Sequence[str], values: Sequence[float | None], label: str, ax: Any = None) -> Any:
    """One bar a name, from the top down; a value that is not defined has none. Returns the Axes."""
    axes = ax if ax is not None else new_axes((5.2, 0.3 * len(names) + 1.1))
    lengths = [0.0 if value is None or value != value else float(value) for value in values]
    axes.barh(range(len(names)), lengths, color="#2f7dbd", height=0.55)
    axes.set_yticks(range(len(names)), [name.replace("$", r"\$") for name in names])
    axes.invert_yaxis()
    axes.set(xlabel=label)
    return axes


def plot_result(result: Result, *, layer: int | None = None, head: int | None = None, ax: Any = None) -> Any:
    """What a result holds, by its axes; returns the Axes.

    Rows and columns of tokens: one matrix, of `layer` (None: the last) and `head` (None: the mean over the heads).
    Layers × heads (× rows): a grid, the mean over the rows. Layers × tokens: a grid. One number per token: bars. One
    number per layer: a line.
    """
    values = result.values.detach().cpu().to(torch.float64)
    names = list(result.axes)
    title = [result.provenance.method, result.provenance.model]
    is_matrix = any(n in ROWS for n in names) and any(n in COLUMNS for n in names)
    if layer is not None or (is_matrix and "layer" in names):
        values, names, chosen = _take(result, values, names, "layer", layer)
        title.append(f"layer {chosen}")
    if head is not None:
        values, names, chosen = _take(result, values, names, "head", head)
        title.append(f"head {chosen}")
    keep = 2
    while len(names) > keep:
        # Heads are averaged where tokens remain to be shown; otherwise the tokens are, and layers × heads remain.
        axis = "head" if "head" in names and (is_matrix or names[-1] in COLUMNS) else next(
            (n for n in names if n in ROWS + COLUMNS), names[0]
        )  # fmt: skip
        place = names.index(axis)
        values = values.nanmean(place)
        names.pop(place)
        title.append(f"mean over {axis}s" if axis == "head" else f"mean over {axis} positions")
    caption = ", ".join(title)
    if len(names) == 2:
        return _grid(result, values, names, caption, ax)
    if len(names) == 1 and names[0] in ROWS + COLUMNS:
        return _bars(result, values, names[0], caption, ax)
    return _line(result, values, names[0], caption, ax)


def _take(
    result: Result, values: Tensor, names: list[str], axis: str, wanted: int | None
) -> tuple[Tensor, list[str], int]:
    have = list(getattr(result, f"{axis}s"))
    if axis not in names or (wanted is not None and wanted not in have):
        raise InputError(f"{axis} {wanted} is not in this result; it has {axis}s {have or 'none'}.")
    chosen = have[-1] if wanted is None else wanted
    place = names.index(axis)
    return values.select(place, have.index(chosen)), [n for n in names if n != axis], chosen


def _tokens(result: Result, axis: str) -> Tokens:
    return result.tokens if axis in ROWS else result.key_tokens or result.tokens


def _label(axes: Any, result: Result, which: str, name: str) -> None:
    """Tokens, layers or heads along one side."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    if name in ROWS + COLUMNS:
        labels = [t.replace("$", r"\$") for t in _tokens(result, name)]
        if len(labels) <= MOST_LABELS:
            size = 8 if len(labels) <= 40 else 5
            axis.set_ticks(range(len(labels)), labels, fontsize=size, rotation=90 if which == "x" else 0)
    elif name in ("layer", "head"):
        labels = [str(v) for v in getattr(result, f"{name}s")]
        axis.set_ticks(range(len(labels)), labels)
    axis.set_label_text(name)


def _grid(result: Result, values: Tensor, names: list[str], title: str, ax: Any) -> Any:
    rows, columns = values.shape
    square = names[0] in ROWS and names[1] in COLUMNS
    size = (7.0, 6.2) if square else (max(4.5, 0.45 * min(columns, 24) + 1.5), max(2.6, 0.4 * min(rows, 24) + 1.2))
    axes = ax if ax is not None else new_axes(size)
    known = values[values.isfinite()]
    signed = bool((known < -1e-9).any())
    most = float(known.abs().max()) if known.numel() else 1.0
    image = axes.imshow(
        values.numpy(), cmap=DIVERGING if signed else SEQUENTIAL, vmin=-most if signed else 0.0, vmax=most or 1.0,
        aspect="equal" if square else "auto", interpolation="nearest",
    )  # fmt: skip
    _label(axes, result, "y", names[0])
    _label(axes, result, "x", names[1])
    axes.set_title(title, fontsize="medium")
    if axes.figure is not None:
        axes.figure.colorbar(image, ax=axes, shrink=0.85)
    return axes


def _bars(result: Result, values: Tensor, name: str, title: str, ax: Any) -> Any:
    axes = ax if ax is not None else new_axes((5.0, max(2.5, 0.17 * min(len(values), 120) + 1.0)))
    colours = ["#b35806" if v < 0 else "#2f7dbd" for v in values.tolist()]
    axes.barh(range(len(values)), values.tolist(), color=colours)
    _label(axes, result, "y", name)
    axes.invert_yaxis()
    axes.set(xlabel="value")
    axes.set_title(title, fontsize="medium")
    return axes


def _line(result: Result, values: Tensor, name: str, title: str, ax: Any) -> Any:
    axes = ax if ax is not None else new_axes()
    places = list(result._labels(name))
    axes.plot(places, values.tolist(), marker="o", color="#0d4a8c")
    axes.set(xlabel=name, ylabel="value")
    axes.set_title(title, fontsize="medium")
    return axes
