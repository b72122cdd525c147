"""Ranks at the tolerance: singular values just above and just below it, under every mask, plain and on the simplex.

A singular value counts when it exceeds σ_max(V)·max(n, d_v)·eps. The decision is often made from a bound and not from
the singular values; here they are placed where a bound that forgets the tolerance decides wrongly.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.core import make
from whence.core.attention.bounds import weight_bounds
from whence.core.attention.certificate import certify_row
from whence.core.attention.effective_attention import effective_attention
from whence.core.attention.leverage import leverage
from whence.core.attention.null_space import null_space

EPS = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}


def at_the_tolerance(n: int, d: int, small: list[float], eps: float, *, simplex: bool, seed: int = 0) -> Tensor:
    """(n, d) float64: singular values 1, some around ½, and `small` times the tolerance max(n, d)·eps·σ_max(V)."""
    u = make.values(n, d, seed=seed, dtype=torch.float64)
    if simplex:
        u = u - u.mean(0)
    u, _ = torch.linalg.qr(u)
    w, _ = torch.linalg.qr(make.values(d, d, seed=seed + 1, dtype=torch.float64))
    s = torch.linspace(1.0, 0.5, d, dtype=torch.float64)
    s[d - len(small) :] = torch.tensor(small, dtype=torch.float64) * max(n, d) * eps
    return (u * s) @ w.T


def count(values: Tensor, eps: float, *, simplex: bool) -> tuple[int, Tensor]:
    """The rank and the projector, from all singular values."""
    tolerance = torch.linalg.matrix_norm(values, ord=2) * max(values.shape) * eps
    u, s, _ = torch.linalg.svd(values - values.mean(0) if simplex else values, full_matrices=False)
    u = u[:, s > tolerance]
    if simplex:
        u = torch.cat([u, torch.full((len(values), 1), len(values) ** -0.5, dtype=torch.float64)], 1)
    return u.shape[1], u @ u.T


# float32 values cannot hold singular values near float32's tolerance exactly: rounding adds to them. What they are
# after rounding is measured by `count`, and the cases stay clear of 1.
SMALL = [[0.3, 0.1], [3.0, 0.2], [4.0, 3.0]]


@pytest.mark.parametrize("simplex", [False, True])
@pytest.mark.parametrize("small", SMALL)
@pytest.mark.parametrize(("n", "d"), [(40, 16), (16, 16), (18, 16), (12, 16), (130, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_attention(n: int, d: int, small: list[float], simplex: bool, dtype: torch.dtype) -> None:
    exact = at_the_tolerance(n, min(n - 1, d), small, EPS[dtype], simplex=simplex)
    exact = torch.cat([exact, torch.zeros(n, d - exact.shape[1], dtype=torch.float64)], 1)
    values = exact.to(dtype)
    rank, projector = count(values.double(), EPS[dtype], simplex=simplex)
    space = null_space(values)
    assert int(space.simplex_rank if simplex else space.rank) == rank
    constraint = "simplex" if simplex else "output"
    attention = make.attention(3, n, dtype=torch.float64)
    found = effective_attention(attention, values, constraint=constraint)  # type: ignore[arg-type]
    if dtype == torch.float32:  # at float64's own tolerance the directions themselves are rounding
        assert torch.allclose(found, attention @ projector, atol=1e-5)
        assert torch.allclose(leverage(values, constraint=constraint), projector.diagonal(), atol=1e-5)  # type: ignore[arg-type]
    if simplex:
        certificate = certify_row(attention[0], values, top=1)
        assert certificate.rank == rank
        assert certificate.check()
        bounds = weight_bounds(attention, values)
        assert (bounds.upper >= attention - 1e-9).all()
        if rank < n:
            assert float(bounds.width.max()) > 1e-6


@pytest.mark.parametrize("simplex", [False, True])
@pytest.mark.parametrize("small", SMALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["causal", "window", "padded"])
def test_masks(kind: str, small: list[float], simplex: bool, dtype: torch.dtype) -> None:
    n, d = 60, 12
    values = at_the_tolerance(n, d, small, EPS[dtype], simplex=simplex, seed=3).to(dtype)
    visible = {
        "causal": make.causal(n),
        "window": make.window(n, 25),
        "padded": make.causal(n) & (torch.arange(n) > 4),
    }[kind]
    attention = make.attention(n, n, visible=visible, dtype=torch.float64)
    constraint = "simplex" if simplex else "output"
    space = null_space(values, visible=visible)
    found = effective_attention(attention, values, constraint=constraint, visible=visible)  # type: ignore[arg-type]
    for i in range(n):
        seen = visible[i]
        if not bool(seen.any()):
            continue
        rank, projector = count(values.double()[seen], EPS[dtype], simplex=simplex)
        assert int((space.simplex_rank if simplex else space.rank)[i]) == rank
        if dtype == torch.float32:
            assert torch.allclose(found[i][seen], attention[i][seen] @ projector, atol=1e-5)


def test_few_keys_that_are_nearly_dependent() -> None:
    """Fewer keys than value dimensions, one singular value at half the tolerance: not identified."""
    u, _ = torch.linalg.qr(make.values(8, 8, dtype=torch.float64))
    w, _ = torch.linalg.qr(make.values(64, 8, seed=1, dtype=torch.float64))
    s = torch.ones(8, dtype=torch.float64)
    s[-1] = 0.5 * 64 * EPS[torch.float32]
    values = ((u * s) @ w.T).float()
    assert count(values.double(), EPS[torch.float32], simplex=False)[0] == 7
    assert int(null_space(values).rank) == 7
