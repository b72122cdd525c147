"""Matrices turned on their side.

The numbers of a column whose rows are a power of two long all fall on the same few lines of the processor's cache. Each
matrix is first put where rows are an odd number of lines apart.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_TURNED = 1 << 14  # numbers in a matrix from which on the way there matters


def turned(matrices: Tensor, out: Tensor | None = None, tiny: float = 0.0) -> Tensor:
    """(…, a, b) → (…, b, a), laid out anew: `matrices.mT.contiguous()`, twice as fast where rows are powers of two.

    Numbers up to `tiny` become 0 on the way.

    >>> bool((turned(torch.arange(6.0).view(2, 3)) == torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]])).all())
    True
    """
    rows, width = matrices.shape[-2:]
    if out is None:
        out = matrices.new_empty(*matrices.shape[:-2], width, rows)
    if rows * width < _TURNED or matrices.device.type != "cpu":
        out.copy_(matrices.mT)
        return torch.hardshrink(out, tiny, out=out) if tiny else out
    line = max(1, 64 // matrices.element_size())
    lines = -(-width // line) | 1
    apart = matrices.new_empty(rows, lines * line)[:, :width]
    for given, made in zip(_each(matrices), _each(out), strict=True):
        made.copy_((torch.hardshrink(given, tiny, out=apart) if tiny else apart.copy_(given)).mT)
    return out


def _each(matrices: Tensor) -> Iterator[Tensor]:
    """Every matrix of a stack of them, as a view."""
    if matrices.dim() == 2:
        yield matrices
    else:
        for part in matrices.unbind(0):
            yield from _each(part)
