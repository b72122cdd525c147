"""Every figure and number of docs/mixing.md, made by whence itself: `python docs/make_mixing_figures.py` (extra `plot`)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib
import torch

import whence
from whence.mixing.mixture import Mixture

matplotlib.use("Agg")
from matplotlib import pyplot as plt

TEXT = "The bank raised its rates because inflation was high, and nobody complained."
METHODS = (
    "hidden-token-attribution", "rollout", "flow", "norms", "globenc", "alti", "value-zeroing", "decompx",
)  # fmt: skip
COLOURS = dict(
    zip(METHODS, ("black", "#9e9e9e", "#607d8b", "#1e88e5", "#7e57c2", "#d81b60", "#ef6c00", "#2e7d32"), strict=True)
)


def mixtures(model: whence.Model) -> dict[str, Mixture]:
    """Each method's answer from the embeddings; GlobEnc, which is published without it, divided by its row sums."""
    trace = whence.trace(model, TEXT)
    found: dict[str, Mixture] = {
        "hidden-token-attribution": whence.hidden_token_attribution(trace, "exact", progress=True)
    }
    for name in METHODS[1:]:
        mixed = whence.contributions(trace, name).rollout()
        if name == "globenc":
            values = mixed.values / mixed.values.sum(-1, keepdim=True)
            mixed = type(mixed)(values, mixed.axes, mixed.tokens, mixed.provenance, layers=mixed.layers)
        found[name] = mixed
    return found


def own_share(found: dict[str, Mixture], folder: Path) -> None:
    """Median own-token share by layer, a line per method."""
    figure, axes = plt.subplots(figsize=(6.4, 3.8))
    for name, mixed in found.items():
        frame = mixed.own_share()
        wide = 2.4 if name == "hidden-token-attribution" else 1.4
        axes.plot(
            frame["layer"], frame["median"], label=name, color=COLOURS[name], linewidth=wide, marker="o", markersize=3
        )
    axes.set(xlabel="after layer", ylabel="share of a token's own input (median)", ylim=(0, 1))
    axes.legend(fontsize=8, frameon=False)
    _save(figure, folder / "mixing_own_share.svg")


def rows(found: dict[str, Mixture], word: str, folder: Path) -> None:
    """One hidden token's row by every method."""
    tokens = next(iter(found.values())).tokens
    at = list(tokens).index(word)
    table = torch.stack([mixed.values[-1, at].float() for mixed in found.values()])
    figure, axes = plt.subplots(figsize=(8.2, 3.4))
    image = axes.imshow(table, cmap="Blues", vmin=0, vmax=float(table.max()), aspect="auto")
    axes.set_xticks(range(len(tokens)), list(tokens), rotation=60, ha="right", fontsize=8)
    axes.set_yticks(range(len(found)), list(found), fontsize=8)
    axes.set_title(f"what ‘{word}’ is made of after the last layer", fontsize=10)
    figure.colorbar(image, ax=axes, fraction=0.03)
    _save(figure, folder / "mixing_one_token.svg")


def distances(found: dict[str, Mixture], folder: Path) -> None:
    """Mean share by signed offset in the last layer."""
    figure, axes = plt.subplots(figsize=(6.4, 3.4))
    for name, mixed in found.items():
        frame = mixed.by_offset()
        frame = frame[(frame["layer"] == mixed.layers[-1]) & frame["offset"].between(-6, 6) & (frame["offset"] != 0)]
        axes.plot(frame["offset"], frame["share"], label=name, color=COLOURS[name], marker="o", markersize=3)
    axes.set(xlabel="offset of the input token", ylabel="mean share, last layer")
    axes.legend(fontsize=7, frameon=False)
    _save(figure, folder / "mixing_offsets.svg")


def local_global(model: whence.Model, folder: Path) -> None:
    """Attention rows against head attributions, by layer, with the range over heads."""
    both = whence.local_vs_global(whence.trace(model, TEXT), mode="probes", probes=32).by_head()
    figure, axes = plt.subplots(figsize=(6.4, 3.0))
    for name, colour in (("pearson", "#1e88e5"), ("spearman", "#d81b60")):
        frame = both.groupby("layer")[name]
        axes.plot(frame.mean(), color=colour, label=name, marker="o", markersize=3)
        axes.fill_between(frame.mean().index, frame.min(), frame.max(), color=colour, alpha=0.12)
    axes.set(xlabel="layer", ylabel="attention against attribution")
    axes.legend(fontsize=8, frameon=False)
    _save(figure, folder / "mixing_local_global.svg")


def table(found: dict[str, Mixture]) -> None:
    """The page's table: last layer."""
    reference = found["hidden-token-attribution"].values[-1].double()
    heads = (
        "method",
        "own share, first layer",
        "own share, last layer",
        "not their own largest, %",
        "from special tokens",
    )
    lines = [f"| {' | '.join(heads)} | r with HTA |", "|---|---|---|---|---|---|"]
    for name, mixed in found.items():
        own, special = mixed.own_share(), mixed.special_mass()
        values = mixed.values[-1].double()
        r = torch.stack(
            [torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(values, reference, strict=True)]
        ).mean()
        first, last = own.iloc[0], own.iloc[-1]
        lines.append(
            f"| {name} | {first['median']:.2f} | {last['median']:.2f} | {last['not_largest']:.0f} | "
            f"{special.iloc[-1]['special']:.2f} | {float(r):.2f} |"
        )
    sys.stdout.write("\n".join(lines) + "\n")


def _save(figure: plt.Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Make everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "figures")
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    plt.rcParams["svg.hashsalt"] = "whence"
    model = whence.load()
    found = mixtures(model)
    own_share(found, options.folder)
    rows(found, "rates", options.folder)
    distances(found, options.folder)
    local_global(model, options.folder)
    table(found)


if __name__ == "__main__":
    main()
