"""The best and the worst that any order of the units can reach, F⁺ and F⁻, for one text.

Exact by a dynamic programme over the 2^N sets (Edin et al. 2024 walk the N! orders):

    B(S) = g(S) + max_{u ∈ S} B(S ∖ u),   g(S) = v(∅) − v(S),   g(all) = 0,   F⁺ = B(all)/(N − 1)

and F⁻ the same with min. Beyond `EXACT` units a beam search gives a bound: F⁺ is *at least*, F⁻ *at most* what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whence.core.numerics.tolerances import OWN_ROW

EXACT = 12
BEAM = 5

Outputs = Callable[[Sequence[int]], np.ndarray[Any, Any]]
"""The outputs for a list of sets of removed units, in its order."""


@dataclass(frozen=True)
class Ceiling:
    """F⁺ and F⁻; `kind` is "exact" or "beam" (then F⁺ is at least this, F⁻ at most)."""

    best: float
    worst: float
    kind: str

    def normalise(self, area: float) -> float | None:
        """NAOPC = (F − F⁻)/(F⁺ − F⁻); None where every order is as good as any other."""
        span = self.best - self.worst
        return (area - self.worst) / span if span > OWN_ROW else None


def exact_ceiling(n: int, outputs: Outputs) -> Ceiling:
    """Over all N! orders, from the outputs of all 2^N sets."""
    v = outputs(range(1 << n))
    g = v[0] - v
    g[-1] = 0.0
    best, worst = np.zeros(1 << n), np.zeros(1 << n)
    sets = np.arange(1 << n)
    sizes = np.array([int(s).bit_count() for s in sets])
    for size in range(1, n + 1):
        layer = sets[sizes == size]
        has = (layer[:, None] >> np.arange(n)) & 1 == 1
        without = layer[:, None] & ~(1 << np.arange(n))
        best[layer] = g[layer] + np.where(has, best[without], -np.inf).max(1)
        worst[layer] = g[layer] + np.where(has, worst[without], np.inf).min(1)
    return Ceiling(float(best[-1] / (n - 1)), float(worst[-1] / (n - 1)), "exact")


def beam_ceiling(n: int, outputs: Outputs, width: int = BEAM) -> Ceiling:
    """The best order of a beam search for either end."""
    return Ceiling(_beam(n, outputs, width, 1.0), _beam(n, outputs, width, -1.0), "beam")


def _beam(n: int, outputs: Outputs, width: int, sign: float) -> float:
    start = float(outputs([0])[0])
    beam = {0: 0.0}  # the set, and sign times the sum of g over its best known prefix sets
    for size in range(1, n):
        reached: dict[int, float] = {}
        for removed, total in beam.items():
            for u in range(n):
                if not removed >> u & 1:
                    wider = removed | 1 << u
                    reached[wider] = max(total, reached.get(wider, -np.inf))
        sets = sorted(reached)
        gains = sign * (start - outputs(sets))
        totals = {s: reached[s] + float(gain) for s, gain in zip(sets, gains, strict=True)}
        beam = dict(sorted(totals.items(), key=lambda pair: (-pair[1], pair[0]))[: width if size < n - 1 else 1])
    return sign * max(beam.values()) / (n - 1)
