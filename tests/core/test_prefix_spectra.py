"""Extreme singular values of every prefix against a singular value decomposition of each."""

from __future__ import annotations

import pytest
import torch

from tests.core import make
from whence.core.numerics._prefix_spectra import largest_eigenvalue, prefix_spectra


@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_largest_eigenvalue_is_within_its_bound(spread: float) -> None:
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(40, 24, 24, generator=generator, dtype=torch.float64)).Q
    spectrum = 10 ** (-spread * torch.rand(40, 24, generator=generator, dtype=torch.float64))
    gram = (basis * spectrum.unsqueeze(-2)) @ basis.mT
    error = (largest_eigenvalue(gram) / torch.linalg.eigvalsh(gram)[:, -1] - 1).abs()
    assert float(error.max()) < 24 ** (1 / 64) - 1
    assert float(error.median()) < 1e-3


def test_a_repeated_largest_eigenvalue_and_a_zero_matrix() -> None:
    gram = torch.stack([torch.eye(12, dtype=torch.float64) * 3, torch.zeros(12, 12, dtype=torch.float64)])
    found = largest_eigenvalue(gram)
    assert found[0] == pytest.approx(3, rel=1e-5)
    assert found[1] < 1e-30


@pytest.mark.parametrize("shift", [0.0, 3.0])
@pytest.mark.parametrize("decay", [0.0, 3.0])
def test_every_prefix(shift: float, decay: float) -> None:
    values = make.values(3, 150, 24) * 10 ** (-decay * torch.linspace(0, 1, 24)) + shift
    values = values.double()
    found = prefix_spectra(values, torch.finfo(torch.float32).eps)
    for head in range(3):
        for k in range(1, 151):
            v = values[head, :k]
            s, t = torch.linalg.svdvals(v), torch.linalg.svdvals(v - v.mean(0))
            tolerance = float(s[0]) * max(k, 24) * torch.finfo(torch.float32).eps
            rank, inner = int((s > tolerance).sum()), int((t > tolerance).sum())
            assert int(found.rank[head, k - 1]) == rank
            assert int(found.inner_rank[head, k - 1]) == inner
            assert float(found.largest[head, k - 1]) == pytest.approx(float(s[0]), rel=5e-2)
            assert float(found.last[head, k - 1]) == pytest.approx(float(s[rank - 1]), rel=5e-2)
            if inner:
                assert float(found.inner_largest[head, k - 1]) == pytest.approx(float(t[0]), rel=5e-2)
                assert float(found.inner_last[head, k - 1]) == pytest.approx(float(t[inner - 1]), rel=5e-2)
