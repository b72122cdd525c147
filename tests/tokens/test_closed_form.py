from __future__ import annotations

import numpy as np
import pytest
import torch

from whence.tokens import closed_form
from whence.tokens.closed_form import even_basis, moments, procrustes, ridge


def data(n: int = 200, d: int = 6, k: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g) * torch.tensor([1.0, 5, 0.2, 100, 1, 1])[:d] + 3
    return x, x @ torch.randn(d, k, generator=g) + torch.randn(n, k, generator=g)


@pytest.mark.parametrize("penalty", [1e-6, 0.1, 10.0])
def test_ridge_is_the_textbook_one(penalty: float) -> None:
    x, y = data()
    z = ((x - x.mean(0)) / x.std(0, correction=0)).double().numpy()
    target = y.double().numpy()
    weight = np.linalg.solve(z.T @ z / len(z) + penalty * np.eye(6), z.T @ (target - target.mean(0)) / len(z))
    expected = z @ weight + target.mean(0)
    ours = ridge(moments(x, y), (penalty,))[0](x)
    assert np.allclose(ours.numpy(), expected, rtol=1e-4, atol=1e-2)


def test_moments_do_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    whole = moments(x, y)
    monkeypatch.setattr(closed_form, "ROWS", 7)
    parts = moments(x, y)
    for name in ("mean", "spread", "covariance", "target_mean", "cross"):
        assert torch.allclose(getattr(whole, name), getattr(parts, name), rtol=1e-12, atol=1e-12)


def test_procrustes_beats_every_other_rotation() -> None:
    x, _ = data()
    g = torch.Generator().manual_seed(1)
    turn = torch.linalg.qr(torch.randn(6, 6, generator=g)).Q
    y = 0.3 * x @ turn - 2 + 0.1 * torch.randn(200, 6, generator=g)
    found = procrustes(moments(x, y))
    scale = torch.linalg.svdvals(found.weight)
    assert torch.allclose(scale, scale[0].expand(6), rtol=1e-4)  # a rotation times one number
    best = (found(x) - y).square().sum()
    for seed in range(20):
        other = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(seed))).Q
        small = torch.linalg.matrix_exp(0.01 * (other - other.T))
        moved = (x - found.mean) @ (found.weight @ small) + found.bias
        assert (moved - y).square().sum() >= best


def test_a_constant_coordinate_is_harmless() -> None:
    x, y = data()
    x[:, 2] = 4.0
    moved = x.clone()
    moved[:, 2] = 4.5  # what was constant in training is something else in another layer
    for found in (*ridge(moments(x, y), (1e-3,)), procrustes(moments(x, y[:, :4]))):
        assert torch.isfinite(found(x)).all()
        assert (found(moved) - found(x)).abs().max() < 1e-2 * found(x).std()


def test_even_basis() -> None:
    found = moments(*data())
    basis, back = even_basis(found, 0.1)
    assert torch.allclose(basis @ back, torch.eye(6).double(), atol=1e-8)
    # Variances along it are the square roots of the eigenvalues: half as far apart, in decades.
    inside = basis.T @ found.covariance @ basis
    values = torch.linalg.eigvalsh(found.covariance)
    assert torch.allclose(inside, torch.diag(values / (values + 0.1).sqrt()), atol=1e-8)
