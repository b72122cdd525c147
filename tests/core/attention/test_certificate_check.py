"""A certificate in which any one number is not what its proof gives is refused; numbers at its limits are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.core import make
from whence.core.attention.certificate import Certificate, certify_row
from whence.core.attention.certificate_check import dimension_of, outside_cost, spectrum

EPS = float(np.finfo(np.float64).eps)
CAUSAL = torch.arange(24) < 20


@pytest.fixture(scope="module", params=[0.0, 0.02], ids=["exact", "tolerant"])
def certificate(request: pytest.FixtureRequest) -> Certificate:
    row = make.attention(24, seed=3, visible=CAUSAL, dtype=torch.float64)
    certificate = certify_row(
        row, make.values(24, 5, dtype=torch.float64), top=4, tolerance=request.param, visible=CAUSAL
    )
    assert certificate.check()
    return certificate


@pytest.fixture(scope="module")
def face() -> Certificate:
    """A row whose alternatives have weight on three of five keys only."""
    values = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 0.0], [0.3, 1.0], [0.6, 2.0]], dtype=torch.float64)
    certificate = certify_row(torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0], dtype=torch.float64), values)
    assert certificate.check()
    assert certificate.support.tolist() == [True, True, True, False, False]
    return certificate


def changed(tensor: Tensor, place: Any, by: float) -> Tensor:
    copy = tensor.clone()
    copy[place] += by
    return copy


def last_hidden(by: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: changed(tensor, -1, by)


TAMPERED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a shape": ("bound_lower", lambda x: x[:-1]),
    "another shape": ("pair_duals", lambda x: x[:, :-1]),
    "a negative tolerance": ("tolerance", lambda _: -1e-9),
    "an infinite tolerance": ("tolerance", lambda _: float("inf")),
    "an eps of its own": ("eps", lambda _: 1e-3),
    "nothing visible": ("visible", torch.zeros_like),
    "a key before the first": ("keys", lambda x: changed(x, 0, -1 - int(x[0]))),
    "a key behind the last": ("keys", lambda x: changed(x, 0, 24 - int(x[0]))),
    "one hidden key among visible ones": ("keys", lambda x: changed(x, -1, 22 - int(x[-1]))),
    "a hidden key in a pair": ("pairs", lambda x: changed(x, (0, 1), 22 - int(x[0, 1]))),
    "a row with one negative entry": (
        "row",
        lambda x: changed(changed(x, 0, -float(x[0]) - 1e-3), 1, float(x[0]) + 1e-3),
    ),
    "a row that sums to more": ("row", lambda x: x * (1 + 1e-9)),
    "a row with weight on a hidden key": ("row", lambda x: changed(changed(x, -1, 1e-6), 0, -1e-6)),
    "an interior with weight on a hidden key": ("interior", lambda x: changed(changed(x, -1, 1e-6), 0, -1e-6)),
    "an interior that sums to less": ("interior", lambda x: x * (1 - 1e-9)),
    "an infinite value": ("values", lambda x: changed(x, (-1, 0), float("inf"))),
    "keys in another order": ("keys", lambda x: x.flip(0)),
    "a lower end too high": ("lower", lambda x: changed(x, -1, 1e-6)),
    "a lower end too low": ("lower", lambda x: changed(x, 0, -1e-3)),
    "an upper end too low": ("upper", lambda x: changed(x, -1, -1e-6)),
    "an upper end too high": ("upper", lambda x: changed(x, 0, 1e-3)),
    "too little outside": ("outside", lambda x: x - 1e-6),
    "too much outside": ("outside", lambda x: x + 1e-3),
    "more than all outside": ("outside", lambda _: 1.5),
    "a gap too wide": ("gaps", lambda x: changed(x, -1, 1e-6)),
    "a gap too narrow": ("gaps", lambda x: changed(x, 0, -1e-3)),
    "a bound too high": ("bound_lower", lambda x: changed(x, 7, 1e-6)),
    "a bound too low": ("bound_lower", lambda x: changed(x, 7, -1e-3)),
    "an upper bound too low": ("bound_upper", lambda x: changed(x, 7, -1e-6)),
    "an upper bound too high": ("bound_upper", lambda x: changed(x, 7, 1e-3)),
    "a bound on a hidden key": ("bound_upper", last_hidden(0.1)),
    "a lower bound on a hidden key": ("bound_lower", last_hidden(0.1)),
    "a rank too high": ("rank", lambda x: x + 1),
    "a condition that is not": ("condition", lambda x: x * (1 + 1e-4)),
    "a dimension too high": ("dimension", lambda x: x + 1),
    "a dimension too low": ("dimension", lambda x: x - 1),
    "a hidden key in the support": ("support", lambda x: torch.cat([x[:-1], torch.tensor([True])])),
    "a support without a key that has weight": ("support", lambda x: torch.cat([torch.tensor([False]), x[1:]])),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_a_changed_number_is_noticed(certificate: Certificate, case: str) -> None:
    name, change = TAMPERED[case]
    assert not dataclasses.replace(certificate, **{name: change(getattr(certificate, name))}).check()


@pytest.mark.parametrize("order", [[0, 1, 3, 2], [3, 2, 1, 0]])
def test_the_heaviest_key_comes_first(certificate: Certificate, order: list[int]) -> None:
    """Every proof goes with its key: only the order is wrong."""
    names = ("keys", "lower", "upper", "lower_duals", "upper_duals")
    moved = {name: getattr(certificate, name)[order] for name in names}
    assert not dataclasses.replace(certificate, **moved).check()
    assert dataclasses.replace(
        certificate, **{name: getattr(certificate, name)[[0, 1, 2, 3]] for name in names}
    ).check()


def test_a_gap_is_that_of_a_difference(certificate: Certificate) -> None:
    """Without a dual x_i + x_j ≥ 0 is proved, up to rounding; x_i − x_j ≥ 0 is not."""
    gaps, duals = torch.full_like(certificate.gaps, -5e-14), torch.zeros_like(certificate.pair_duals)
    assert not dataclasses.replace(certificate, gaps=gaps, pair_duals=duals).check()


def test_an_interior_is_an_alternative(certificate: Certificate) -> None:
    elsewhere = changed(changed(certificate.interior, 0, 0.5), 1, 0.0)
    assert not dataclasses.replace(certificate, interior=elsewhere / elsewhere.sum()).check()


def test_no_coordinate_of_the_output_may_move() -> None:
    row, values = make.attention(24, seed=3, dtype=torch.float64), make.values(24, 5, dtype=torch.float64)
    certificate = certify_row(row, values)
    fixed = torch.cat(
        [values[:, 1:], torch.ones(24, 1, dtype=torch.float64)], 1
    )  # all coordinates but the first, and the sum
    move = values[:, 0] - fixed @ torch.linalg.lstsq(fixed, values[:, :1]).solution[:, 0]
    interior = certificate.interior + 0.1 * certificate.interior.min() * move / move.abs().max()
    assert not dataclasses.replace(certificate, interior=interior).check()


def test_the_keys_beyond_the_support_are_proved_to_have_no_weight(face: Certificate) -> None:
    assert not dataclasses.replace(face, support_dual=torch.zeros_like(face.support_dual)).check()
    smaller = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert not dataclasses.replace(face, support=smaller > 0, interior=smaller, dimension=0).check()


@pytest.mark.parametrize(("n", "width", "copies"), [(12, 4, 0), (12, 4, 3), (5, 9, 0), (1, 3, 0), (4, 1, 2)])
@pytest.mark.parametrize("scale", [1.0, 1e-120, 3e90])
def test_the_spectrum_is_that_of_the_definition(n: int, width: int, copies: int, scale: float) -> None:
    values = make.values(n, width, duplicates=copies, dtype=torch.float64).numpy()
    if n > 4:
        values[:, 0] = values[:, -1]
    centred = values - values.mean(axis=0)
    rank, condition, inverse = spectrum(values * scale, EPS)
    assert rank == np.linalg.matrix_rank(np.column_stack([values, np.ones(n)]))
    size = np.linalg.svd(centred, compute_uv=False)
    kept = size[size > 1e-12 * max(np.linalg.norm(values, 2), 1)]
    assert condition == pytest.approx(kept[0] / kept[-1], rel=1e-9) if len(kept) else np.isnan(condition)
    assert np.allclose(inverse * scale, np.linalg.pinv(centred, rcond=1e-12).T, atol=1e-9)


def test_values_that_are_all_zero_have_the_rank_of_the_ones() -> None:
    rank, condition, inverse = spectrum(np.zeros((6, 3)), EPS)
    assert rank == 1
    assert np.isnan(condition)
    assert not inverse.any()


def test_the_dimension_is_that_of_the_support() -> None:
    values = make.values(9, 3, dtype=torch.float64).numpy()
    every, some = np.ones(9, dtype=bool), np.arange(9) < 6
    assert dimension_of(values, 4, 0.0, every, EPS) == 9 - 4
    assert dimension_of(values, 4, 0.0, some, EPS) == 6 - 4
    assert dimension_of(values, 4, 0.0, np.arange(9) < 2, EPS) == 0  # two keys are of rank 2
    assert dimension_of(values, 4, 1e-9, every, EPS) == 9 - 1
    assert dimension_of(values, 4, 1e-9, some, EPS) == 9 - 1
    assert outside_cost(4, np.array([1, 3])).tolist() == [1.0, 0.0, 1.0, 0.0]


def test_equal_values_leave_everything_but_the_sum_free() -> None:
    certificate = certify_row(make.attention(6, dtype=torch.float64), torch.ones(6, 2, dtype=torch.float64))
    assert np.isnan(certificate.condition)
    assert (certificate.rank, certificate.dimension) == (1, 5)
    assert certificate.check()
