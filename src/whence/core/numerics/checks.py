"""What every measure of the core asks of its tensors, with errors that quote the input."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from whence.core.numerics.masks import full_mask
from whence.core.numerics.tolerances import EXTREME, STRAY_MASS, row_sum_slack
from whence.errors import InputError

Constraint = Literal["output", "simplex"]
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_SMALL_HEAD = 4096


def shape(tensor: Tensor) -> tuple[int, ...]:
    """A tensor's shape, as a plain tuple for messages."""
    return tuple(tensor.shape)


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """torch.broadcast_shapes, typed."""
    return tuple(torch.broadcast_shapes(*shapes))


def check_tensor(name: str, given: object, expected: str) -> None:
    """Refuse arrays and lists with a sentence; type checkers see the annotation, notebooks do not."""
    if not isinstance(given, Tensor):
        raise InputError(f"{name} is {type(given).__name__}; give a torch tensor {expected}.")
    if given.dtype not in _DTYPES:
        raise InputError(
            f"{name} is {given.dtype}; give a floating-point tensor {expected}: float16, bfloat16, float32 or float64."
        )
    if given.layout != torch.strided or given.device.type != "cpu":
        kind = given.layout if given.layout != torch.strided else f"on {given.device}"
        raise InputError(
            f"{name} is {kind}; give a dense tensor {expected} on the CPU (tensor.to_dense(), tensor.cpu())."
        )


def check_constraint(constraint: str) -> None:
    """Refuse what is not one of the two constraints."""
    if constraint not in ("output", "simplex"):
        raise InputError(
            f"constraint={constraint!r} is unknown; use 'output' (same head output, the paper's) or "
            "'simplex' (same head output and the same row sum)."
        )


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse NaN and infinity, counted."""
    # A sum is one pass without a temporary; NaN and infinity survive it. It may overflow on finite input, so only the
    # exact test may refuse.
    if not bool(torch.isfinite(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise InputError(
            f"{name} of shape {shape(tensor)} holds {bad} NaN or infinite entries; remove fully masked rows "
            "or padding before the analysis, or run the model in float32."
        )


def check_values(values: Tensor, *, name: str = "values") -> None:
    """Refuse values that are not finite (…, n_key, d_v)."""
    check_tensor(name, values, "(…, n_key, d_v)")
    if values.ndim < 2 or values.shape[-1] == 0 or values.shape[-2] == 0:
        raise InputError(f"{name} has shape {shape(values)}; expected (…, n_key, d_v) with at least one key.")
    check_finite(name, values)


def check_visible(visible: Tensor, n_query: int | None, n_key: int) -> None:
    """Refuse a mask that is not boolean or does not fit."""
    kind = getattr(visible, "dtype", type(visible).__name__)
    if kind != torch.bool:
        raise InputError(
            f"visible is {kind}; give a boolean tensor, True where the row may look (additive mask: mask == 0)."
        )
    want = f"(…, {'n_query' if n_query is None else n_query}, {n_key})"
    if visible.ndim < 1 or visible.shape[-1] not in (1, n_key):
        raise InputError(f"visible has shape {shape(visible)}; expected a shape broadcastable to {want}.")
    if n_query is not None and visible.ndim > 1 and visible.shape[-2] not in (1, n_query):
        raise InputError(f"visible has shape {shape(visible)}; expected a shape broadcastable to {want}.")


def check_rows(values: Tensor, visible: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """A mask over the keys of values as (…, n_query, n_key), and the batch shape of both."""
    n = values.shape[-2]
    check_visible(visible, None, n)
    if visible.ndim < 2:
        raise InputError(f"visible has shape {shape(visible)}; expected (…, n_query, {n}): add a query dimension.")
    mask = full_mask(visible, visible.shape[-2], n)
    try:
        return mask, broadcast(values.shape[:-2], mask.shape[:-2])
    except RuntimeError:
        raise InputError(f"visible {shape(visible)} does not broadcast against values {shape(values)}.") from None


def check_pair(attention: Tensor, values: Tensor, visible: Tensor | None, *, finite: bool = True) -> tuple[int, ...]:
    """Check the three tensors together; the broadcast batch shape is returned.

    finite=False leaves the attention's NaN test, a full pass over the largest tensor, to the caller.
    """
    check_tensor("attention", attention, "(…, n_query, n_key)")
    check_values(values)
    if attention.ndim < 2 or attention.shape[-2] == 0:
        raise InputError(f"attention has shape {shape(attention)}; expected (…, n_query, n_key).")
    if attention.shape[-1] != values.shape[-2]:
        raise InputError(
            f"attention {shape(attention)} has {attention.shape[-1]} keys but values {shape(values)} has "
            f"{values.shape[-2]}; expected (…, n_query, n_key) and (…, n_key, d_v)."
        )
    if finite:
        check_finite("attention", attention)
    batches = [attention.shape[:-2], values.shape[:-2]]
    if visible is not None:
        check_visible(visible, attention.shape[-2], attention.shape[-1])
        batches.append(visible.shape[:-2])
    try:
        return broadcast(*batches)
    except RuntimeError:
        raise InputError(
            f"the leading dimensions of attention {shape(attention)}, values {shape(values)}"
            + ("" if visible is None else f" and visible {shape(visible)}")
            + " do not broadcast; for grouped-query attention reshape to attention.unflatten(-3, (kv_heads, -1)) "
            "and values.unsqueeze(-3)."
        ) from None


def check_stray(attention: Tensor, visible: Tensor) -> None:
    """Refuse a mask that is not this attention's; fully masked rows (uniform by convention) are exempt."""
    whole = broadcast(attention.shape, visible.shape)
    rows = attention.detach().expand(whole)
    skip = (visible | ~visible.any(-1, keepdim=True)).expand(whole)
    # Head by head the temporary stays in cache, and the test costs one read of the attention; small heads at once.
    parts = np.ndindex(whole[:-2]) if math.prod(whole[-2:]) > _SMALL_HEAD else [()]
    if not rows.numel():
        return
    worst = max(float(rows[i].masked_fill(skip[i], 0.0).abs_().sum(-1, dtype=torch.float32).max()) for i in parts)
    if worst > STRAY_MASS:
        raise InputError(
            f"a row of attention {shape(attention)} puts mass {worst:.3g} on keys that visible {shape(visible)} "
            "hides; check that the mask is this attention's and neither inverted nor transposed."
        )


