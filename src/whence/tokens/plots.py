"""Rates by layer with chance, and the transfer matrix, as matplotlib Axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from whence.results.plotting import new_axes

if TYPE_CHECKING:
    from whence.tokens.result import TokenIdentifiability

COLOURS = {"naive": "#777777", "linear": "#1f77b4", "mlp": "#d62728", "ridge": "#2ca02c", "procrustes": "#9467bd"}
LINES = {"cosine": "-", "l2": "--"}
WHAT = {-1: "the token before", 0: "the token itself", 1: "the next token"}


def plot_rates(result: TokenIdentifiability, *, part: str = "whole", target: int = 0, ax: Any = None) -> Any:
    """One line per map (colour) and distance (solid cosine, dashed L2), its interval shaded, chance dotted."""
    axes = new_axes((6.4, 4.8)) if ax is None else ax
    layers = list(result.layers)
    for name in result.maps:
        for distance in result.distances:
            rates = result.rate(name, distance, part=part, target=target)
            if bool(torch.isnan(rates).all()):
                continue
            low, high = result.interval(name, distance, part=part, target=target)
            colour = COLOURS[name]
            axes.plot(layers, rates.tolist(), LINES[distance], color=colour, marker=".", label=f"{name}, {distance}")
            axes.fill_between(layers, low.tolist(), high.tolist(), color=colour, alpha=0.12, linewidth=0)
    axes.axhline(result.chance, color="black", linestyle=":", linewidth=1, label=f"chance {result.chance:.3g}")
    axes.set(
        xlabel="hidden state (0: embeddings)",
        ylabel="share of tokens recovered",
        ylim=(-0.02, 1.03),
        title=f"{result.provenance.model}: {WHAT.get(target, f'the token at {target:+d}')}"
        + ("" if part == "whole" else f", from its {part} only"),
    )
    # Below the axes: with ten lines there is no empty corner.
    axes.legend(fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    return axes


def plot_transfer(result: TokenIdentifiability, name: str, distance: str, *, ax: Any = None) -> Any:
    """Rows: the layer whose map it is; columns: the layer it is tested on."""
    axes = new_axes((6.4, 4.8)) if ax is None else ax
    matrix = result.transfer(name, distance)
    image = axes.imshow(matrix.numpy(), origin="lower", vmin=0, vmax=1, cmap="viridis", aspect="auto")
    places = range(len(result.layers))
    axes.set(
        xticks=places, yticks=places, xticklabels=result.layers, yticklabels=result.layers,
        xlabel="tested on hidden state", ylabel="trained on hidden state",
        title=f"{result.provenance.model}: transfer, {name}, {distance}",
    )  # fmt: skip
    axes.figure.colorbar(image, ax=axes, label="share of tokens recovered")
    return axes
