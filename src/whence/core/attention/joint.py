"""The layer's view: does the attention block's output determine what each head put in, and each row of each head?

Head outputs AV reach the block output through the output matrix, y_i = Σ_h (a_i^h V^h) W^h. Two questions: can the head
outputs be told apart in y (the stacked W has full row rank)? And how many directions can the rows of all heads move in
together without changing y: H(n − 1) − rank of the stacked, centred V^h W^h, generically max(0, H(n − 1) − d).
METHODS 1.2, "Layer output".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whence.core.numerics.basis import centre, unit_scale
from whence.core.numerics.checks import check_finite, check_tensor, check_values, check_visible, shape
from whence.core.numerics.tolerances import rank_eps
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
        values: (H, n_key, d_v); visible: (n_key,) boolean, the keys that the position sees.

    >>> joint = joint_identifiability(torch.eye(4).reshape(2, 2, 4), torch.randn(2, 5, 2))
    >>> joint.determines_heads, joint.null_dimension
    (True, 4)
    >>> joint_identifiability(torch.eye(2, 4).expand(2, 2, 4)).determines_heads  # added heads
    False
    """
    check_tensor("output", output, "(H, d_v, d)")
    if output.ndim != 3:
        raise InputError(f"output {shape(output)}: expected the heads' slices of the output projection, (H, d_v, d).")
    check_finite("output", output)
    heads, d_v, width = output.shape
    matrix, _ = unit_scale(output.reshape(1, heads * d_v, width))
    s = torch.linalg.svdvals(matrix[0])
    tolerance = s[0] * max(heads * d_v, width) * rank_eps(output.dtype)
    rank = int((s > tolerance).sum())
    full = rank == heads * d_v
    condition = float(s[0] / s[heads * d_v - 1]) if full else float("inf")
    if values is None:
        return JointIdentifiability(heads, rank, condition, full, None, None)

    check_values(values)
    if values.ndim != 3 or values.shape[0] != heads or values.shape[2] != d_v:
        raise InputError(f"values {shape(values)} do not fit output {shape(output)}; expected ({heads}, n_key, {d_v}).")
    n = values.shape[1]
    seen = torch.ones(n, dtype=torch.bool)
    if visible is not None:
        check_visible(visible, None, n)
        seen = visible.reshape(-1).expand(n)
        if not bool(seen.any()):
            raise InputError("no key is visible; a fully masked row has nothing to analyse.")
    count = int(seen.sum())
    v = unit_scale(values[:, seen])[0]
    # Rows of every head sum to 1, so moves are orthogonal to 1: only the centred values count.
    body = centre(v, torch.ones(v.shape[:-1], dtype=torch.bool))[0]
    stacked = (body @ matrix[0].reshape(heads, d_v, width)).reshape(heads * count, width)
    raw = (v @ matrix[0].reshape(heads, d_v, width)).reshape(heads * count, width)
    t = torch.linalg.svdvals(torch.linalg.qr(stacked, mode="r").R)
    top = torch.linalg.matrix_norm(torch.linalg.qr(raw, mode="r").R, ord=2)
    eps = max(rank_eps(values.dtype), rank_eps(output.dtype))
    joint_rank = int((t > top * max(stacked.shape) * eps).sum())
    free = heads * (count - 1)
    return JointIdentifiability(heads, rank, condition, full, free - joint_rank, max(0, free - width))
