"""Every figure and number of docs/attention.md, made by whence itself: `python docs/make_attention_figures.py` (extra `plot`)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib
import torch

import whence

matplotlib.use("Agg")
from matplotlib import pyplot as plt

SENTENCE = (
    "The old doctor told the nurse that she would not leave the ward before the storm was over, because the roads to the "
    "village had been closed since noon and nobody knew when they would open again, so the two of them made tea, sat down by "
    "the window, and waited for the snow to stop falling on the silent hills."
)
STORY = SENTENCE + (
    " Towards evening a farmer knocked at the door. His horse had lost a shoe on the ice below the mill, he said, and his "
    "daughter was in the cart, wrapped in two blankets, with a fever that had not broken for three days. They carried the "
    "child inside. The nurse lit the lamps while the doctor warmed his hands at the stove and asked what she had eaten, who "
    "else in the house was ill, and whether the well had been cleaned since the summer. Nobody answered at first. Then the "
    "farmer told them about the neighbour's goat, the green water, and the two boys who had drunk from the trough in August. "
    "It was the kind of story that explains everything once it has been told, and the doctor, who had heard it in four other "
    "villages, only nodded, washed a glass, and sent for salt, sugar and as much boiled water as the kettle would hold."
)
BLUE, ORANGE, GREY = "#2f7dbd", "#c05a0a", "#6b7078"


def piece(model: whence.Model, tokens: int) -> str:
    """The beginning of the story that has so many tokens, special ones included."""
    ids = model.tokenizer(STORY, truncation=True, max_length=tokens)["input_ids"]
    return str(model.tokenizer.decode(ids[1:-1]))


def doppelganger(model: whence.Model, folder: Path, rounds: int) -> None:
    """All heads of one sentence, twice: the maps as computed, and others with the same outputs."""
    trace = whence.trace(model, SENTENCE)
    other = whence.doppelganger(trace, rounds=rounds)
    checked = other.verify()
    figure, panels = plt.subplots(1, 2, figsize=(13, 3.9))
    figure.subplots_adjust(left=0.01, right=0.99, top=0.92, bottom=0.1, wspace=0.03)
    titles = ("The attention that was computed", "Other attention, the same outputs")
    for axes, maps, title in zip(panels, (trace.attention, other.values), titles, strict=True):
        axes.imshow(_tiles(maps.double().sqrt()), cmap="Blues", vmin=0, vmax=0.8, interpolation="antialiased")
        axes.set_title(title, fontsize=11)
        axes.axis("off")
    figure.text(
        0.5, 0.005,
        f"{other.total_variation:.2f} of the attention of an average row was moved; the final states changed by "
        f"{checked.final_states:.1e}. Rows moved as far at random: {checked.control_final_states:.1e}.",
        ha="center", fontsize=9,
    )  # fmt: skip
    _save(figure, folder / "doppelganger.png")
    print("doppelganger", checked.sentence())


def _tiles(maps: torch.Tensor, gap: int = 5) -> torch.Tensor:
    """[layer, head, n, n] as one picture: a row of tiles per layer, with gaps left empty."""
    layers, heads, n, _ = maps.shape
    sheet = torch.full((layers * (n + gap) - gap, heads * (n + gap) - gap), torch.nan, dtype=maps.dtype)
    for i in range(layers):
        for j in range(heads):
            top, left = i * (n + gap), j * (n + gap)
            sheet[top : top + n, left : left + n] = maps[i, j]
    return sheet


def by_length(model: whence.Model, folder: Path) -> None:
    """Raw against effective attention, and the widths of the bounds, as the text grows."""
    lengths = (16, 24, 32, 40, 48, 64, 96, 128, 192, 256)
    rows = []
    for n in lengths:
        found = whence.identifiability(whence.trace(model, piece(model, n)))
        r = found.extra["head_r"]
        dimension = found.extra["simplex_null_dimension"].double().mean()
        rows.append(
            (n, *r[~r.isnan()].quantile(torch.tensor([0.25, 0.5, 0.75], dtype=r.dtype)).tolist(), float(dimension))
        )
    n, low, middle, high, free = zip(*rows, strict=True)
    figure, (one, two) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    one.axvline(33, color=GREY, linestyle=":", label="n = d_v + 1 = 33")
    one.plot(n, middle, marker="o", color=BLUE, label="median of 72 heads")
    one.fill_between(n, low, high, color=BLUE, alpha=0.15, linewidth=0, label="middle half")
    one.set(xlabel="tokens", ylabel="r, raw against effective", ylim=(0, 1.03))
    one.legend(fontsize=8, frameon=False)
    two.axvline(33, color=GREY, linestyle=":")
    two.plot(n, free, marker="o", color=ORANGE)
    two.set(xlabel="tokens", ylabel="free directions of a row")
    _save(figure, folder / "attention_by_length.svg")
    for row in rows:
        print("length", " ".join(f"{v:.3g}" for v in row))


def special_tokens(model: whence.Model, folder: Path) -> None:
    """Attention to special tokens and punctuation by layer, raw and effective."""
    frame = whence.identifiability(whence.trace(model, piece(model, 128))).by_token_type()
    kinds = [kind for kind in frame["type"].unique() if kind != "rest"]
    figure, panels = plt.subplots(1, len(kinds), figsize=(9, 2.9), layout="constrained", sharey=True)
    for axes, kind in zip(panels, kinds, strict=True):
        mine = frame[frame["type"] == kind]
        axes.plot(mine["layer"], mine["raw"], marker="o", color=BLUE, label="raw")
        axes.plot(mine["layer"], mine["effective"], marker="s", color=ORANGE, label="effective")
        axes.set(title=kind, xlabel="layer")
    panels[0].set(ylabel="share of attention")
    panels[0].legend(fontsize=8, frameon=False)
    _save(figure, folder / "attention_special_tokens.svg")


def intervals(model: whence.Model, folder: Path) -> None:
    """One row that must not be read and one that may, with exact intervals."""
    trace = whence.trace(model, SENTENCE)
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axes, place, colour in zip(panels, ((1, 5, "noon"), (0, 2, "they")), (ORANGE, BLUE), strict=True):
        whole = whence.certify(trace, *place, top=8)
        names = [f"{trace.tokens[int(k)]} ({int(k)})" for k in whole.keys]
        places = range(len(names))
        axes.hlines(places, whole.lower, whole.upper, color=colour, linewidth=5, alpha=0.55)
        axes.plot(whole.weights, places, "|", color="black", markersize=11, markeredgewidth=2)
        axes.set_yticks(places, names, fontsize=8)
        axes.invert_yaxis()
        axes.set(
            xlim=(-0.02, 1.02),
            xlabel="weight",
            title="layer {}, head {}, from ‘{}’".format(*place),
        )
        print("interval", whole.sentence(whole.widest))
    _save(figure, folder / "attention_intervals.svg")


def _save(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    print(path)


def main(arguments: list[str]) -> None:
    """Make all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "figures")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of the search for other attention")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    plt.rcParams.update(
        {"svg.hashsalt": "whence", "axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    )
    model = whence.load()
    doppelganger(model, options.folder, options.rounds)
    by_length(model, options.folder)
    special_tokens(model, options.folder)
    intervals(model, options.folder)


if __name__ == "__main__":
    main(sys.argv[1:])
