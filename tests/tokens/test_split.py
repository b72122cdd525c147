from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whence.errors import InputError
from whence.tokens.split import groups, same_sentence, split

sequences = st.lists(st.lists(st.sampled_from("abcdefghijklmnopqrst"), min_size=1, max_size=2).map(tuple), max_size=60)


@given(sequences, st.integers(0, 5))
def test_no_sentence_is_on_two_sides_and_nothing_is_lost(given_: list[tuple[str, ...]], seed: int) -> None:
    try:
        sides = split(given_, seed=seed)
    except InputError:
        assert len(given_) < 3 or len(groups(given_)) < 3
        return
    parts = (sides.train, sides.validation, sides.test)
    assert sorted(i for part in parts for i in part) == list(range(len(given_)))
    assert all(parts)
    seen = [{same_sentence(s) for i in part for s in given_[i]} for part in parts]
    assert len(seen[0] | seen[1] | seen[2]) == sum(map(len, seen))


def test_shares_and_seed() -> None:
    texts = [(f"text {i}",) for i in range(200)]
    sides = split(texts)
    assert (len(sides.train), len(sides.validation), len(sides.test)) == (140, 30, 30)
    assert split(texts) == sides
    assert split(texts, seed=1) != sides
    assert len(split(texts, shares=(0.5, 0.25, 0.25)).test) == 50


def test_case_and_spaces_do_not_make_a_new_sentence() -> None:
    assert groups([("A  b",), ("c",), ("a B", "d"), ("d",)]) == [[0, 2, 3], [1]]


@pytest.mark.parametrize("given_", [[], [("a",)], [("a",), ("b",)]])
def test_too_few(given_: list[tuple[str, ...]]) -> None:
    with pytest.raises(InputError, match="at least 3"):
        split(given_)


def test_one_group_cannot_be_split() -> None:
    with pytest.raises(InputError, match="only 1 independent group;"):
        split([("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")])


@pytest.mark.parametrize("shares", [(0.7, 0.3), (0.7, 0.3, 0.0), (0.7, 0.2, 0.2)])
def test_wrong_shares(shares: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="sum to 1"):
        split([("a",), ("b",), ("c",)], shares=shares)
