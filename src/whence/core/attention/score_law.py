"""Is a head's score linear in its query? Shown by two texts of one length that share nothing but their positions.

If log a_ij = s·q_i·k_j + B_ij + c_i with a B that the texts do not change, then the difference of the two log rows is
s times the difference of q_i·k_j, up to a constant per row. A bias that depends on the query (DeBERTa) leaves a rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whence.core.numerics.tolerances import SMALLEST_WEIGHT


@dataclass(frozen=True)
class ScoreLaw:
    """scale: the s that fits best (or that was given). residual: the share of the log-weights' change that s·q·k does
    not explain. sink: the same for the sink's logit, which must not change at all; None: there is no sink.
    biased: the share of log a − s·q·k within its rows that is a bias (0: no position bias)."""

    scale: float
    residual: float
    sink: float | None
    biased: float


def score_law(
    weights: tuple[Tensor, Tensor],
    products: tuple[Tensor, Tensor],
    scale: float | None = None,
    sinks: tuple[Tensor, Tensor] | None = None,
) -> ScoreLaw:
    """From two texts: weights and q·k (head, query, key), sinks (head, query).

    >>> _ = torch.manual_seed(0)
    >>> products = torch.randn(1, 6, 6), torch.randn(1, 6, 6)
    >>> bias = torch.randn(1, 6, 6)
    >>> law = score_law(tuple((0.5 * p + bias).softmax(-1) for p in products), products)
    >>> round(law.scale, 4), law.residual < 1e-5
    (0.5, True)
    """
    one, two = (w.detach().double() for w in weights)
    seen = (one > SMALLEST_WEIGHT) & (two > SMALLEST_WEIGHT)
    logs = (one.clamp_min(SMALLEST_WEIGHT).log(), two.clamp_min(SMALLEST_WEIGHT).log())
    raw = tuple(p.detach().double() for p in products)
    change, moved = _centred(logs[0] - logs[1], seen), _centred(raw[0] - raw[1], seen)
    fitted = float((change * moved).sum() / moved.square().sum().clamp_min(1e-300)) if scale is None else scale
    rest = change - fitted * moved
    size = torch.linalg.vector_norm(change).clamp_min(1e-300)
    sink: float | None = None
    if sinks is not None:
        count = seen.sum(-1).clamp_min(1)
        level = ((logs[0] - logs[1] - fitted * (raw[0] - raw[1])) * seen).sum(-1) / count  # c_i of one less the other's
        shift = sinks[0].double().log() - sinks[1].double().log() - level
        sink = float((shift.abs() * (seen.sum(-1) > 0)).max())
    own = _centred(logs[0], seen)
    left = _centred(logs[0] - fitted * raw[0], seen)
    biased = float(torch.linalg.vector_norm(left) / torch.linalg.vector_norm(own).clamp_min(1e-300))
    return ScoreLaw(fitted, float(torch.linalg.vector_norm(rest) / size), sink, biased)


def _centred(x: Tensor, visible: Tensor) -> Tensor:
    """Rows less their mean over the keys that are seen, 0 elsewhere."""
    mean = (x * visible).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp_min(1)
    return (x - mean) * visible
