"""An alignment as a figure: the matrix, the path, and where attention with the same outputs would have put the words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whence.results.plotting import SEQUENTIAL, new_axes

if TYPE_CHECKING:
    from whence.attention.align import Alignment


def plot_alignment(alignment: Alignment, ax: Any = None) -> Any:
    """Words by time: the path, the earliest and the latest alignment found (triangles), the proved range of the plain path."""
    names = alignment.names
    axes = new_axes((7.2, 1.4 + 0.24 * len(names))) if ax is None else ax
    matrix = alignment.matrix[list(alignment.starts[:-1])].numpy()
    end = alignment.keys * alignment.unit
    axes.imshow(matrix, aspect="auto", cmap=SEQUENTIAL, extent=(0.0, end, len(names) - 0.5, -0.5), vmin=0.0)
    for i in range(len(names)):
        low, high = (float(t[i]) * alignment.unit for t in (alignment.earliest, alignment.latest))
        if int(alignment.latest[i] - alignment.earliest[i]) < alignment.keys - 1:
            axes.plot([low, high], [i + 0.28, i + 0.28], color="#5a8f29", linewidth=2.2, solid_capstyle="butt")
        early, late = (float(t[i]) * alignment.unit for t in (alignment.early, alignment.late))
        axes.plot([early, late], [i, i], color="#d95f02", linewidth=1.2)
        axes.plot([early], [i], "<", color="#d95f02", markersize=5)
        axes.plot([late], [i], ">", color="#d95f02", markersize=5)
    axes.step(alignment.times.numpy(), range(len(names)), where="post", color="#1f6fb4", marker="o", markersize=4)
    axes.set_yticks(range(len(names)), [n.replace("$", r"\$") for n in names], fontsize=8)
    axes.set_xlabel("seconds" if alignment.unit != 1.0 else "key")
    axes.set_title(
        "path (blue), alternatives with the same outputs (orange), proved range of the plain path (green)", fontsize=9
    )
    return axes
