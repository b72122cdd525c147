"""Against scikit-learn, and chance against every order."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whence
from tests.faithful.faithful_models import WEIGHTS
from tests.faithful.test_faithfulness import TEXTS, constant, perfect
from whence.errors import InputError
from whence.faithful.plausibility import average_precision, chance, measures
from whence.model.load import Model

texts = st.integers(3, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 4), min_size=n, max_size=n), st.lists(st.booleans(), min_size=n, max_size=n)
    )
)


@given(texts)
@settings(max_examples=80, deadline=None)
def test_average_precision_is_scikit_learns(drawn: tuple[list[int], list[bool]]) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    scores, marked = np.array(drawn[0], float), np.array(drawn[1])
    if marked.any() and not marked.all():
        assert average_precision(scores, marked) == pytest.approx(sklearn.average_precision_score(marked, scores))


def test_f1_and_iou_are_scikit_learns_without_ties() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    draw = np.random.default_rng(0)
    for _ in range(30):
        scores, marked = draw.random(12), draw.random(12) < 0.4
        if not marked.any():
            continue
        top = np.zeros(12, bool)
        top[np.argsort(-scores)[: marked.sum()]] = True
        _, f1, iou, mrr = measures(scores, marked)
        assert f1 == pytest.approx(sklearn.f1_score(marked, top))
        assert iou == pytest.approx(sklearn.jaccard_score(marked, top))
        assert mrr == pytest.approx(
            1 / (1 + np.argsort(-scores).tolist().index(next(i for i in np.argsort(-scores) if marked[i])))
        )


@pytest.mark.parametrize(("n", "p"), [(3, 1), (5, 2), (6, 5), (7, 3)])
def test_chance_is_the_mean_over_all_orders(n: int, p: int) -> None:
    marked = np.arange(n) < p
    every = [measures(np.array(order, float), marked) for order in permutations(range(n))]
    assert chance(n, p) == pytest.approx(np.mean(every, axis=0))
    # A constant score is a random order, for every measure but AP, which ranks ties together.
    assert measures(np.ones(n), marked)[1:] == pytest.approx(chance(n, p)[1:])


def test_of_a_run_with_rationales(additive: Model) -> None:
    marks = [[int(WEIGHTS[w] > 0) for w in t.split()] for t in TEXTS]
    run = whence.faithfulness(
        additive, TEXTS, [perfect, constant], target="positive", rationales=marks, ceiling="none", random=1
    )
    found = whence.plausibility(run)
    signed = [[WEIGHTS[w] for w in t.split()] for t in TEXTS]
    table = whence.plausibility({"weights": signed}, marks).table().set_index("method")
    assert table.loc["weights", "ap"] == pytest.approx(1.0)
    assert table.loc["chance", "ap"] < 0.9
    assert len(found.numbers) + len(found.skipped) == len(TEXTS)
    assert found.skipped == tuple(i for i, m in enumerate(marks) if len(set(m)) == 1)


def test_bad_input() -> None:
    with pytest.raises(InputError, match="3 scores and the rationale 2 marks"):
        whence.plausibility({"a": [[1, 2, 3]]}, [[1, 0]])
    with pytest.raises(InputError, match="scores for 1 texts"):
        whence.plausibility({"a": [[1, 2]]}, [[1, 0], [0, 1]])
    with pytest.raises(InputError, match="none of 1 texts"):
        whence.plausibility({"a": [[1, 2]]}, [[1, 1]])
    with pytest.raises(InputError, match="takes"):
        whence.plausibility([[1, 2]], [[1, 0]])
    with pytest.raises(InputError, match="text 0: a has scores that are not finite"):
        whence.plausibility({"a": [[1, float("nan")]]}, [[1, 0]])
    with pytest.raises(InputError, match=r"text 0: its rationale is \[2, 0\]"):
        whence.plausibility({"a": [[1, 2]]}, [[2, 0]])
