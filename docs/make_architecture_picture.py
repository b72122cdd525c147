"""The rooms of src/whence and who imports whom, drawn from the imports themselves: docs/figures/architecture.svg.

python docs/make_architecture_picture.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SAYS = {
    "core": "mathematics on tensors",
    "reading": "a model and a text → a trace, proved",
    "model": "loading, catalogue, memory",
    "results": "results, files, plots",
    "attention": "is it identifiable?",
    "tokens": "still itself?",
    "mixing": "where from?",
    "identifiable": "unique by design",
    "faithful": "which explanation?",
    "surveys": "a corpus",
    "reporting": "one analysis → report",
    "serving": "the page, live",
    "cli": "commands",
    "method_table": "every method, once",
    "rules": "decision rules",
    "bertviz": "drop-in views",
}


def arrows() -> list[str]:
    """Who imports whom, room by room: what the picture shows, and says in its description, which a test reads."""
    sys.path.insert(0, str(ROOT))
    from tests.house.imports import imports, room

    between = {(room(a), room(b)) for a, b in imports()}
    return sorted(f"{a} → {b}" for a, b in between if a != b and {a, b}.isdisjoint({"whence", "__main__", "errors"}))


def main() -> None:
    import matplotlib
    from matplotlib.figure import Figure

    sys.path.insert(0, str(ROOT))
    from tests.house.imports import LEVELS, modules, room

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "whence"
    rooms = {room(name) for name in modules()}
    rows = [[r for r in level if r in rooms and r != "errors"] for level in LEVELS]
    rows = [row for row in rows if row]
    figure = Figure(figsize=(10, 1.15 * len(rows) + 0.4))
    axes = figure.subplots()
    place = {}
    for y, row in enumerate(rows):
        for i, name in enumerate(row):
            place[name] = ((i + 0.5) * 10 / len(row), y)
    for a, b in (arrow.split(" → ") for arrow in arrows()):
        axes.annotate(
            "", place[b], place[a], arrowprops={"arrowstyle": "->", "color": "#8a94a6", "lw": 0.8, "shrinkA": 16}
        )
    for name, (x, y) in place.items():
        text = f"{name}\n{SAYS.get(name, '')}"
        axes.text(
            x, y, text, ha="center", va="center", fontsize=8,
            bbox={"boxstyle": "round,pad=0.45", "facecolor": "#eef3fa", "edgecolor": "#2f7dbd"},
        )  # fmt: skip
    axes.set(xlim=(0, 10), ylim=(-0.6, len(rows) - 0.4))
    axes.axis("off")
    figure.savefig(
        ROOT / "docs" / "figures" / "architecture.svg",
        metadata={"Date": None, "Description": "; ".join(arrows())},
        bbox_inches="tight",
    )


if __name__ == "__main__":
    main()
