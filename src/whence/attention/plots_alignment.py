"""An alignment as a figure: the matrix, the path, and where attention with the same outputs would have put the words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whence.results.plotting import SEQUENTIAL, new_axes

if TYPE_CHECKING:
    from whence.attention.align import Alignment


def plot_alignment(alignment: Alignment, ax: Any = None) -> Any:
    """Words by time; the line is the path, the triangles the earliest and the latest time found for each word."""
    names = alignment.names
    axes = new_axes((7.2, 1.4 + 0.24 * len(names))) if ax is None else ax
    matrix = alignment.matrix[list(alignment.starts[:-1])].numpy()
    end = alignment.keys * alignment.unit
    axes.imshow(matrix, aspect="auto", cmap=SEQUENTIAL, extent=(0.0, end, len(names) - 0.5, -0.5), vmin=0.0)
    for i in range(len(names)):
        early, late = (float(t[i]) * alignment.unit for t in (alignment.early, alignment.late))
        axes.plot([early, late], [i, i], color="#d95f02", linewidth=1.2)
        axes.plot([early], [i], "<", color="#d95f02", markersize=5)
        axes.plot([late], [i], ">", color="#d95f02", markersize=5)
    axes.step(alignment.times.numpy(), range(len(names)), where="post", color="#1f6fb4", marker="o", markersize=4)
    axes.set_yticks(range(len(names)), [n.replace("$", r"\$") for n in names], fontsize=8)
    axes.set_xlabel("seconds" if alignment.unit != 1.0 else "key")
    axes.set_title("path (blue), and times of the same words with the same outputs (orange)", fontsize=9)
    return axes
