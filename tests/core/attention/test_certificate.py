"""Certificates against scipy's linprog, and their proofs against tampering."""

from __future__ import annotations

import dataclasses
import json
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from tests.core import make
from whence.core.attention.certificate import Certificate, certify_row
from whence.core.attention.polytope import Polytope
from whence.errors import InputError, MissingExtraError


def reference(certificate: Certificate, cost: np.ndarray) -> float:
    """min cᵀx over the polytope, by scipy from the definition; cost over all keys."""
    seen = certificate.visible.numpy()
    a, v = certificate.row.numpy()[seen], certificate.values.numpy()[seen]
    scale = np.abs(v).max()
    v, output = v / scale, a @ v / scale
    n = len(a)
    if certificate.tolerance:
        slack = certificate.tolerance * np.sqrt(np.mean(output**2))
        solved = linprog(
            cost[seen],
            A_ub=np.vstack([v.T, -v.T]),
            b_ub=np.concatenate([output + slack, slack - output]),
            A_eq=np.ones((1, n)),
            b_eq=[1.0],
        )
    else:
        solved = linprog(cost[seen], A_eq=np.vstack([v.T, np.ones(n)]), b_eq=np.append(output, 1.0))
    assert solved.status == 0
    return float(solved.fun)


@settings(max_examples=25)
@given(
    n=st.integers(2, 24),
    d_v=st.integers(1, 6),
    tolerance=st.sampled_from([0.0, 0.0, 0.02]),
    exponent=st.sampled_from([-20, 0, 20]),
    seed=st.integers(0, 1000),
)
def test_intervals_equal_linprog_and_the_duals_check(
    n: int, d_v: int, tolerance: float, exponent: int, seed: int
) -> None:
    visible = torch.rand(n, generator=make.generator(seed)) < 0.8
    visible[seed % n] = True
    row = make.attention(n, seed=seed, visible=visible, dtype=torch.float64)
    values = make.values(n, d_v, seed=seed + 1, scale=10.0**exponent, duplicates=n // 5, dtype=torch.float64)
    certificate = certify_row(row, values, top=3, tolerance=tolerance, visible=visible)
    assert certificate.check()
    one = np.eye(n)
    for k, j in enumerate(certificate.keys.tolist()):
        assert float(certificate.lower[k]) == pytest.approx(reference(certificate, one[j]), abs=1e-7)
        assert float(certificate.upper[k]) == pytest.approx(-reference(certificate, -one[j]), abs=1e-7)
    outside = np.ones(n)
    outside[certificate.keys.numpy()] = 0.0
    assert certificate.outside == pytest.approx(-reference(certificate, -outside), abs=1e-7)
    for (i, j), gap in zip(certificate.pairs.tolist(), certificate.gaps.tolist(), strict=True):
        assert gap == pytest.approx(reference(certificate, one[i] - one[j]), abs=1e-7)


def test_a_unique_row_is_pinned_and_ordered() -> None:
    row = make.attention(10, dtype=torch.float64)
    certificate = certify_row(row, make.values(10, 12, dtype=torch.float64), top=None)
    assert certificate.dimension == 0
    assert torch.allclose(certificate.lower, certificate.weights, atol=1e-8)
    assert torch.allclose(certificate.upper, certificate.weights, atol=1e-8)
    assert certificate.certain.all()
    assert certificate.outside == 0.0
    assert certificate.check()


def test_a_tolerance_only_widens() -> None:
    row, values = make.attention(40), make.values(40, 16)
    exact, loose = certify_row(row, values), certify_row(row, values, tolerance=0.05)
    assert (loose.lower <= exact.lower + 1e-9).all()
    assert (loose.upper >= exact.upper - 1e-9).all()
    assert float((loose.upper - exact.upper).max()) > 1e-3
    assert loose.check()


def tampered(certificate: Certificate) -> dict[str, object]:
    """Every number of a certificate changed, one at a time, for better and for worse."""
    changed: dict[str, object] = {"tolerance": -1.0, "eps": 1e-3, "rank": certificate.rank + 1}
    changed |= {"dimension": certificate.dimension - 1, "condition": certificate.condition * 1.01}
    for name in ("lower", "upper", "gaps", "outside", "bound_lower", "bound_upper"):
        for sign in (1, -1):
            changed[f"{name} {sign:+d}"] = getattr(certificate, name) + sign * 1e-3
    return changed


@pytest.mark.parametrize("tolerance", [0.0, 0.05])
def test_a_tampered_certificate_fails(tolerance: float) -> None:
    certificate = certify_row(make.attention(30), make.values(30, 6), tolerance=tolerance)
    assert certificate.check()
    for name, value in tampered(certificate).items():
        assert not dataclasses.replace(certificate, **{name.split()[0]: value}).check(), name
    for name, index in (("keys", -1), ("pairs", 30), ("keys", 99)):
        whole = getattr(certificate, name).clone()
        whole.view(-1)[0] = index
        assert not dataclasses.replace(certificate, **{name: whole}).check(), name
    for name in ("row", "lower", "upper_duals", "bound_directions", "values"):
        assert not dataclasses.replace(certificate, **{name: getattr(certificate, name) * torch.nan}).check(), name
        assert not dataclasses.replace(certificate, **{name: getattr(certificate, name)[:-1]}).check(), name
    assert not dataclasses.replace(certificate, tolerance=float("nan")).check()
    assert not dataclasses.replace(certificate, row=certificate.row * 1.001).check()
    hidden = certificate.visible.clone()
    hidden[int(certificate.keys[0])] = False
    assert not dataclasses.replace(certificate, visible=hidden).check()


def test_a_dimension_with_exact_zeros_is_proved() -> None:
    face = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 0.0], [0.3, 1.0], [0.6, 2.0]])
    certificate = certify_row(torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0]), face)
    assert certificate.support.tolist() == [True, True, True, False, False]
    assert certificate.check()
    everything = torch.ones(5, dtype=torch.bool)
    for dimension, support in ((2, everything), (0, certificate.row > 0), (2, certificate.support)):
        assert not dataclasses.replace(certificate, dimension=dimension, support=support).check()
    assert not dataclasses.replace(certificate, interior=torch.full((5,), 0.2).double(), support=everything).check()
    wrong = certificate.support_dual + 1.0
    assert not dataclasses.replace(certificate, support_dual=wrong).check()


