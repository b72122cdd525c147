"""Bootstrap and Holm against plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from whence.faithful.statistics import Bootstrap, all_differences, holm, separated


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])


def test_the_interval_is_the_bootstraps() -> None:
    values = np.random.default_rng(0).normal(0.3, 1.0, size=(200, 1))
    found = Bootstrap(values, None, seed=0).estimate(0)
    draw = np.random.default_rng(1)
    slow = [values[draw.integers(0, 200, 200), 0].mean() for _ in range(4000)]
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(np.quantile(slow, 0.025), abs=0.015)
    assert found.high == pytest.approx(np.quantile(slow, 0.975), abs=0.015)


def test_documents_are_drawn_whole() -> None:
    """Ten equal texts of one document are one observation: the interval must not shrink."""
    one = np.random.default_rng(0).normal(size=(20, 1))
    alone = Bootstrap(one, None, seed=0).estimate(0)
    copied = Bootstrap(np.repeat(one, 10, axis=0), np.repeat(np.arange(20), 10).tolist(), seed=0).estimate(0)
    fooled = Bootstrap(np.repeat(one, 10, axis=0), None, seed=0).estimate(0)
    assert copied.high - copied.low == pytest.approx(alone.high - alone.low, rel=0.1)
    assert fooled.high - fooled.low < 0.5 * (alone.high - alone.low)


def test_p_is_right_under_the_null_and_small_under_an_effect() -> None:
    draw = np.random.default_rng(0)
    small = 0
    for k in range(40):
        pair = draw.normal(size=(60, 2))
        small += Bootstrap(pair, None, seed=k).difference(0, 1)[1] < 0.05
    assert small <= 6  # 2 are expected
    shifted = draw.normal([[1.0, 0.0]], 1.0, size=(60, 2))
    assert Bootstrap(shifted, None, seed=0).difference(0, 1)[1] < 0.001


def test_equal_methods_are_never_separated() -> None:
    column = np.random.default_rng(0).normal(size=(50, 1))
    both = all_differences(["a", "b"], Bootstrap(np.hstack([column, column]), None, seed=0))
    assert both[0].p == 1.0
    assert separated(both) == 0


def test_beats_needs_every_operator_and_one_direction() -> None:
    draw = np.random.default_rng(0)
    base = draw.normal(size=50)
    better = all_differences(
        ["a", "b"], Bootstrap(np.stack([base + 1, base], 1) + draw.normal(0, 0.1, (50, 2)), None, 0)
    )
    worse = all_differences(
        ["a", "b"], Bootstrap(np.stack([base - 1, base], 1) + draw.normal(0, 0.1, (50, 2)), None, 0)
    )
    equal = all_differences(["a", "b"], Bootstrap(draw.normal(size=(50, 2)), None, 0))
    assert separated(better * 2) == 1
    assert separated(worse * 2) == -1
    assert separated([*better, *equal]) == 0
    assert separated([*better, *worse]) == 0
