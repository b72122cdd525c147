"""The proved range of a plain path: no attention with the same outputs leaves it, and it is not everything."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from whence.core.attention.alignment import first_keys
from whence.core.attention.path_certificate import _range, certify_path, proved_range, segments


def heads(seed: int, *, n: int = 14, width: int = 6, queries: int = 4, count: int = 2, sharp: float = 3.0):
    """Rows that look along the diagonal, values that change slowly along the keys, as those of sound do."""
    g = torch.Generator().manual_seed(seed)
    keys, centre = torch.arange(n), torch.linspace(1, n - 2, queries)
    near = -((keys[None] - centre[:, None]) ** 2) / (2 * (n / queries / 2) ** 2)
    scores = sharp * near[None] + 0.7 * torch.randn(count, queries, n, generator=g)
    rows = torch.softmax(scores.double(), -1)
    steps = torch.randn(count, n, width, generator=g, dtype=torch.float64)
    return rows, steps.cumsum(1) + 0.3 * torch.randn(count, n, width, generator=g, dtype=torch.float64)


def weights(count: int) -> torch.Tensor:
    return torch.full((count,), 1.0 / count, dtype=torch.float64)


def other_rows(
    rows: np.ndarray, values: np.ndarray, seen: np.ndarray, generator: np.random.Generator, push: int
) -> np.ndarray:
    """A vertex of every row's polytope, by scipy: pushed to earlier keys, to later ones, or anywhere (push −1, 1, 0)."""
    result = rows.copy()
    n = rows.shape[-1]
    for h in range(len(rows)):
        for i in range(rows.shape[1]):
            on = seen[h, i]
            equal = np.vstack([values[h][on].T, np.ones(on.sum())])
            cost = push * -np.arange(n)[on] / n + generator.normal(size=on.sum()) * (1.0 if push == 0 else 0.3)
            found = linprog(cost, A_eq=equal, b_eq=equal @ rows[h, i][on], bounds=(0, None))
            if found.x is not None:
                result[h, i, on] = found.x
    return result


def path(rows: np.ndarray, keys: int) -> np.ndarray:
    return first_keys(torch.from_numpy(rows.mean(0)[:, :keys]))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("keys", [14, 11])
def test_no_attention_with_the_same_outputs_leaves_the_range(seed, keys):
    rows, values = heads(seed)
    seen = torch.ones(rows.shape, dtype=torch.bool)
    if seed % 2:
        seen[:, :, 5] = False
        rows = rows.masked_fill(~seen, 0.0)
        rows = rows / rows.sum(-1, keepdim=True)
    found = certify_path(rows, values, seen, weights(2), keys)
    observed = path(rows.numpy(), keys)
    assert (found.first <= observed).all()
    assert (observed <= found.last).all()
    generator = np.random.default_rng(seed)
    for k in range(12):
        other = other_rows(rows.numpy(), values.numpy(), seen.numpy(), generator, k % 3 - 1)
        for share in (1.0, 0.5):
            moved = path(share * other + (1 - share) * rows.numpy(), keys)
            assert (found.first <= moved).all(), (found.first, moved)
            assert (moved <= found.last).all(), (found.last, moved)


def test_the_range_is_narrow_where_values_tell_keys_apart_and_wide_where_they_do_not():
    rows, values = heads(0, width=9)
    seen = torch.ones(rows.shape, dtype=torch.bool)
    tight = certify_path(rows, values, seen, weights(2), 14)
    assert int((tight.last - tight.first).max()) <= 4
    loose = certify_path(rows, torch.zeros_like(values[..., :1]), seen, weights(2), 14)
    assert ((loose.last - loose.first)[1:] == 13).all()
    unique = certify_path(rows, torch.eye(14, dtype=torch.float64).expand(2, 14, 14).clone(), seen, weights(2), 14)
    assert (
        int((unique.last - unique.first).max()) <= 1
    )  # one key: a step to the side and down at once is as good as not at all
    few = certify_path(rows, values, seen, weights(2), 14, programs=0)
    assert few.programs == 0
    assert ((few.last - few.first) >= (tight.last - tight.first)).all()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.sampled_from([1e-9, 1e-3, 1.0, 1e6]), st.floats(0.0, 8.0))
