"""Certified bounds on ALTI's and the norms' contributions of one row, over every attention with the same head outputs.

Given the outputs, the weights x_h that different heads put on key j are independent, each in its proved interval [lo, hi].
With t_h = U^h_j / σ_i, ALTI's c_ij = ‖y_i‖₁ − ‖y_i − Σ_h x_h t_h − δ_ij ρ_i‖₁ is concave in x: its minimum over the box is
at a corner (2^H of them; coordinate-wise sums for more than 12 heads), and coordinate-wise sums bound its maximum. The norm
‖Σ_h x_h t_h + δ_ij ρ_i‖₂ is convex: its maximum is at a corner, its minimum a small least-squares problem. Shares lie between
lo_j/(lo_j + Σ_{k≠j} hi_k) and hi_j/(hi_j + Σ_{k≠j} lo_k).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from scipy.optimize import lsq_linear

from whence.attention.heads import row_of
from whence.core.attention.head_certificate import certify_head
from whence.core.numerics.arrays import AnyArray
from whence.core.numerics.tolerances import OWN_ROW
from whence.errors import InputError
from whence.mixing.decomposition import decompose
from whence.reading.trace import Trace

MOST_CORNERS = 12  # heads: 4,096 corners for each key


@dataclass(frozen=True)
class RowBounds:
    """One row: contributions as computed, and where they lie in every attention with the same outputs, by source token."""

    layer: int
    token: int
    tokens: tuple[str, ...]
    alti: AnyArray
    alti_low: AnyArray
    alti_high: AnyArray
    norms: AnyArray
    norms_low: AnyArray
    norms_high: AnyArray

    def shares(self, method: str = "alti") -> tuple[AnyArray, AnyArray]:
        """The lowest and highest share of each source."""
        low, high = (np.maximum(getattr(self, f"{method}_{end}"), 0.0) for end in ("low", "high"))
        others_high, others_low = high.sum() - high, low.sum() - low
        with np.errstate(invalid="ignore", divide="ignore"):
            least, most = low / (low + others_high), high / (high + others_low)
        return np.nan_to_num(least, nan=0.0), np.nan_to_num(most, nan=1.0)

    def own_is_largest(self, method: str = "alti") -> bool:
        """Whether the token's own part is certainly the largest."""
        low, high = getattr(self, f"{method}_low"), getattr(self, f"{method}_high")
        return bool(low[self.token] > np.delete(high, self.token).max(initial=-np.inf))

    def largest_other(self, method: str = "alti") -> tuple[int, bool]:
        """The largest contributor besides the token itself, and whether it is so in every attention."""
        values, low, high = (getattr(self, name) for name in (method, f"{method}_low", f"{method}_high"))
        others = np.delete(np.arange(len(values)), self.token)
        best = int(others[np.argmax(values[others])])
        rest = np.delete(high, [self.token, best])
        return best, bool(low[best] > rest.max(initial=-np.inf))

    def sentence(self) -> str:
        """Whether the largest other contributor is certain."""
        best, certain = self.largest_other()
        least, most = self.shares()
        own = "certainly" if self.own_is_largest() else "not certainly"
        return (
            f"Layer {self.layer}, {self.tokens[self.token]!r}: its own part is {own} the largest; the largest other, "
            f"{self.tokens[best]!r}, {'is certain' if certain else 'is not certain'} (its share lies in [{least[best]:.2f}, "
            f"{most[best]:.2f}])."
        )

    def to_dict(self) -> dict[str, Any]:
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(self).items()} | {
            "sentence": self.sentence()
        }


def contribution_bounds(trace: Trace, layer: int, token: int, *, attention: str | None = None) -> RowBounds:
    """Bounds on every source's contribution to one state, each weight's interval solved exactly for this row."""
    stack = trace.of(attention)
    at = next((la for la in stack if la.index == layer), None)
    if at is None or not 0 <= token < len(stack.tokens):
        raise InputError(
            f"layer {layer}, token {token}: there are layers {[la.index for la in stack]}, {len(stack.tokens)} tokens."
        )
    parts = decompose(at)
    heads, _, n = parts.attention.shape
    low, high = np.zeros((heads, n)), np.zeros((heads, n))
    for head in range(heads):
        row, values, visible = row_of(at, head, token)
        if len(row) != n:
            raise InputError("a layer with a learned sink: its contributions are not bounded.")
        proved = certify_head(row[None], values, rows=1, visible=None if visible is None else visible[None])
        total = float(row.sum())
        low[head], high[head] = total * proved.lower[0].numpy(), total * proved.upper[0].numpy()
    scale = 1.0 if parts.scale is None else float(parts.scale[token, 0])
    sources = parts.sources.detach().double().numpy() * scale  # (head, key, d)
    weights = parts.attention[:, token].detach().double().numpy()
    y, own = (t[token].detach().double().numpy() for t in (parts.state, parts.own))
    low, high = np.minimum(np.maximum(low, 0.0), weights), np.maximum(high, weights)
    corners = np.array(list(product((0, 1), repeat=heads)), dtype=bool) if heads <= MOST_CORNERS else None
    columns = [
        _column(y, own * (j == token), sources[:, j], weights[:, j], low[:, j], high[:, j], corners) for j in range(n)
    ]
    return RowBounds(layer, token, tuple(stack.key_tokens), *np.array(columns).T)


def _column(
    y: AnyArray, own: AnyArray, t: AnyArray, x: AnyArray, low: AnyArray, high: AnyArray, corners: AnyArray | None
) -> tuple[float, ...]:
    """(ALTI, its lower and upper bound, norm, its lower and upper bound) of one source; t (head, d)."""
    whole = np.abs(y).sum()
    part = x @ t + own
    alti, norm = whole - np.abs(y - part).sum(), float(np.linalg.norm(part))
    down = own + np.where(t > 0, low[:, None] * t, high[:, None] * t).sum(0)
    up = own + np.where(t > 0, high[:, None] * t, low[:, None] * t).sum(0)
    # Coordinate by coordinate: the part lies in [down, up].
    nearest = np.maximum(0.0, np.maximum(down - y, y - up)).sum()
    if corners is None:
        farthest = np.maximum(np.abs(y - down), np.abs(y - up)).sum()
        longest = float(np.linalg.norm(np.maximum(np.abs(down), np.abs(up))))
    else:
        at = np.where(corners, high, low) @ t + own
        farthest, longest = np.abs(y - at).sum(1).max(), float(np.linalg.norm(at, axis=1).max())
    free = high - low > OWN_ROW
    shortest = norm
    if free.any():
        fixed = own + x[~free] @ t[~free]
        solved = lsq_linear(t[free].T, -fixed, bounds=(low[free], high[free]), tol=1e-12)
        # What the solver reached is a point of the box; the dual gap below it is taken off.
        residual = t[free].T @ solved.x + fixed
        gradient = t[free] @ residual
        gap = float(np.where(gradient > 0, gradient * (solved.x - low[free]), gradient * (solved.x - high[free])).sum())
        shortest = float(np.sqrt(max(0.0, residual @ residual - 2 * max(0.0, gap))))
    return alti, whole - farthest, whole - nearest, norm, min(norm, shortest), max(norm, longest)