def exact_bound(certificate: Certificate, cost: list[int], dual: torch.Tensor) -> Fraction:
    """uᵀo + min_j (c_j − v_jᵀu), in rational arithmetic."""
    row = [Fraction(x) for x in certificate.row.tolist()]
    values = [[Fraction(x) for x in line] for line in certificate.values.tolist()]
    u = [Fraction(x) for x in dual.tolist()]
    price = [sum((x * y for x, y in zip(line, u, strict=True)), Fraction(0)) for line in values]
    return sum((a * p for a, p in zip(row, price, strict=True)), Fraction(0)) + min(
        c - p for c, p in zip(cost, price, strict=True)
    )


@pytest.mark.parametrize("seed", [3, 10, 38, 77, 148])
def test_no_reported_end_is_tighter_than_its_dual_proves(seed: int) -> None:
    n, d = 2 + seed % 17, 1 + seed % 7
    dtype = torch.float64 if seed % 2 else torch.float32
    row = make.attention(n, seed=seed, sharpness=[1, 2, 8, 20, 40][seed % 5], dtype=dtype)
    values = make.values(n, d, seed=seed + 1, duplicates=n // 4 if seed % 3 else 0, dtype=dtype)
    c = certify_row(row, values, top=[None, 2, 5][seed % 3])
    one = np.eye(n, dtype=int)
    for k, j in enumerate(c.keys.tolist()):
        assert Fraction(float(c.lower[k])) <= max(exact_bound(c, one[j].tolist(), c.lower_duals[k]), 0)
        assert -Fraction(float(c.upper[k])) <= max(exact_bound(c, (-one[j]).tolist(), c.upper_duals[k]), -1)
    outside = [0 if j in c.keys.tolist() else -1 for j in range(n)]
    assert -Fraction(c.outside) <= max(exact_bound(c, outside, c.outside_dual), -1)
    for p, (i, j) in enumerate(c.pairs.tolist()):
        assert Fraction(float(c.gaps[p])) <= max(exact_bound(c, (one[i] - one[j]).tolist(), c.pair_duals[p]), -1)


def test_the_mass_outside_is_no_tighter_than_its_dual_proves() -> None:
    generator = torch.Generator().manual_seed(64)  # a case in which rounding to nearest is one bit too tight
    n, d = (int(torch.randint(low, high, (1,), generator=generator)) for low, high in ((2, 24), (1, 18)))
    row = torch.softmax(torch.randn(n, generator=generator, dtype=torch.float64) * 4, -1).float()
    values = torch.randn(n, d, generator=generator, dtype=torch.float64)
    c = certify_row(row, (values * 10.0 ** float(torch.randint(-2, 3, (1,), generator=generator))).float().round())
    outside = [0 if j in c.keys.tolist() else -1 for j in range(n)]
    assert -Fraction(c.outside) <= max(exact_bound(c, outside, c.outside_dual), -1)


def test_a_wrong_dual_proves_only_a_wider_interval() -> None:
    certificate = certify_row(make.attention(30), make.values(30, 6))
    assert not dataclasses.replace(certificate, upper_duals=certificate.upper_duals * 1.01).check()


def test_exact_zeros_may_be_stuck() -> None:
    # Values on a line, all mass on the two ends: nothing else can be reached, although n − rank = 3.
    values = torch.tensor([[0.0], [1.0], [0.5], [0.25], [0.75]])
    stuck = certify_row(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]), values)
    assert stuck.dimension == 0
    assert float(stuck.upper[1:].max()) <= 1e-9
    free = certify_row(torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0]), values)
    assert free.dimension == 3
    # A face: the third coordinate is at its smallest value on three keys, so only those can carry mass.
    face = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 0.0], [0.3, 1.0], [0.6, 2.0]])
    assert certify_row(torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0]), face).dimension == 1