def test_never_wrong_on_ill_conditioned_values_and_flat_or_sharp_rows(seed, scale, sharp):
    rows, values = heads(seed, n=10, width=4, queries=3, count=1, sharp=sharp)
    values[..., -1] *= scale
    values[:, 3] = values[:, 2]  # two keys that sound alike
    seen = torch.ones(rows.shape, dtype=torch.bool)
    found = certify_path(rows, values, seen, weights(1), 10)
    generator = np.random.default_rng(seed)
    for k in range(6):
        other = other_rows(rows.numpy(), values.numpy(), seen.numpy(), generator, k % 3 - 1)
        if np.abs((other - rows.numpy()) @ values.numpy()[0]).max() > 1e-10 * np.abs(values.numpy()).max():
            continue  # the other solver's own error is in the way
        moved = path(other, 10)
        assert (found.first <= moved).all()
        assert (moved <= found.last).all()


def test_the_duals_give_the_range_again_and_false_ones_prove_less():
    rows, values = heads(3)
    seen = torch.ones(rows.shape, dtype=torch.bool)
    found = certify_path(rows, values, seen, weights(2), 14)
    again = proved_range(rows, values, seen, weights(2), 14, found.duals)
    np.testing.assert_array_equal(again[0], found.first)
    np.testing.assert_array_equal(again[1], found.last)
    for wrong in (torch.zeros_like(found.duals), found.duals.roll(1, 2), 3.0 * found.duals):
        less = proved_range(rows, values, seen, weights(2), 14, wrong)
        assert (less[0] <= found.first).all()
        assert (less[1] >= found.last).all()


def test_segments_are_those_of_the_path():
    matrix = np.zeros((3, 9))
    for i in range(3):
        matrix[i, 3 * i : 3 * i + 3] = 1.0
    first, last = segments(matrix)
    assert first[0] == 0
    assert last[-1] == 8
    assert all(b in (a, a + 1) for a, b in zip(last[:-1], first[1:], strict=True))


class Known:
    """Gains of one matrix over the path of another, exactly: what the bounds would be if each polytope were one row."""

    def __init__(self, observed: np.ndarray, other: np.ndarray) -> None:
        queries, self.n = observed.shape
        self.rows = np.zeros((1, queries, self.n))
        self.s0, self.e0 = segments(observed)
        self.other = other

    def gains(self) -> tuple[np.ndarray, np.ndarray]:
        upto = np.cumsum(self.other, axis=1)
        onward = np.c_[np.cumsum(self.other[:, ::-1], axis=1)[:, ::-1], np.zeros(len(self.other))]
        i = np.arange(len(self.other))
        b = upto - upto[i, self.e0][:, None]
        a = onward - onward[i, self.s0][:, None]
        return b[:-1] + a[1:, :-1], b[:-1] + a[1:, 1:]


@pytest.mark.parametrize("sparse", [False, True])
def test_the_best_path_of_any_matrix_is_possible_when_its_gains_are_known(sparse):
    """The exchange argument by itself, tightly: the bounds are the gains, so a condition that is a little too strong fails."""
    generator = np.random.default_rng(0)
    narrow = 0
    for _ in range(1200):
        shape = (int(generator.integers(2, 7)), int(generator.integers(3, 12)))
        observed, other = generator.random(shape) ** 3, generator.random(shape) ** 3
        if sparse:
            other = other * (generator.random(shape) < 0.5)
        known = Known(observed, other)
        first, last = _range(known)
        found = first_keys(torch.from_numpy(other))
        assert (first <= found).all(), (observed, other)
        assert (found <= last).all(), (observed, other)
        narrow += bool(((last - first)[1:] < shape[1] - 1).all())
    assert narrow > 40
