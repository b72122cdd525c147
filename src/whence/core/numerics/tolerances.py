"""Every tolerance of the core, with its reason.

The model's dtype decides what the tensors are, never how they are measured: ranks, projections, squares and sums are
made in float32 or float64 from the tensors as the model has them.
"""

from __future__ import annotations

import torch

EPS32 = torch.finfo(torch.float32).eps
EPS64 = torch.finfo(torch.float64).eps

CHOLESKY_LIMIT = 1e6
"""Largest κ_F of a Cholesky factor that is used. Cholesky-QR2 is orthogonal as long as κ²·eps < 1: a margin of 1e3."""

PROVED = 0.5
"""A bound on a singular value decides its rank only with half the tolerance, so that rounding cannot turn it."""

OUTPUT_SPREAD = 256.0
"""A finished output C = AV carries rounding eps·κ through V⁺; beyond this κ_F the whitened (AQ)Qᵀ, free of κ, is used."""

FRESH_LEVERAGE = 16.0
"""‖L⁻¹v‖² of a fresh row up to which float32 products inside a causal block lose at most this factor."""

STRAY_MASS = 1e-3
"""Mass that a mask may leave on invisible keys: a float32 softmax over -1e4 biases leaves far less, a mask that is
transposed or inverted far more."""

PROJECTOR_ROUNDING = 1e-13
"""What rounding can add to an entry of a projector or to its product with an attention row: numbers of size 1."""

OWN_ROW = 1e-12
"""The row itself satisfies every proved bound up to the rounding of its own sum."""

GAP = 1e-6
"""An interval counts as exact when what is proved and what an alternative attains differ by no more."""

OTHER_OUTPUT = 1e-6
"""A row whose output differs from the head's by more than this share is no alternative. It happens where the output is
below the rounding of the values: nearly all weight on keys whose values are 0, as 1e-40 of a value beside a sum of values."""

BREACH = 1e-9
"""A row counts against a claim only if it breaks it by this share of the costs' range: a solver's vertices are no better."""

SAME_OUTPUT = 1e-10
"""... and only if its head output is the original's to this share, in float64."""

NO_WEIGHT = 1e-8
"""A key that no alternative gives more than this has no weight: no solver in float64 tells less from 0."""

EXTREME = 1e150
"""Values of this size, or of its inverse, have squares that float64 cannot hold: a proof by sums would be none."""

SAME_ROW = 1e-9
"""Two rows whose total variation is no larger are one: it is what a solver's feasibility tolerance leaves."""

FOLD_AGREEMENT = {torch.float64: 1e-6, torch.float32: 1e-4}
"""How close folded Jacobians must come to the model's own forward mode on random directions, relative: the rounding of
some hundred layers of products. Half precision is too coarse to prove a folding in."""

DIFFERENCE_STEP = 2e-3
"""The step of a central difference, in units of the state (with half of it, Richardson's extrapolation): its fourth power is
what curvature leaves, float32's eps over it (6e-5) what rounding does,
and some models compute parts in float32 whatever their dtype."""

DIFFERENCE_AGREEMENT = 2e-3
"""How close a derivative must come to that difference: some thirty times its rounding. A backward pass that means
something else (a straight-through estimator) differs by order 1."""


def rank_eps(dtype: torch.dtype) -> float:
    """The eps of a rank tolerance for values: that of the dtype they came in, float32 at the coarsest.

    Float32 values carry float32 rounding, so a row that is a combination of others in exact arithmetic is so only up
    to eps. bfloat16's own eps times the number of keys exceeds 1 and would call every matrix rank 0.
    """
    return EPS64 if dtype == torch.float64 else EPS32


def weight_rank_tolerance(dtype: torch.dtype) -> float:
    """Singular values of an output matrix count above this share of the largest.

    Weights are exact: nothing was added up to get them, so no allowance grows with their shape. Four eps of float32
    (of float64 for float64 weights) still call a product of low rank, rounded once, by its rank; the smallest singular
    values of real output matrices, 1e-5 … 5e-5 of the largest, are far above it.
    """
    return 4 * rank_eps(dtype)


def row_sum_slack(dtype: torch.dtype) -> float:
    """How far an attention row may be from summing to 1: the rounding of a softmax over thousands of keys."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 2e-2


def measured_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of results: that of the tensors, float32 at the coarsest."""
    return torch.float64 if dtype == torch.float64 else torch.float32
