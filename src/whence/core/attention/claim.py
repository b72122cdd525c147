"""What is claimed of an attention row: an inequality that is linear in it. methods 1.4."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whence.core.numerics.arrays import Array
from whence.core.numerics.tolerances import BREACH


@dataclass(frozen=True)
class Claim:
    """cᵀx > threshold; or, with `rivals`, cᵀx − x_j > threshold for every j among them.

    costs (n_key,). strict: False where equality also satisfies the claim ("at least half").
    """

    costs: Tensor
    threshold: float = 0.0
    rivals: tuple[int, ...] = ()
    strict: bool = True


def distance(claim: Claim, row: Array) -> float:
    """By how much a (summed) row satisfies a claim; below 0 where it breaks it."""
    value = float(claim.costs.to(torch.float64).numpy() @ row)
    rival = float(row[list(claim.rivals)].max()) if claim.rivals else 0.0
    return value - rival - claim.threshold


def breaks(claim: Claim, row: Array) -> bool:
    """Whether the row certainly decides otherwise: by more than what a solver leaves undecided."""
    costs = claim.costs
    size = max(float(costs.max() - costs.min()), 1.0 if claim.rivals else 0.0, abs(claim.threshold))
    return distance(claim, row) < -BREACH * size
