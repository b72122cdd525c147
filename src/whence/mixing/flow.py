"""Attention flow: how much could pass from an input to a hidden token, if attention were the width of pipes?

Abnar & Zuidema, "Quantifying Attention Flow in Transformers" (ACL 2020): the maximum flow in the graph whose nodes are
(layer, token) and whose capacities are C = ½ A + ½ I.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence

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

LONG = 60.0
"""Seconds beyond which flow says what it costs before it starts."""

_UNITS = 1 << 29  # capacities are whole numbers to the solver: 1.0 is this many


def flow(
    trace: Trace, *, layers: Sequence[int] | None = None, attention: str | None = None, progress: Progress = False
) -> Contributions:
    """Attention flow from the embeddings, rows divided by their sums.

    n² maximum flows per layer: `layers` limits it to those that are wanted. Where that takes more than a minute, a
    warning says so before it starts, from the time that a few of them take.
    """
    trace.follow("attention flow")
    stack = single(trace, attention, "flow")
    capacities = torch.stack([half_residual(LayerView(layer, trace, stack.name).attention) for layer in stack])
    chosen = [layer.index for layer in stack] if layers is None else [stack[i].index for i in layers]
    _say_cost(capacities, chosen)
    with counted("attention flow", len(chosen) * len(stack.tokens), progress) as step:
        values = maximum_flows(capacities, chosen, step)
    values = values / values.sum(-1, keepdim=True)
    provenance = trace.provenance.by("flow", attention=stack.name, origin=EMBEDDINGS)
    return Contributions.of_stack(stack, values, provenance, layers=tuple(chosen))


def _say_cost(capacities: Tensor, layers: Sequence[int]) -> None:
    """Warn where all flows to the chosen layers would take more than `LONG` seconds: a few of each layer are timed."""
    n = capacities.shape[-1]
    expected = 0.0
    for layer in layers:
        begin = time.perf_counter()
        some = _flows_to(_whole_numbers(capacities[: layer + 1]), n // 2, range(0, n, -(-n // 3)))
        expected += (time.perf_counter() - begin) / max(len(some), 1) * n * n
    if expected > LONG:
        warnings.warn(
            f"attention flow of {n} tokens to {len(layers)} layers is {n * n * len(layers):,} maximum flows, about "
            f"{expected / 60:.0f} minutes on this machine; layers=[{layers[-1]}] is one layer of them.",
            stacklevel=3,
        )


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
    widths = _whole_numbers(capacities)
    out = torch.zeros(len(chosen), n, n, dtype=capacities.dtype, device=capacities.device)
    for place, layer in enumerate(chosen):
        for i in range(n):
            for j, flow_value in _flows_to(widths[: layer + 1], i, range(n)).items():
                out[place, i, j] = flow_value
            if progress is not None:
                progress()
    return out


def _whole_numbers(capacities: Tensor) -> np.ndarray:
    return (capacities.detach().cpu().to(torch.float64) * _UNITS).round().to(torch.int32).numpy()


def _flows_to(widths: np.ndarray, sink: int, sources: Iterable[int]) -> dict[int, float]:
    """The maximum flow to token `sink` above all of widths (layer, token, token) from those sources that reach it."""
    depth, n, _ = widths.shape
    rows, cols, data = _edges(widths, sink)
    graph = csr_array((data, (rows, cols)), shape=((depth + 1) * n, (depth + 1) * n))
    graph.sum_duplicates()
    reached = set(rows[rows < n].tolist())
    return {j: maximum_flow(graph, j, depth * n + sink).flow_value / _UNITS for j in sources if j in reached}


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
