"""Attention calls whose weights are never whole: the model's own fused attention, or its eager one a block of rows at a time.

Rows are made again when they are asked for (`whence.reading.attention_rows`), so that a pass on a long text holds queries, keys,
values and head outputs, and no n × n weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from whence.reading.attention_rows import BLOCK, rows_at_a_time
from whence.reading.capture.recorder import MASKED, AttentionRecorder, Call

Eager = Callable[..., tuple[Any, Any, Tensor | None]]
"""An eager attention function that is overheard: output, weights, and the sink's weight where the model has one."""


def mask_parts(recorder: AttentionRecorder, mask: Tensor | None, n_key: int) -> tuple[Tensor | None, Tensor | None]:
    """(visible, bias) of a mask: where it is not a closed door, and what else it adds to the scores. Once for each mask."""
    if not isinstance(mask, Tensor):
        return None, None

    def split() -> tuple[Tensor, Tensor | None]:
        part = mask[..., :n_key]
        if part.dtype == torch.bool:
            return part, None
        visible = part > MASKED
        return visible, part if bool(((part != 0) & visible).any()) else None

    parts: tuple[Tensor, Tensor | None] = recorder.shared((id(mask), n_key), mask, split)
    return parts


def added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of two tensors, either of which may be absent."""
    if one is None or other is None:
        return one if other is None else other
    return one + other


def prefixes(recorder: AttentionRecorder, n_query: int, n_key: int, device: torch.device) -> Tensor:
    """(query, key): each query sees the keys up to its own place. One tensor for all layers."""
    mask: Tensor = recorder.shared(
        ("prefixes", n_query, n_key, device),
        None,
        lambda: torch.ones(n_query, n_key, dtype=torch.bool, device=device).tril_(),
    )
    return mask


def sdpa_call(
    recorder: AttentionRecorder,
    function: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Call]:
    """The model's own `sdpa` attention, and what was seen of it: everything but the weights."""
    recorder.busy = True
    try:
        output, _ = function(module, query, key, value, mask, **kwargs)
    finally:
        recorder.busy = False
    visible, bias = mask_parts(recorder, mask, key.shape[2])
    asked = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if asked is None else asked
    if mask is None and causal and query.shape[2] > 1:  # as transformers' own function decides it
        visible = prefixes(recorder, query.shape[2], key.shape[2], query.device)
    return output, _call(query, key, value, output, visible, bias, kwargs, None)


def eager_call(
    eager: Eager,
    recorder: AttentionRecorder,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Call] | None:
    """The model's own eager attention on blocks of queries; None where it is short, or has more to cut than is known."""
    heads, n_query, n_key = query.shape[1], query.shape[2], key.shape[2]
    rows = rows_at_a_time(query.shape[0] * heads, n_key, recorder.block or BLOCK)
    known = ("position_bias",)
    others = [v for name, v in kwargs.items() if isinstance(v, Tensor) and name not in known]
    if rows >= n_query or any(t.dim() > 1 and t.shape[-2] == n_query for t in others):
        return None

    def rows_of(t: Any, at: slice) -> Any:
        return t[..., at, :] if isinstance(t, Tensor) and t.shape[-2] == n_query else t

    outputs, sinks = [], []
    for first in range(0, n_query, rows):
        at = slice(first, min(first + rows, n_query))
        own = {name: rows_of(v, at) if name in known else v for name, v in kwargs.items()}
        recorder.busy = True
        try:
            output, _, sink = eager(module, query[:, :, at], key, value, rows_of(mask, at), **own)
        finally:
            recorder.busy = False
        outputs.append(output)
        sinks.append(sink)
    axis = 1 if outputs[0].dim() == 4 else -2
    output = torch.cat(outputs, dim=axis)
    held = [sink for sink in sinks if sink is not None]
    sink = torch.cat(held, dim=-1) if len(held) == len(sinks) else None
    visible, bias = mask_parts(recorder, mask, n_key)
    return output, _call(query, key, value, output, visible, bias, kwargs, sink)


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    visible: Tensor | None,
    bias: Tensor | None,
    kwargs: dict[str, Any],
    sink: Tensor | None,
) -> Call:
    scale, cap, position = kwargs.get("scaling"), kwargs.get("softcap"), kwargs.get("position_bias")
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return Call(
        query=query,
        key=key,
        value=value,
        weights=query.new_empty(0),
        output=output.transpose(1, 2) if output.dim() == 4 else output,
        visible=visible,
        scale=None if cap is not None else factor,
        bias=added(position if isinstance(position, Tensor) else None, bias),
        node=output,
        cap=None if cap is None else (float(factor), float(cap)),
        sink=sink,
        fused=True,
    )
