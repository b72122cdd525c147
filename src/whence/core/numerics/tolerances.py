"""Every tolerance, with its reason.

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

UNIT_SUM = 1e-11
"""A row that was made in float64 sums to 1 this well; one that does not was not made as an attention row."""

SUM_ROUNDING = 1e-9
"""What sums of a few thousand weights, costs or times of size 1 can be off by. Shares that differ by less are tied."""

FEASIBLE = 1e-9
"""The feasibility tolerance of the linear programs: HiGHS's finest, and a hundredth of what counts as solved."""

SOLVED = 1e-7
"""A program is solved when its point and its dual are so close: a tenth of what counts as exact (`GAP`)."""

DUALITY_GAP = 1e-8
"""Where the interior-point method stops when every digit is wanted: a tenth of `SOLVED`."""

SOLVER_ZERO = 1e-10
"""A weight below this in a simplex vertex is a zero that rounding moved: a tenth of `FEASIBLE`."""

INTERIOR_ZERO = 1e-7
"""The same for a point of the interior-point method, whose zeros are as large as the gap at which it stops (`SOLVED`)."""

FIRST_WEIGHT = 1e-12
"""Least weight of an interior point at its start, and of a logarithm: a row may hold exact zeros, which have none."""

EXACT_OUTPUT = 1e-12
"""An alternative that is to be exact keeps the whitened output so well: rounding of sums of thousands of weights."""

SEARCH_GAIN = 1e-6
"""A search that climbs by less has arrived: nothing that is displayed shows less (`GAP`)."""

SHORTEST_STEP = 1e-8
"""A Newton step that had to be halved below this helps no more: the square root of float64's eps."""

LIGHT_KEY = 1e-3
"""Keys lighter than this cost a sparse row the same: without a floor, one key of weight 1e-12 would outweigh all else."""

SECOND_ROW = 1e-6
"""A reachable row nearer than this is the row itself, to which Newton's method returned."""

FAR_ROW = 1e-4
"""A second row shown to people is at least so far: far above what the model's own float32 can turn one row into."""

NEWTON_FROM = 1e-10
"""Squared residual from which Newton's method takes over: there it converges quadratically, and the damping is in its way."""

SQUARED_ZERO = 1e-30
"""A squared residual below this is rounding: float64's eps, squared, on numbers of size 1."""

SMALLEST_WEIGHT = 1e-6
"""Weights below this say nothing of their score: float32 knows their logarithm no better than the scores they came from."""

SCORE_FIT = 1e-3
"""How well s·q·k must explain log-weights: float32 softmax leaves some 1e-5, a bias or cap that is overlooked far more."""

CONDITION = 1e-6
"""Two computations of one condition number agree so well up to κ of about 1e10, beyond which none is exact."""

SHOWN_MOVE = 1e-3
"""A row that moved by less is not worth opening a page with: it is what three printed digits show."""

TIED_WEIGHTS = 1e-5
"""The largest share of a key outside span[V, 1] that the rounding of float32 weights explains."""

TIED_KEYS = 1e-4
"""The same share, of keys measured on a text: what float32 states add to it."""

LOW_RANK = 1e-7
"""Singular values below this share of the largest are rounding of a float32 product (eps 1.2e-7)."""

HEAD_OUTPUT = 2e-5
"""How far head outputs made again from rows may be from the model's, as a share of the largest value: fused kernels add
up in another order, some hundred eps of float32 over thousands of keys."""

SAME_STATE = 1e-6
"""Two states that differ by less, relative, are one tensor handed on: ten eps of float32."""

RAISED_SUM = 1e-3
"""How far sums made in a finer dtype may be from the model's logits: what rounding of the logits themselves leaves."""

UNREAD = 1e-5
"""A row of states whose share in the output is below this part of the largest is not read: rounding alone gives about
1e-6. Half precision: a hundred times as much."""

SAME_LOGITS = 1e-5
"""Logits of the same input, alone and in a batch, agree so well, relative: other kernels, other orders of summation."""

JSD_ZERO = 1e-6
"""A Jensen–Shannon divergence below this is none: it is quadratic, so that distributions are 1e-3 apart."""

DRAW_ROUNDING = 1e-15
"""A resampled mean counts as equal to the observed one up to the rounding of both."""

EQUAL_EMBEDDINGS = 1e-6
"""Two embeddings nearer than this, relative to their length, are the same one: ten eps of float32."""

SHARES_SUM = 1e-6
"""How far shares that a person typed may be from summing to 1: thirds written with seven digits."""

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


def state_agreement(dtype: torch.dtype) -> float:
    """How far what is rebuilt of a state may be from the model's own, relative to its size.

    float32 models differ by 1e-6 to 1e-5 after some hundred layers of sums in another order; what is read wrongly differs
    by order 1. In half precision the model's own rounding (eps 1e-3 and 8e-3) is in the state that is compared with.
    """
    return {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2}.get(dtype, 6e-2)


def output_rounding(dtype: torch.dtype) -> float:
    """What the model's own arithmetic can change in a head output, relative: eight eps in half precision, where the other
    row is rounded too."""
    return 1e-6 if dtype in (torch.float32, torch.float64) else 8 * torch.finfo(dtype).eps


BATCH_MATES = 1e-3
"""A text's final states in a batch and alone, relatively: so far apart, its neighbours matter, and it is no rounding."""
