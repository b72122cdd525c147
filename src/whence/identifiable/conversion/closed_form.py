"""The closed form: the M for which the tied key's attention logits are nearest to the original's.

    min_M  Σ_t ‖ Q_t (C_t (K_t − V_t M))ᵀ ‖²     over texts t, C_t centring over the keys of text t

Softmax does not see what is added to a whole row of logits, so keys and values are centred over each text first.
The normal equations are linear in M:  Σ_t V_tᵀV_t · M · Q_tᵀQ_t = Σ_t V_tᵀK_t · Q_tᵀQ_t, a system of d_v·d_k unknowns
per head.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class LogitLeastSquares:
    """Gathers texts one by one and solves for M, all heads of one layer at once.

    >>> q, v = torch.randn(2, 9, 4), torch.randn(2, 9, 4)
    >>> mixing = torch.randn(2, 4, 4)
    >>> problem = LogitLeastSquares(2, 4, 4)
    >>> problem.add(q, v @ mixing + 3.0, v)
    >>> bool(torch.allclose(problem.solve().float(), mixing, atol=1e-3))
    True
    """

    def __init__(self, heads: int, value_size: int, key_size: int) -> None:
        self.shape = (heads, value_size, key_size)
        self._values: list[Tensor] = []
        self._queries: list[Tensor] = []
        self._right = torch.zeros(heads, value_size, key_size, dtype=torch.float64)

    def add(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """One text: query and key (head, n, d_k), value (head, n, d_v)."""
        query, key, value = (x.to(torch.float64) for x in (query, key, value))
        key, value = (x - x.mean(-2, keepdim=True) for x in (key, value))
        queries = query.mT @ query / query.shape[-2]
        self._values.append(value.mT @ value / value.shape[-2])
        self._queries.append(queries)
        self._right += value.mT @ key / value.shape[-2] @ queries

    def _left(self) -> Tensor:
        """Σ_t (V_tᵀV_t)_ia (Q_tᵀQ_t)_bj at row (i, j) and column (a, b): one matrix product over the texts."""
        heads, size, width = self.shape
        values = torch.stack(self._values).reshape(-1, heads, size * size).permute(1, 2, 0)
        queries = torch.stack(self._queries).reshape(-1, heads, width * width).permute(1, 0, 2)
        product = (values @ queries).reshape(heads, size, size, width, width)
        return product.permute(0, 1, 4, 2, 3).reshape(heads, size * width, size * width)

    def solve(self, ridge: float = 1e-6) -> Tensor:
        """M (head, d_v, d_k) in float64; `ridge`, relative to the mean of the diagonal, keeps it finite."""
        heads, size, width = self.shape
        unknowns = size * width
        left = self._left()
        level = left.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(torch.float64).tiny)
        left = left + ridge * level[:, None, None] * torch.eye(unknowns, dtype=torch.float64)
        solved: Tensor = torch.linalg.solve(left, self._right.reshape(heads, unknowns, 1))
        return solved.reshape(heads, size, width)


def fit(calls: Iterable[list[tuple[Tensor, Tensor, Tensor]]]) -> list[Tensor]:
    """M of every layer, from texts given one by one as their (query, key, value) of every layer."""
    problems: list[LogitLeastSquares] = []
    for text in calls:
        for layer, (query, key, value) in enumerate(text):
            if layer == len(problems):
                problems.append(LogitLeastSquares(value.shape[0], value.shape[-1], key.shape[-1]))
            problems[layer].add(query, key, value)
    return [problem.solve() for problem in problems]
