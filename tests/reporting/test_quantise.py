"""Quantised blocks: what comes back is what went in, within half a step; bounds are rounded outwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whence.errors import InputError
from whence.reporting.quantise import pack, quantise, unpack, whole_numbers

matrices = st.lists(st.floats(-1, 1, allow_nan=False), min_size=1, max_size=60).map(
    lambda v: torch.tensor(v, dtype=torch.float64).reshape(1, -1)
)


@given(matrices, st.sampled_from([8, 16]), st.booleans(), st.sampled_from([None, 63]))
def test_round_trip_is_within_half_a_step(values: torch.Tensor, bits: int, root: bool, levels: int | None) -> None:
    made = quantise(values, bits=bits, root=root, levels=levels)
    back, _ = unpack(pack({"x": made}))
    assert back["x"].shape == tuple(values.shape)
    share = np.abs(values.numpy()) / made.scale
    given_place = np.sqrt(share) if root else share
    found_place = (np.abs(back["x"]) / made.scale) ** (0.5 if root else 1.0)
    assert np.abs(given_place - found_place).max() <= 0.5 / made.levels + 1e-9
    assert np.all(np.sign(back["x"]) * np.sign(values.numpy()) >= 0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_bounds_stay_valid(values: list[float]) -> None:
    exact = torch.tensor([values], dtype=torch.float64)
    low = quantise(exact, scale=1.0, toward="down").values
    high = quantise(exact, scale=1.0, toward="up").values
    assert np.all(low <= exact.numpy() + 1e-15)
    assert np.all(high >= exact.numpy() - 1e-15)
    assert np.all(high - low <= 1 / 65535 + 1e-12)


def test_positions_are_exact_and_several_arrays_keep_their_names() -> None:
    keys = torch.tensor([[0, 511, 65535]])
    back, header = unpack(
        pack({"keys": whole_numbers(keys), "x": quantise(torch.tensor([[-0.5, 0.25]]))}, {"layer": 3})
    )
    assert back["keys"].tolist() == [[0.0, 511.0, 65535.0]]
    assert header["layer"] == 3
    assert list(back) == ["keys", "x"]


def test_what_is_not_a_number_becomes_zero_and_odd_bits_are_refused() -> None:
    assert quantise(torch.tensor([float("nan"), 1.0])).values.tolist() == [0.0, 1.0]
    with pytest.raises(InputError, match="bits=12"):
        quantise(torch.zeros(1), bits=12)
