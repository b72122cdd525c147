"""The nearest neighbour against loops over tokens, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from whence.tokens import nearest

lengths_ = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def brute_force(found: Tensor, embeddings: Tensor, lengths: list[int], distance: str) -> list[int]:
    """argmin_j δ(g(e_i), x_j), one i and one j at a time."""
    chosen = []
    start = 0
    for n in lengths:
        for i in range(start, start + n):
            best, best_j = float("inf"), -1
            for j in range(start, start + n):
                a, b = found[i].double(), embeddings[j].double()
                if distance == "cosine":
                    d = float(1 - (a @ b) / (a.norm() * b.norm()))
                elif distance == "norm":
                    d = float((a.norm() - b.norm()).abs())
                else:
                    d = float((a - b).norm())
                if d < best - 1e-12:
                    best, best_j = d, j
            chosen.append(best_j)
        start += n
    return chosen


@settings(max_examples=40, deadline=None)
@given(lengths_, st.sampled_from(["cosine", "l2", "norm"]), st.integers(0, 1000))
def test_equals_brute_force(lengths: list[int], distance: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    found, embeddings = (torch.randn(sum(lengths), 5, generator=generator) for _ in range(2))
    ours = nearest.nearest_in_sequence(found, embeddings, lengths, distance)
    assert ours.tolist() == brute_force(found, embeddings, lengths, distance)


@pytest.mark.parametrize("distance", nearest.DISTANCES)
def test_small_blocks_give_the_same(distance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, table = torch.randn(39, 6), torch.randn(50, 6)
    whole = nearest.nearest_in_vocabulary(found, table, distance)
    monkeypatch.setattr(nearest, "BLOCK", 130)
    assert torch.equal(nearest.nearest_in_vocabulary(found, table, distance), whole)


@pytest.mark.parametrize("distance", nearest.DISTANCES)
def test_vocabulary_is_one_long_sequence(distance: str) -> None:
    found, table = torch.randn(20, 6), torch.randn(20, 6)
    one = nearest.nearest_in_vocabulary(found, table, distance)
    assert torch.equal(one, nearest.nearest_in_sequence(found, table, [20], distance))


def test_equal_rows() -> None:
    x = torch.randn(4, 8)
    rows = torch.stack([x[0], x[1], x[0], x[2], x[0], x[3] * 1e4, x[3] * 1e4 + 1])
    assert nearest.equal_in_sequence(rows, [4, 3]).tolist() == [0, 1, 0, 3, 4, 5, 6]
    assert nearest.equal_in_vocabulary(rows).tolist() == [0, 1, 0, 3, 0, 5, 6]


def test_distances() -> None:
    a, b = torch.randn(7, 3).double(), torch.randn(7, 3).double()
    for i, (cosine, euclid) in enumerate(
        zip(nearest.distances(a, b, "cosine"), nearest.distances(a, b, "l2"), strict=True)
    ):
        assert cosine.item() == pytest.approx(1 - float(a[i] @ b[i] / (a[i].norm() * b[i].norm())))
        assert euclid.item() == pytest.approx(float(((a[i] - b[i]) ** 2).sum() ** 0.5))
