"""Attention flow: how much could pass from an input to a hidden token, if attention were the width of pipes?

Abnar & Zuidema, "Quantifying Attention Flow in Transformers" (ACL 2020): the maximum flow in the graph whose nodes are
(layer, token) and whose capacities are C = ½ A + ½ I.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow
from torch import Tensor

from whence.mixing.contributions import EMBEDDINGS, Contributions
from whence.mixing.layerwise import LayerView, single
from whence.mixing.rollout import half_residual
from whence.reading.trace import Trace
from whence.results.progress import Progress, counted

_UNITS = 1 << 29  # capacities are whole numbers to the solver: 1.0 is this many


def flow(
    trace: Trace, *, layers: Sequence[int] | None = None, attention: str | None = None, progress: Progress = False
) -> Contributions:
    """Attention flow from the embeddings, rows divided by their sums.

    n² maximum flows per layer: `layers` limits it to those that are wanted.
    """
    trace.follow("attention flow")
    stack = single(trace, attention, "flow")
    capacities = torch.stack([half_residual(LayerView(layer, trace, stack.name).attention) for layer in stack])
    chosen = [layer.index for layer in stack] if layers is None else [stack[i].index for i in layers]
    with counted("attention flow", len(chosen) * len(stack.tokens), progress) as step:
        values = maximum_flows(capacities, chosen, step)
    values = values / values.sum(-1, keepdim=True)
    provenance = trace.provenance.by("flow", attention=stack.name, origin=EMBEDDINGS)
    return Contributions.of_stack(stack, values, provenance, layers=tuple(chosen))


def maximum_flows(
    capacities: Tensor, layers: Sequence[int] | None = None, progress: Callable[[], None] | None = None
) -> Tensor:
    """Maximum flow from every input to every token of each chosen layer's output.

    capacities: (layer, token, token), non-negative, [l, i, j] the width of the pipe from j below to i above.
    Returns (chosen layer, token, input). Capacities are rounded to 2⁻²⁹, so that flows are exact to about n·1e-9.

    >>> half = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    >>> maximum_flows(torch.stack([half, half]))[-1]
    tensor([[0.5000, 1.0000],
            [0.0000, 1.0000]])
    """
    depth, n, _ = capacities.shape
    chosen = list(range(depth)) if layers is None else list(layers)
    widths = (capacities.detach().cpu().to(torch.float64) * _UNITS).round().to(torch.int32).numpy()
    out = torch.zeros(len(chosen), n, n, dtype=capacities.dtype, device=capacities.device)
    for place, layer in enumerate(chosen):
        for i in range(n):
            rows, cols, data = _edges(widths[: layer + 1], i)
            nodes = (layer + 2) * n
            graph = csr_array((data, (rows, cols)), shape=(nodes, nodes))
            graph.sum_duplicates()
            reached = np.unique(rows[rows < n])
            for j in reached:
                value = maximum_flow(graph, int(j), (layer + 1) * n + i).flow_value
                out[place, i, int(j)] = value / _UNITS
            if progress is not None:
                progress()
    return out


def _edges(widths: np.ndarray, sink: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pipes that lie on some way up to `sink`: the others carry nothing and only cost time."""
    depth, n, _ = widths.shape
    rows, cols, data = [], [], []
    above = np.zeros(n, dtype=bool)
    above[sink] = True
    for layer in range(depth - 1, -1, -1):
        used = (widths[layer] > 0) & above[:, None]
        upper, lower = np.nonzero(used)
        rows.append(lower + layer * n)
        cols.append(upper + (layer + 1) * n)
        data.append(widths[layer][upper, lower])
        above = used.any(axis=0)
    return (np.concatenate(rows).astype(np.int32), np.concatenate(cols).astype(np.int32), np.concatenate(data))
