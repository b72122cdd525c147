"""Summaries on a matrix small enough to check by eye."""

from __future__ import annotations

import math

import pytest
import torch

from whence.errors import InputError
from whence.mixing.mixture import Mixture
from whence.results.labels import Tokens
from whence.results.provenance import Provenance
from whence.results.result import Result

TOKENS = Tokens(("[CLS]", "rates", "rose", "."), ("[CLS]", "rates", "rose", "."), special=(True, False, False, False))
VALUES = torch.tensor([[[0.7, 0.1, 0.1, 0.1], [0.2, 0.5, 0.2, 0.1], [0.0, 0.6, 0.4, 0.0], [0.25, 0.25, 0.25, 0.25]]])


def mixture(values: torch.Tensor = VALUES, tokens: Tokens = TOKENS, keys: Tokens | None = None) -> Mixture:
    return Mixture(values, ("layer", "hidden", "input"), tokens, Provenance("tiny", "by hand"), keys)


def test_own_share() -> None:
    row = mixture().own_share().iloc[0]
    assert row["median"] == pytest.approx(0.45)
    assert row["mean"] == pytest.approx((0.7 + 0.5 + 0.4 + 0.25) / 4)
    assert row["not_largest"] == 25.0  # only ‘rose’; a tie counts as its own
    assert row["q25"] <= row["median"] <= row["q75"]


def test_by_distance_and_offset() -> None:
    frame = mixture().by_distance().set_index("distance")
    assert frame["share"].sum() == pytest.approx(1.0)
    assert frame.loc["1st", "share"] == pytest.approx((0.1 + 0.4 + 0.6 + 0.25) / 4)
    assert frame.loc["11th+", "pairs"] == 0
    offsets = mixture().by_offset().set_index("offset")
    assert offsets.loc[-1, "share"] == pytest.approx((0.2 + 0.6 + 0.25) / 3)
    assert offsets.loc[3, "share"] == pytest.approx(0.1)


def test_by_kind_and_special_mass() -> None:
    frame = mixture().by_kind().set_index(["hidden_kind", "input_kind"])
    assert frame.loc[("rest", "[CLS]"), "share"] == pytest.approx(0.1)
    assert frame.loc[("punctuation", "rest"), "share"] == pytest.approx(0.5)
    assert frame["share"].groupby(level=0).sum().tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert mixture().special_mass()["special"][0] == pytest.approx((0.7 + 0.2 + 0.25) / 4)


def test_entropy_and_dominance() -> None:
    flat = mixture(torch.full((1, 4, 4), 0.25))
    assert flat.entropy()["entropy"][0] == pytest.approx(math.log(4))
    assert flat.entropy()["relative"][0] == pytest.approx(1.0)
    row = mixture().dominance().iloc[0]
    assert row["mean"] == pytest.approx((0.7 + 0.5 + 0.6 + 0.25) / 4)
    assert row["above_half"] == 50.0
    alone = mixture(torch.eye(4)[None])
    assert alone.entropy()["entropy"][0] == 0


def test_sources() -> None:
    frame = mixture().sources(top=2)
    rose = frame[frame["hidden_token"] == "rose"]
    assert rose["input_token"].tolist() == ["rates", "rose"]
    assert rose["share"].tolist() == pytest.approx([0.6, 0.4])
    with pytest.raises(InputError, match="layer"):
        mixture().sources(layer=3)


def test_columns_that_begin_with_a_source() -> None:
    target = Tokens(("a", "b"), ("a", "b"))
    mixed = mixture(torch.tensor([[[0.1, 0.2, 0.7, 0.0], [0.3, 0.1, 0.1, 0.5]]]), target, TOKENS)
    assert mixed.own_share()["mean"][0] == pytest.approx(0.6)
    assert mixed.by_distance().set_index("distance").loc["1st", "share"] == pytest.approx(0.05)
    assert mixed.by_offset()["offset"].tolist() == [-1, 0, 1]


def test_other_axes_are_refused() -> None:
    from whence.mixing import summaries

    with pytest.raises(InputError, match="rows of hidden tokens"):
        summaries.own_share(Result(torch.zeros(4), ("input",), TOKENS, Provenance("tiny", "x")))
