"""Verdicts against their definition, decided by scipy's linear programs for every key and every pair."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor
from transformers import BertConfig, BertModel

import whence
from tests.core import make
from whence.attention.heads import head_of
from whence.attention.verdict import wilson
from whence.core.attention.verdict import RowVerdict, row_verdicts
from whence.errors import InputError
from whence.model.load import Model
from whence.reading.trace import Layer

module = importlib.import_module("whence.attention.verdict")


def by_definition(row: Tensor, values: Tensor, seen: Tensor, epsilon: float) -> RowVerdict | None:
    """The verdict from 2n + n programs; None where one of them is too close to ε to call."""
    a, v = (row.double()[seen] / row.double()[seen].sum()).numpy(), values.double()[seen].numpy()
    n = len(a)
    matrix, right = np.vstack([v.T, np.ones(n)]), np.append(a @ v, 1.0)
    if np.linalg.matrix_rank(matrix) == n:
        return RowVerdict.UNIQUE

    def most(cost: np.ndarray) -> float:
        return -float(linprog(-cost, A_eq=matrix, b_eq=right).fun)

    one, top = np.eye(n), int(a.argmax())
    highs = np.array([most(one[j]) for j in range(n)])
    width = highs[top] + most(-one[top])
    over = max((most(one[j] - one[top]) for j in range(n) if j != top), default=0.0)
    if min(abs(x - epsilon) for x in (highs.max(), width, over, a[top])) < 1e-4:
        return None
    if highs.max() <= epsilon:
        return RowVerdict.FLAT
    return RowVerdict.CERTAIN if a[top] > epsilon and width <= epsilon and over <= epsilon else RowVerdict.OPEN


@pytest.mark.parametrize("kind", ["full", "causal", "window"])
@pytest.mark.parametrize(
    ("d_v", "sharpness", "epsilon"), [(4, 2.0, 0.05), (12, 3.0, 0.2), (3, 0.3, 0.3), (8, 0.1, 0.12)]
)
def test_rows_equal_the_definition(kind: str, d_v: int, sharpness: float, epsilon: float) -> None:
    n = 16
    visible = {"full": None, "causal": make.causal(n), "window": make.window(n, 9)}[kind]
    attention = make.attention(n, n, sharpness=sharpness, visible=visible, seed=d_v)
    values = make.values(n, d_v, seed=d_v + 1)
    found = row_verdicts(attention, values, epsilon=epsilon, visible=visible)
    for i in range(n):
        seen = torch.ones(n, dtype=torch.bool) if visible is None else visible[i]
        wanted = by_definition(attention[i], values, seen, epsilon)
        assert wanted is None or RowVerdict(int(found[i])) == wanted


def test_every_kind_occurs_in_what_is_compared() -> None:
    values = torch.tensor([[1.0], [0.0], [0.0]])
    rows = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.5, 0.4]])
    assert row_verdicts(rows, values).tolist() == [RowVerdict.CERTAIN, RowVerdict.OPEN]
    assert row_verdicts(rows[:, :2] / rows[:, :2].sum(-1, keepdim=True), values[:2]).tolist() == [RowVerdict.UNIQUE] * 2
    many = torch.full((1, 40), 1 / 40)
    assert row_verdicts(many, make.values(40, 39), epsilon=0.3).tolist() in ([RowVerdict.FLAT], [RowVerdict.UNIQUE])
    # Forty keys, values on the corners of a box that all must be averaged: no weight can grow beyond 2/40.
    box = torch.cat([torch.eye(20), torch.eye(20)])
    assert row_verdicts(many, box, epsilon=0.06).tolist() == [RowVerdict.FLAT]


@pytest.fixture(scope="module")
def read() -> whence.Trace:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
    )
    ids = torch.randint(5, 60, (1, 30), generator=torch.Generator().manual_seed(1))
    return whence.trace(Model(BertModel(config).eval()), {"input_ids": ids})


def test_heads_are_judged_by_their_rows(read: whence.Trace) -> None:
    whole = whence.verdict(read, rows=0)
    for i, layer in enumerate(read):
        for h in range(2):
            rows = row_verdicts(layer.attention[h], layer.values[h])
            certain, loose = (int((rows == int(k)).sum()) for k in (RowVerdict.CERTAIN, RowVerdict.OPEN))
            share = certain / (certain + loose)
            name = "read" if share >= 0.95 else "careful" if share >= 0.5 else "do not read"
            assert whole.of(i, h) == name
            assert whole.interval(i, h) == (share, share)
            assert f"{certain} of {certain + loose} rows" in whole.sentence(i, h)
    assert len(whole.to_frame()) == 4
    assert whole.epsilon == 0.05
    assert not whence.verdict(read, epsilon=1e-5, rows=0).heads_that("read")
    assert "None of the 4 heads may be read" in whence.verdict(read, epsilon=1e-5, rows=4).sentences()[0]


def test_a_sample_is_seeded_by_content_and_states_itself(read: whence.Trace) -> None:
    some, again = whence.verdict(read, rows=6), whence.verdict(read, rows=6)
    assert torch.equal(some.extra["row_verdicts"], again.extra["row_verdicts"])
    assert (some.extra["sampled"] == 6).all()
    assert (some.extra["rows"] == 30).all()
    certain = int(some.extra["certain"][0, 0])
    if certain + int(some.extra["open"][0, 0]):
        low, high = some.interval(0, 0)
        assert low <= float(some.values[0, 0]) <= high
        assert "a sample of 6 of 30" in some.sentence(0, 0)


def test_the_sample_does_not_depend_on_rounding(read: whence.Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    # Another thread count or processor changes the last digits; other rows looked at would be another verdict.
    ours = whence.verdict(read, rows=6).extra["row_verdicts"]

    def rounded(layer: Layer, place: int) -> tuple[Tensor, Tensor, Tensor | None]:
        weights, values, visible = head_of(layer, place)
        return torch.nextafter(weights, torch.ones_like(weights)), values, visible

    monkeypatch.setattr(module, "head_of", rounded)
    theirs = whence.verdict(read, rows=6).extra["row_verdicts"]
    assert torch.equal(ours >= 0, theirs >= 0)
    assert len({tuple(line.tolist()) for line in (ours >= 0).flatten(0, 1)}) == 4  # each head draws rows of its own


def test_wilson_and_errors(read: whence.Trace) -> None:
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == pytest.approx(1.0)
    for wrong in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(InputError, match="epsilon="):
            whence.verdict(read, epsilon=wrong)
    with pytest.raises(InputError, match="rows=-1"):
        whence.verdict(read, rows=-1)
    with pytest.raises(InputError, match="one head"):
        row_verdicts(torch.ones(1, 2, 2) / 2, torch.ones(2, 1))
    with pytest.raises(InputError, match="unknown"):
        whence.verdict(read, rows=1).heads_that("fine")


def test_a_tolerance_comes_beside_the_exact_answer(read: whence.Trace) -> None:
    row = whence.certify(read, 0, 1, 4, tolerance=0.02)
    assert row.exact is not None
    assert row.exact.exact is None
    assert (row.tolerance, row.exact.tolerance) == (0.02, 0.0)
    assert row.keys.tolist() == row.exact.keys.tolist()
    assert (row.lower <= row.exact.lower + 1e-6).all()
    assert (row.upper >= row.exact.upper - 1e-6).all()
    assert row.check()
    assert row.exact.check()
    assert row.to_dict()["exact"]["tolerance"] == 0.0
