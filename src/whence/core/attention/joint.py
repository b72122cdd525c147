"""The layer's view: does the attention block's output determine what each head put in, and each row of each head?

Head outputs AV reach the block output through the output matrix, y_i = Σ_h (a_i^h V^h) W^h. Two questions: can the head
outputs be told apart in y (the stacked W has full row rank)? And how many directions can the rows of all heads move in
together without changing y: H(n − 1) − rank of the stacked (V^h − 1μᵀ) W^h, generically max(0, H(n − 1) − d).
methods 1.6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whence.core.numerics.basis import unit_scale
from whence.core.numerics.checks import check_finite, check_tensor, check_values, check_visible, shape
from whence.core.numerics.tolerances import rank_eps, weight_rank_tolerance
from whence.errors import InputError


@dataclass(frozen=True)
class JointIdentifiability:
    """What one attention block's output determines, before residual and norm.

    rank, condition: of the stacked output matrix (H·d_v × d); condition = σ_max/σ_min, infinite when rank-deficient.
    determines_heads: the block output determines every head output exactly (how stably: `condition` is the noise gain).
    null_dimension: directions in which the rows of all heads at one position can move together (None without values).
    generic_null_dimension: max(0, H(n − 1) − d), what random values would give.
    """

    heads: int
    rank: int
    condition: float
    determines_heads: bool
    null_dimension: int | None
    generic_null_dimension: int | None

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def joint_identifiability(
    output: Tensor, values: Tensor | None = None, *, visible: Tensor | None = None
) -> JointIdentifiability:
    """Rank and condition of a block's output matrix, and the joint null dimension of its heads' rows.

    Args:
        output: (H, d_v, d), head h's slice of the output projection (x @ slice). Heads that are added before one
            projection W share it: pass W.expand(H, d_v, d).
        values: (H, n_key, d_v); visible: (n_key,) or (H, n_key) boolean, the keys that the position sees.

    >>> joint = joint_identifiability(torch.eye(4).reshape(2, 2, 4), torch.randn(2, 5, 2))
    >>> joint.determines_heads, joint.null_dimension
    (True, 4)
    >>> joint_identifiability(torch.eye(2, 4).expand(2, 2, 4)).determines_heads  # added heads
    False
    """
    check_tensor("output", output, "(H, d_v, d)")
    if output.ndim != 3 or not output.numel():
        raise InputError(f"output {shape(output)}: expected the heads' slices of the output projection, (H, d_v, d).")
    check_finite("output", output)
    heads, d_v, width = output.shape
    matrix = unit_scale(output.reshape(1, heads * d_v, width))[0][0]
    s = torch.linalg.svdvals(matrix)
    rank = _rank(s, output.dtype)
    full = rank == heads * d_v
    condition = float(s[0] / s[-1]) if full else float("inf")
    if values is None:
        return JointIdentifiability(heads, rank, condition, full, None, None)

    check_values(values)
    if values.ndim != 3 or values.shape[0] != heads or values.shape[2] != d_v:
        raise InputError(f"values {shape(values)} do not fit output {shape(output)}; expected ({heads}, n_key, {d_v}).")
    seen = torch.ones(heads, values.shape[1], dtype=torch.bool)
    if visible is not None:
        check_visible(visible, heads, values.shape[1])
        if visible.ndim > 2:
            raise InputError(f"visible has shape {shape(visible)}; expected {shape(seen)} or ({seen.shape[1]},).")
        seen = visible.expand(seen.shape)
        if not bool(seen.any(-1).all()):
            raise InputError("no key is visible; a fully masked row has nothing to analyse.")
    # Rows of every head sum to 1, so moves are orthogonal to 1 and only V − 1μᵀ = U S Nᵀ counts. The joint map is
    # diag(U_h S_h) · [N_hᵀ W_h]: its rank is that of the second factor, in which the values' scale has no part.
    eps = rank_eps(values.dtype)
    moved = []
    for v, mask, w in zip(unit_scale(values)[0], seen, matrix.reshape(heads, d_v, width), strict=True):
        body = v[mask]
        _, sigma, directions = torch.linalg.svd(body - body.mean(0), full_matrices=False)
        moved.append(directions[sigma > torch.linalg.matrix_norm(body, ord=2) * max(body.shape) * eps] @ w)
    free = int((seen.sum(-1) - 1).sum())
    joint_rank = _rank(torch.linalg.svdvals(torch.cat(moved)), output.dtype, s[0])
    return JointIdentifiability(heads, rank, condition, full, free - joint_rank, max(0, free - width))


def _rank(singular: Tensor, dtype: torch.dtype, largest: Tensor | None = None) -> int:
    """How many singular values of an output matrix count."""
    if not singular.numel():
        return 0
    return int((singular > (singular[0] if largest is None else largest) * weight_rank_tolerance(dtype)).sum())