def test_it_prints_and_serialises() -> None:
    visible = torch.arange(12) > 1
    certificate = certify_row(make.attention(12, visible=visible), make.values(12, 3), visible=visible)
    frame = certificate.to_frame()
    assert list(frame["key"][:5]) == certificate.keys.tolist()
    assert frame["lower"].notna().sum() == 5
    assert (frame["bound_upper"] >= frame["weight"] - 1e-9).all()
    assert json.loads(json.dumps(certificate.to_dict()))["dimension"] == certificate.dimension


def test_orders_can_be_left_out() -> None:
    certificate = certify_row(make.attention(12), make.values(12, 3), orders=False)
    assert certificate.pairs.shape == (0, 2)
    assert certificate.check()


def test_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    row, values = make.attention(8), make.values(8, 3)
    with pytest.raises(InputError, match=r"sum 2"):
        certify_row(2 * row, values)
    with pytest.raises(InputError, match="smallest entry"):
        certify_row(row - 0.2, values)
    with pytest.raises(InputError, match="index the layer"):
        certify_row(row[None], values)
    with pytest.raises(InputError, match="8 keys but values"):
        certify_row(row, values[:5])
    with pytest.raises(InputError, match="NaN"):
        certify_row(row, values * torch.nan)
    with pytest.raises(InputError, match="no key is visible"):
        certify_row(row, values, visible=torch.zeros(8, dtype=torch.bool))
    with pytest.raises(InputError, match="top=0"):
        certify_row(row, values, top=0)
    with pytest.raises(InputError, match="tolerance=-1"):
        certify_row(row, values, tolerance=-1.0)
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(MissingExtraError, match="pip install highspy"):
        certify_row(row, values)


def test_the_solver_starts_warm() -> None:
    row, values = make.attention(60, dtype=torch.float64).numpy(), make.values(60, 8, dtype=torch.float64).numpy()
    solver = Polytope(row, values)
    cost = np.eye(60)[3]
    first = solver.minimum(cost)
    again = solver.minimum(cost)
    assert solver.solved == 2
    assert again.bound == pytest.approx(first.bound, abs=1e-12)
    x = solver.polished(again.vertex)
    assert np.abs((x - row) @ values).max() < 1e-13
    assert x.min() >= 0
