"""Decisions against linear programs in exact rational arithmetic: every vertex of every polytope, by fractions."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from whence.core.attention.claim import Claim, breaks
from whence.core.attention.decision import decide_row, decide_rows
from whence.core.attention.decision_check import check_decision
from whence.core.attention.head_rows import Heads
from whence.core.numerics.tolerances import BREACH
from whence.errors import InputError

FEW = settings(max_examples=25, deadline=None, derandomize=True)


def vertices(row: list[float], values: list[list[float]]) -> list[list[Fraction]]:
    """All vertices of {x ≥ 0, 1ᵀx = 1ᵀa, xᵀV = aᵀV}, exactly: every basic solution that is ≥ 0."""
    n = len(row)
    lines = [[Fraction(1)] * n, *([Fraction(v[k]) for v in values] for k in range(len(values[0])))]
    right = [sum((c * Fraction(a) for c, a in zip(line, row, strict=True)), Fraction(0)) for line in lines]
    table = reduced([[*line, r] for line, r in zip(lines, right, strict=True)])
    found = []
    for basis in combinations(range(n), len(table)):
        part = reduced([[line[j] for j in basis] + [line[-1]] for line in table])
        if len(part) < len(basis) or any(line[:-1] != unit(k, len(basis)) for k, line in enumerate(part)):
            continue
        if all(line[-1] >= 0 for line in part):
            x = [Fraction(0)] * n
            for j, line in zip(basis, part, strict=True):
                x[j] = line[-1]
            found.append(x)
    return found


def unit(k: int, n: int) -> list[Fraction]:
    return [Fraction(int(i == k)) for i in range(n)]


def reduced(table: list[list[Fraction]]) -> list[list[Fraction]]:
    """Gauss–Jordan elimination; rows that become zero are dropped."""
    table, lead = [list(line) for line in table], 0
    for column in range(len(table[0]) - 1):
        pivot = next((i for i in range(lead, len(table)) if table[i][column] != 0), None)
        if pivot is None:
            continue
        table[lead], table[pivot] = table[pivot], table[lead]
        table[lead] = [v / table[lead][column] for v in table[lead]]
        for i in range(len(table)):
            if i != lead and table[i][column] != 0:
                factor = table[i][column]
                table[i] = [v - factor * w for v, w in zip(table[i], table[lead], strict=True)]
        lead += 1
    return table[:lead]


def least(claim: Claim, corners: list[list[Fraction]]) -> Fraction:
    """min over P of what the claim asks to exceed its threshold: at a vertex, for each rival."""
    costs = [Fraction(c) for c in claim.costs.tolist()]
    return min(
        sum((c * v for c, v in zip(costs, x, strict=True)), Fraction(0)) - (x[j] if j is not None else 0)
        for x in corners
        for j in (claim.rivals or (None,))
    )


def shares(n: int) -> st.SearchStrategy[list[float]]:
    """Rows of n multiples of 1/64 that sum to 1 exactly, in floating point too; zeros are allowed."""
    cuts = st.lists(st.integers(0, 64), min_size=n - 1, max_size=n - 1).map(sorted)
    return cuts.map(lambda c: [(b - a) / 64 for a, b in zip([0, *c], [*c, 64], strict=True)])


@st.composite
def heads(draw: st.DrawFn, *, exponents: tuple[int, ...] = (0,)) -> tuple[list[float], list[list[float]]]:
    n, width = draw(st.integers(2, 5)), draw(st.integers(1, 2))
    scale = [2.0 ** draw(st.sampled_from(exponents)) for _ in range(width)]
    number = st.integers(-3, 3)
    values = [[draw(number) * s for s in scale] for _ in range(n)]
    return draw(shares(n)), values


def tensors(row: list[float], values: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(row, dtype=torch.float64)[None, None], torch.tensor(values, dtype=torch.float64)[None]


def questions(row: list[float]) -> list[Claim]:
    """Argmax, mass, order and expected position, as the row itself decides them."""
    n = len(row)
    x = torch.tensor(row, dtype=torch.float64)
    best = int(x.argmax())
    eye = torch.eye(n, dtype=torch.float64)
    part = torch.zeros(n, dtype=torch.float64)
    part[: (n + 1) // 2] = 1.0
    held = float(part @ x)
    mass = Claim(part, 0.5, strict=False) if held >= 0.5 else Claim(-part, -0.5)
    place = torch.arange(n, dtype=torch.float64)
    mean = float(place @ x)
    second = int((x - 2 * eye[best]).argmax())
    return [
        Claim(eye[best], rivals=tuple(j for j in range(n) if j != best)),
        mass,
        Claim(eye[best] - eye[second]),
        Claim(place, mean - 0.5, strict=False),
        Claim(-place, -mean - 0.5, strict=False),
    ]


def assert_right(claim: Claim, verdict: str, exact: Fraction, *, decided: bool = True) -> None:
    """The verdict against the exact minimum: never wrong; and, off a tie and well conditioned, not open.

    Ill-conditioned values (decided=False) may leave a claim open, or refuted by a row whose output is the same to 1e-10
    and not exactly; certified it must never be.
    """
    gap = exact - Fraction(claim.threshold)
    if verdict == "certified":
        assert gap > 0 or (gap == 0 and not claim.strict)
    if verdict == "refuted" and decided:
        assert gap < 0
    if decided and abs(gap) > Fraction(1, 10**7):
        assert verdict == ("certified" if gap > 0 else "refuted")


@FEW
@given(heads())
def test_equal_to_exact_programs(head):
    row, values = head
    corners = vertices(row, values)
    a, v = tensors(row, values)
    for claim in questions(row):
        found = decide_rows(a, v, [[claim]])[0]
        assert_right(claim, found.verdict, least(claim, corners))
        assert check_decision(found, a[:, 0], v, torch.ones(1, len(row), dtype=torch.bool), torch.ones(1), [claim])


@FEW
@given(heads(), st.data())
def test_ranges_are_the_exact_ones(head, data):
    row, values = head
    corners = vertices(row, values)
    costs = torch.tensor([data.draw(st.integers(-4, 4)) for _ in row], dtype=torch.float64)
    a, v = tensors(row, values)
    found = decide_row(Heads(a, v, torch.ones(1)), 0, [], costs)
    ends = [
        sum((Fraction(c) * x for c, x in zip(costs.tolist(), corner, strict=True)), Fraction(0)) for corner in corners
    ]
    assert found.lower == pytest.approx(float(min(ends)), abs=1e-8)
    assert found.upper == pytest.approx(float(max(ends)), abs=1e-8)
    assert Fraction(found.lower) <= min(ends)
    assert Fraction(found.upper) >= max(ends)


@FEW
@given(heads(exponents=(0, -10, -20, -40, 30)))
def test_never_wrong_on_ill_conditioned_values(head):
    row, values = head
    corners = vertices(row, values)
    a, v = tensors(row, values)
    for claim in questions(row):
        found = decide_rows(a, v, [[claim]])[0]
        assert_right(claim, found.verdict, least(claim, corners), decided=False)


@FEW
@given(heads(), st.integers(1, 5), st.sampled_from([2.0**-20, 2.0**-30, 2.0**-44]))
def test_never_wrong_where_keys_are_nearly_equal(head, key, nudge):
    row, values = head
    assume(key < len(row))
    values[key] = [v + nudge for v in values[0]]
    corners = vertices(row, values)
    a, v = tensors(row, values)
    for claim in questions(row):
        assert_right(claim, decide_rows(a, v, [[claim]])[0].verdict, least(claim, corners), decided=False)


@FEW
@given(heads(), st.integers(1, 6))
def test_a_causal_row_is_decided_on_the_keys_it_sees(head, seen):
    row, values = head
    seen = min(seen, len(row))
    total = sum(row[:seen])
    assume(total == 0.5 or total == 1.0 or total == 0.25)  # division leaves exact numbers
    short = [w / total for w in row[:seen]]
    corners = [[*x, *[Fraction(0)] * (len(row) - seen)] for x in vertices(short, values[:seen])]
    a, v = tensors([*short, *[0.0] * (len(row) - seen)], values)
    visible = (torch.arange(len(row)) < seen)[None, None]
    for claim in questions(a[0, 0].tolist()):
        claim = replace(claim, rivals=tuple(j for j in claim.rivals if j < seen))
        if claim.rivals or not torch.equal(claim.costs.abs().sum(), torch.tensor(1.0).double()):
            found = decide_rows(a, v, [[claim]], visible=visible)[0]
            assert_right(claim, found.verdict, least(claim, corners))
            if found.alternative is not None:
                assert not found.alternative[0, seen:].any()


@FEW
@given(heads(), st.sampled_from([0.25, 0.5]))
def test_a_sink_is_a_key_with_value_zero(head, share):
    """Rows that leave mass to a sink: decided with the sink as one more key, and differently without it."""
    row, values = head
    with_sink = [*[w * (1 - share) for w in row], share]
    zero = [*values, [0.0] * len(values[0])]
    corners = vertices(with_sink, zero)
    a, v = tensors(with_sink, zero)
    n = len(row)
    for claim in questions(with_sink):
        claim = replace(claim, rivals=tuple(j for j in claim.rivals if j < n))
        assert_right(claim, decide_rows(a, v, [[claim]])[0].verdict, least(claim, corners))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(heads(), heads(), st.sampled_from([(1.0, 1.0), (0.5, 0.5), (0.25, 1.0)]))
def test_several_heads_against_the_product_polytope(first, second, weights):
    n = min(len(first[0]), len(second[0]))
    assume(all(sum(row[:n]) == 1.0 for row, _ in (first, second)))
    width = max(len(first[1][0]), len(second[1][0]))
    rows = [row[:n] for row, _ in (first, second)]
    values = [[v + [0.0] * (width - len(v)) for v in vals[:n]] for _, vals in (first, second)]
    pairs = product(vertices(rows[0], values[0]), vertices(rows[1], values[1]))
    w = [Fraction(x) for x in weights]
    corners = [[w[0] * p + w[1] * q for p, q in zip(x, y, strict=True)] for x, y in pairs]
    a = torch.tensor(rows, dtype=torch.float64)[:, None]
    v = torch.tensor(values, dtype=torch.float64)
    total = (torch.tensor(weights, dtype=torch.float64)[:, None] * a[:, 0]).sum(0)
    for claim in questions(total.tolist()):
        found = decide_rows(a, v, [[claim]], weights=torch.tensor(weights))[0]
        assert_right(claim, found.verdict, least(claim, corners))
        assert check_decision(found, a[:, 0], v, torch.ones(2, n, dtype=torch.bool), torch.tensor(weights), [claim])


def softmax_head(n: int, width: int, seed: int, queries: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    rows = torch.softmax(3 * torch.randn(1, queries, n, generator=g), -1)
    return rows, torch.randn(1, n, width, generator=g)


def test_argmax_among_many_is_what_one_cold_program_for_each_rival_says():
    from scipy.optimize import linprog

    rows, values = softmax_head(40, 14, 0, queries=4)
    seen = set()
    for q in range(rows.shape[1]):
        a = rows[0, q].double().numpy()
        a, v = a / a.sum(), values[0].double().numpy()
        best = int(a.argmax())
        right = np.append(a @ v, 1.0)
        gaps = []
        for j in range(40):
            if j != best:
                cost = np.zeros(40)
                cost[best], cost[j] = 1.0, -1.0
                gaps.append(linprog(cost, A_eq=np.vstack([v.T, np.ones(40)]), b_eq=right, bounds=(0, None)).fun)
        claim = Claim(torch.eye(40)[best], rivals=tuple(j for j in range(40) if j != best))
        found = decide_rows(rows[:, q : q + 1], values, [[claim]])[0]
        assert found.verdict == ("certified" if min(gaps) > 0 else "refuted")
        if found.verdict == "certified":
            assert 0 < found.margin <= min(gaps) + 1e-8
        seen.add(found.verdict)
    assert seen == {"certified", "refuted"}  # both kinds were met


@pytest.mark.parametrize("rank", [64, 40])
def test_a_row_of_very_many_keys_is_what_two_cold_programs_say(rank, monkeypatch):
    """Whichever solver is used; thresholds on either side of the least value, and one nearer to it than a solver comes."""
    from scipy.optimize import linprog

    from whence.core.attention import head_rows

    rows, values = softmax_head(700, rank, 3, queries=2)
    values = torch.cat([values, values[..., :24]], -1)  # columns twice: the rank is less than the width
    cost = torch.zeros(700, dtype=torch.float64)
    words = {"certified": 0, "refuted": 0, "open": 0}
    for q in range(2):
        a, v = rows[0, q].double().numpy(), values[0].double().numpy()
        a = a / a.sum()
        cost[:] = 0.0
        cost[np.argsort(-a)[:20].copy()] = 1.0
        matrix, right = np.vstack([v[:, :rank].T, np.ones(700)]), np.append(a @ v[:, :rank], 1.0)
        least, most = (
            sign * linprog(sign * cost.numpy(), A_eq=matrix, b_eq=right, bounds=(0, None)).fun for sign in (1, -1)
        )
        for threshold in (least - 1e-4, least + 1e-4, least):
            claim = Claim(cost.clone(), threshold=threshold)
            answers = []
            for many in (512, 10_000):
                monkeypatch.setattr(head_rows, "_MANY_KEYS", many)
                answers.append(decide_row(Heads(rows, values, torch.ones(1)), q, [claim], cost))
            for answer in answers:
                assert (answer.lower, answer.upper) == pytest.approx((least, most), abs=2e-8)
                assert answer.lower <= least + 1e-9
                assert answer.upper >= most - 1e-9
                one, seen = torch.from_numpy(a)[None], torch.ones(1, 700, dtype=torch.bool)
                assert check_decision(answer, one, values.double(), seen, torch.ones(1), [claim])
            if threshold != least:
                assert answers[0].verdict == answers[1].verdict == ("certified" if threshold < least else "refuted")
            words[answers[0].verdict] += 1
    assert words["certified"] >= 2
    assert words["refuted"] >= 2


def test_ends_that_met_too_far_apart_for_a_claim_are_computed_again(monkeypatch):
    """A threshold just below what the simplex method proves: the interior-point method alone would leave it open."""
    from whence.core.attention import head_rows

    rows, values = softmax_head(700, 40, 3, queries=3)
    for q in range(3):
        cost = torch.zeros(700, dtype=torch.float64)
        cost[rows[0, q].argsort(descending=True)[:20]] = 1.0
        monkeypatch.setattr(head_rows, "_MANY_KEYS", 10_000)
        exact = decide_row(Heads(rows, values, torch.ones(1)), q, [Claim(cost)], cost).lower
        claim = Claim(cost, threshold=exact - 1e-11)
        monkeypatch.setattr(head_rows, "_MANY_KEYS", 512)
        assert decide_row(Heads(rows, values, torch.ones(1)), q, [claim], cost).verdict == "certified"


def test_what_holds_with_equality_is_certified_where_equality_will_do():
    rows, values = softmax_head(6, 2, 3, queries=1)
    a, seen = rows[:, 0].double() / rows[:, 0].double().sum(), torch.ones(1, 6, dtype=torch.bool)
    for strict, word in ((False, "certified"), (True, "open")):
        claim = Claim(torch.zeros(6, dtype=torch.float64), strict=strict)  # 0 ≥ 0, and 0 > 0
        found = decide_rows(rows, values, [[claim]])[0]
        assert found.verdict == word
        assert check_decision(found, a, values.double(), seen, torch.ones(1), [claim])
        lying = replace(found, verdict="certified")
        assert check_decision(lying, a, values.double(), seen, torch.ones(1), [claim]) == (not strict)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_what_breaks_a_claim_is_measured_by_the_claims_own_size(size):
    """The same claim in other units: the same answer, just below and just above what a solver leaves undecided."""
    row, costs = np.array([0.5, 0.5]), torch.tensor([0.0, size], dtype=torch.float64)
    for part, broken in ((0.5, False), (2.0, True)):
        assert breaks(Claim(costs, threshold=size * (0.5 + part * BREACH)), row) is broken


def test_a_refutation_has_the_same_output_to_1e_10():
    rows, values = softmax_head(80, 24, 1, queries=8)
    met = 0
    for q in range(8):
        best = int(rows[0, q].argmax())
        claim = Claim(torch.eye(80)[best], rivals=tuple(j for j in range(80) if j != best))
        found = decide_rows(rows[:, q : q + 1], values, [[claim]])[0]
        if found.alternative is None:
            continue
        met += 1
        a = rows[0, q].double()
        other, v = found.alternative[0], values[0].double()
        assert torch.linalg.vector_norm((other - a / a.sum()) @ v) <= 1e-10 * torch.linalg.vector_norm(a @ v)
        assert float(other.min()) >= 0
        assert float(other.sum()) == pytest.approx(1.0, abs=1e-11)
        assert int(other.argmax()) != best
    assert met >= 3


def test_a_check_refuses_what_was_changed():
    rows, values = softmax_head(50, 20, 2, queries=8)
    seen, one = torch.ones(1, 50, dtype=torch.bool), torch.ones(1)
    met = set()
    for q in range(8):
        a = rows[:, q].double() / rows[:, q].double().sum()
        best = int(a[0].argmax())
        claims = [Claim(torch.eye(50)[best], rivals=tuple(j for j in range(50) if j != best))]
        part = torch.zeros(50, dtype=torch.float64)
        part[:25] = 1.0
        found = decide_row(Heads(rows[:, q : q + 1], values, one), 0, claims, part)
        assert check_decision(found, a, values.double(), seen, one, claims)
        wrong = [replace(found, lower=found.lower + 1e-6), replace(found, upper=found.upper - 1e-6)]
        if found.verdict == "certified":
            fewer = {n: getattr(found, n)[:-1] for n in ("costs", "thresholds", "strict", "bounds", "duals")}
            wrong += [
                replace(found, verdict="refuted"),
                replace(found, **fewer),  # a rival without a proof
                replace(found, bounds=found.bounds + 1.0),
                replace(found, duals=-found.duals),
                replace(found, costs=found.costs + 1.0),  # a proof of something else
            ]
        else:
            wrong += [
                replace(found, verdict="certified"),
                replace(found, alternative=None),
                replace(found, alternative=a),  # the same output, the same decision
                replace(found, alternative=found.alternative.roll(1, -1)),  # another output
            ]
        met.add(found.verdict)
        assert not any(check_decision(bad, a, values.double(), seen, one, claims) for bad in wrong)
    assert met == {"certified", "refuted"}


def test_a_tie_is_never_certified():
    rows = torch.tensor([[[0.25, 0.25, 0.5]]], dtype=torch.float64)
    values = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]], dtype=torch.float64)  # a unique row
    claim = Claim(torch.eye(3)[0], rivals=(1,))
    assert decide_rows(rows, values, [[claim]])[0].verdict == "open"


def test_bad_input_is_refused():
    rows, values = softmax_head(5, 2, 3)
    with pytest.raises(InputError, match="2 lists of claims"):
        decide_rows(rows, values, [[], []])
    with pytest.raises(InputError, match="weights"):
        decide_rows(rows, values, [[]] * 4, weights=torch.tensor([-1.0]))
    with pytest.raises(InputError, match="expected"):
        decide_rows(rows[0], values[0], [[]])