def check_size(values: Tensor) -> None:
    """Refuse values whose squares float64 cannot hold."""
    largest = float(values.detach().abs().max())
    if largest and not 1 / EXTREME <= largest <= EXTREME:
        raise InputError(
            f"values {shape(values)} are of size {largest:.3g}, whose square float64 cannot hold: multiply them by a "
            "constant first (no interval depends on it)."
        )


def as_rows(attention: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """The rows of one head as `as_row` gives them, (n_query, n_key) float64; rows that see nothing are 0."""
    check_size(values)
    check_stray(attention, visible)
    rows = attention.detach().to(torch.float64).masked_fill(~visible, 0.0)
    total, some = rows.sum(-1, keepdim=True), visible.any(-1)
    off = ((total.squeeze(-1) - 1).abs() > row_sum_slack(attention.dtype)) & some
    if bool((rows < 0).any()) or bool(off.any()):
        raise InputError(
            f"attention {shape(attention)} has rows that are no attention rows: smallest entry {float(rows.min()):.3g}, "
            f"sums {float(total[some].min()):.6g} to {float(total[some].max()):.6g}; expected entries >= 0 that sum to 1 "
            "(where an attention sink takes mass, append it as a key with value 0)."
        )
    return torch.where(some.unsqueeze(-1), rows / total, 0.0)


def as_row(attention_row: Tensor, values: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """One attention row, float64 and summing to exactly 1, its float64 values and the visible keys.

    A float32 softmax row sums to 1 ± 6e-8. The polytope {x ≥ 0, 1ᵀx = 1, xᵀV = aᵀV} is empty unless a itself
    sums to 1, so the row is divided by its sum once, here.
    """
    check_values(values)
    check_tensor("attention_row", attention_row, "(n_key,)")
    if attention_row.ndim != 1 or values.ndim != 2:
        raise InputError(
            f"attention_row {shape(attention_row)} and values {shape(values)}: expected one row (n_key,) and the "
            "values of its head (n_key, d_v); index the layer, head and query first."
        )
    n = values.shape[0]
    if attention_row.shape[0] != n:
        raise InputError(f"attention_row has {attention_row.shape[0]} keys but values {shape(values)} has {n}.")
    check_finite("attention_row", attention_row)
    check_size(values)
    seen = torch.ones(n, dtype=torch.bool)
    if visible is not None:
        check_visible(visible, None, n)
        if visible.ndim != 1:
            raise InputError(f"visible has shape {shape(visible)}; one row wants ({n},).")
        seen = visible.expand(n).clone()
        if not bool(seen.any()):
            raise InputError("no key is visible to this row; a fully masked row has nothing to analyse: drop it.")
        check_stray(attention_row.unsqueeze(0), seen.unsqueeze(0))
    row = attention_row.detach().to(torch.float64).masked_fill(~seen, 0.0)
    slack = row_sum_slack(attention_row.dtype)
    total, least = float(row.sum()), float(row.min())
    if least < 0 or abs(total - 1) > slack:
        raise InputError(
            f"attention_row is not an attention row: smallest entry {least:.3g}, sum {total:.6g}; expected entries "
            ">= 0 that sum to 1 (where an attention sink takes mass, append it as a key with value 0)."
        )
    return row / total, values.detach().to(torch.float64), seen
