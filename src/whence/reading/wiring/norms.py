"""Which norm is this? LayerNorm and RMSNorm, recognised by what they compute, never by their names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from whence.model.offload import parameters_of
from whence.reading.wiring.op_graph import deviation


@dataclass(frozen=True, eq=False)
class Norm:
    """y = L(x) / σ(x) + bias, with L(x) = gain ⊙ (x − centred·mean x) linear and σ one number for each position.

    σ (`scale`) is the standard deviation (centred) or the root mean square (not centred), with eps inside the root as
    the model has it. All that the measures need of a norm is here, so that a new kind of norm is a change of this file.
    """

    weight: Tensor | None  # (d,), as the model stores it (shared with the model, not copied)
    bias: Tensor | None  # (d,)
    eps: float
    centred: bool
    offset: float = 0.0  # Gemma and its kin store gain − 1

    @property
    def gain(self) -> Tensor | None:
        """(d,): what the normalised state is multiplied by."""
        return self.weight if self.weight is None or self.offset == 0 else self.weight + self.offset

    @property
    def kind(self) -> str:
        return "LayerNorm" if self.centred else "RMSNorm"

    def centre(self, x: Tensor, axis: int = -1) -> Tensor:
        """x − mean x, or x itself where the norm does not centre."""
        return x - x.mean(dim=axis, keepdim=True) if self.centred else x

    def _gained(self, x: Tensor) -> Tensor:
        gain = self.gain
        return x if gain is None else x * gain.to(x)

    def linear(self, x: Tensor) -> Tensor:
        """L(x) = gain ⊙ (x − mean x), the part that is linear in x."""
        return self._gained(self.centre(x))

    def adjoint(self, direction: Tensor) -> Tensor:
        """Lᵀ: direction · L(x) = adjoint(direction) · x for every x."""
        return self.centre(self._gained(direction))

    def scale(self, x: Tensor) -> Tensor:
        """(…, d) → (…, 1): σ(x), what L(x) is divided by."""
        return (self.centre(x).square().mean(dim=-1, keepdim=True) + self.eps).sqrt()

    def shifted(self, y: Tensor) -> Tensor:
        """y + bias, where there is one."""
        return y if self.bias is None else y + self.bias.detach().to(y)

    def __call__(self, x: Tensor) -> Tensor:
        return self.shifted(self.linear(x) / self.scale(x))

    def with_factor(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """norm(x), and 1 / σ(x) (…, 1): one pass over x where torch has one."""
        if not self.centred:
            factor = self.scale(x).reciprocal()
            return self.shifted(self.linear(x) * factor), factor
        gain, bias = (None if t is None else t.detach().to(x) for t in (self.gain, self.bias))
        y, _, factor = torch.native_layer_norm(x, [x.shape[-1]], gain, bias, self.eps)
        return y, factor

    def tangent(self, x: Tensor, tangent: Tensor) -> Tensor:
        """The derivative at x (n, d) along tangents (n, c, d)."""
        scale = self.scale(x)[:, None]
        unit, tangent = self.centre(x)[:, None] / scale, self.centre(tangent)
        return self._gained((tangent - unit * (tangent * unit).mean(-1, keepdim=True)) / scale)

    def jacobian_times(self, x: Tensor, right: Tensor) -> Tensor:
        """N_j · right_j (n, d, c), with N_j (d, d) the derivative at x_j for row vectors: δy = δx N_j."""
        gain = self.gain
        right = right if gain is None else right * gain.to(right)[:, None]
        scale = self.scale(x)[:, :, None]
        unit = self.centre(x)[:, :, None] / scale
        return self.centre((right - unit * (unit * right).mean(1, keepdim=True)) / scale, axis=1)


Reading = tuple[Tensor | None, Tensor | None, float]  # weight, bias, what is added to the weight

_USUAL_EPS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-3, 0.0)


def _candidates_eps(module: nn.Module) -> list[float]:
    own = [v for v in vars(module).values() if isinstance(v, float) and 0 <= v < 0.1]
    return list(dict.fromkeys([*own, *_USUAL_EPS]))


def recognise(module: nn.Module, given: Tensor, returned: Tensor, tolerance: float) -> Norm | None:
    """The norm that `module` computed when it turned `given` into `returned`, or None if it is no norm.

    Every reading (gain as stored or as 1 + stored, with or without centring and bias, each plausible eps) is
    computed in float64 and the closest is taken if it is within tolerance.
    """
    if given.shape != returned.shape or given.dim() < 2:
        return None
    width = given.shape[-1]
    sizes = [p.numel() for p in module.parameters()]
    if len(sizes) > 2 or any(size != width for size in sizes):
        return None
    vectors = [p.reshape(-1) for p in parameters_of(module)]
    readings: list[Reading] = [(None, None, 0.0)]
    if len(vectors) == 1:
        readings = [(vectors[0], None, 0.0), (vectors[0], None, 1.0), (None, vectors[0], 0.0)]
    elif len(vectors) == 2:
        pairs = (vectors, vectors[::-1])
        readings = [(gain, bias, offset) for gain, bias in pairs for offset in (0.0, 1.0)]
    return best_reading(readings, _candidates_eps(module), given, returned, tolerance)


def best_reading(
    readings: list[Reading],
    eps_values: list[float],
    given: Tensor,
    returned: Tensor,
    tolerance: float,
) -> Norm | None:
    """The reading closest to what was returned, if it is within tolerance."""
    x = given.detach().to(torch.float64)
    best: tuple[float, Norm] | None = None
    for weight, bias, offset in readings:
        for centred in (True, False):
            for eps in eps_values:
                norm = Norm(weight, bias, eps, centred, offset)
                error = deviation(norm(x), returned)
                # Strictly smaller: with a large state several eps agree, and the module's own comes first.
                if best is None or error < 0.5 * best[0]:
                    best = (error, norm)
                if best[0] < 1e-9:
                    return best[1]
    return best[1] if best is not None and best[0] <= tolerance else None
