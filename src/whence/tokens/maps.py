"""The maps g from a hidden state back to its input embedding, and the parts of a state they may see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAPS = ("naive", "linear", "mlp", "ridge", "procrustes")
PARTS = ("whole", "direction", "norm")


def part_of(states: Tensor, part: str) -> Tensor:
    """The whole state e, its direction e/‖e‖, or its norm ‖e‖ alone: (N, d) → (N, d), (N, d) or (N, 1)."""
    if part == "whole":
        return states
    norm: Tensor = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    return norm if part == "norm" else states / norm.clamp_min(torch.finfo(states.dtype).tiny)


@dataclass(frozen=True)
class Naive:
    """g(e) = e."""

    def __call__(self, states: Tensor) -> Tensor:
        return states


@dataclass(frozen=True)
class Affine:
    """g(e) = Wᵀ(e − μ)/σ + b: every linear map here, trained or in closed form."""

    mean: Tensor  # [d]
    spread: Tensor  # [d]
    weight: Tensor  # [d, d_x]
    bias: Tensor  # [d_x]

    @classmethod
    def of(cls, mean: Tensor, spread: Tensor, weight: Tensor, bias: Tensor) -> Affine:
        """In float32, in which maps are applied; contiguous, as they come back from a file, so that no bit differs."""
        return cls(*(t.float().contiguous() for t in (mean, spread, weight, bias)))

    def __call__(self, states: Tensor) -> Tensor:
        return torch.addmm(self.bias, (states - self.mean) / self.spread, self.weight)


@dataclass(frozen=True)
class Perceptron:
    """g(e) = Wᵀz + b + W₂ᵀ gelu(W₁ᵀz + b₁), z = (e − μ)/σ: one hidden layer beside the linear map."""

    linear: Affine
    into: Tensor  # [d, hidden], W₁
    into_bias: Tensor  # [hidden]
    out: Tensor  # [hidden, d_x], W₂

    def __call__(self, states: Tensor) -> Tensor:
        z = (states - self.linear.mean) / self.linear.spread
        hidden = torch.nn.functional.gelu(torch.addmm(self.into_bias, z, self.into))
        return torch.addmm(self.linear.bias, z, self.linear.weight).addmm_(hidden, self.out)


Map = Naive | Affine | Perceptron
