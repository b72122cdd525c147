"""Decisions on traces: proved, refuted in the model, saved, named; on an encoder, a causal decoder and one with sinks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

import whence
from conformance.zoo import build
from whence import rules
from whence.attention.decide import Decisions
from whence.errors import InputError
from whence.model.load import Model

FAMILIES = ("bert", "llama", "gpt_oss")


@pytest.fixture(scope="module")
def traces():
    made = {}
    ids = torch.randint(5, 60, (1, 30), generator=torch.Generator().manual_seed(0))
    for name in FAMILIES:
        made[name] = whence.trace(Model(build(name).model), {"input_ids": ids})
    return made


def test_the_families_are_what_they_stand_for(traces):
    assert traces["bert"][0].visible is None
    assert traces["llama"][0].causal
    assert traces["gpt_oss"][0].sink is not None


def polytope(trace, layer, head, query):
    """The recorded row, its values and the equalities of its polytope, from the trace alone; a sink is a last key."""
    at = trace[layer]
    row, values = at.attention[head, query].double(), at.values[head].double()
    seen = at.visible_mask if at.visible_mask.dim() == 2 else at.visible_mask[head]
    seen = seen[query]
    if at.sink is not None:
        row = torch.cat([row, at.sink[head, query].double()[None]])
        values = torch.cat([values, torch.zeros(1, values.shape[1], dtype=torch.float64)])
        seen = torch.cat([seen, torch.tensor([True])])
    row = row * seen
    return (row / row.sum()).numpy(), values.numpy(), seen.numpy()


@pytest.mark.parametrize("family", FAMILIES[1:])  # the encoder's random heads are flat: nothing is certified there
def test_no_feasible_row_decides_otherwise_where_certified(traces, family):
    """Random corners of the polytope, by another solver: none of them has another argmax."""
    trace = traces[family]
    # The heaviest key among the lightest ones: what also flat random heads decide for certain, now and then.
    few = lambda _query, row: [int(row.argmax()), *(k for k in row.argsort().tolist() if row[k] > 0)][:3]  # noqa: E731
    found = whence.decide(trace, rules.argmax(few), layer=1, head=2)
    generator = np.random.default_rng(0)
    tried = 0
    for query in [q for q, word in zip(found.queries, found.verdicts, strict=True) if word == "certified"][-6:]:
        row, values, seen = polytope(trace, 1, 2, query)
        equal = np.vstack([values[seen].T, np.ones(seen.sum())])
        for _ in range(6):
            result = linprog(generator.normal(size=seen.sum()), A_eq=equal, b_eq=equal @ row[seen], bounds=(0, None))
            if result.x is None:
                continue
            x = np.zeros(len(row))
            x[seen] = result.x
            tried += 1
            best, *rest = few(query, torch.from_numpy(row[:30]))
            assert all(x[best] > x[k] for k in rest)
    assert tried >= 6


@pytest.mark.parametrize("family", FAMILIES)
def test_a_refutation_is_verified(traces, family):
    """To 1e-10 on the recorded tensors; in the model, beside random rows as far away."""
    trace = traces[family]
    found = whence.decide(trace, rules.argmax(), layer=0, heads=[0, 1])
    assert found.counts["refuted"] >= 3
    for query, word in zip(found.queries, found.verdicts, strict=True):
        if word != "refuted":
            continue
        total = 0.0
        for head, other in enumerate(found.alternative(query)):
            row, values, seen = polytope(trace, 0, head, query)
            x = other.numpy()
            assert x.min() >= 0
            assert abs(x.sum() - 1) < 1e-11
            assert not x[~seen].any()
            assert np.linalg.norm((x - row) @ values) <= 1e-10 * np.linalg.norm(row @ values)
            total = total + x[:30] / 2
        assert total.argmax() != (trace[0].attention[:2, query].double().mean(0)).argmax()
    outcome = found.verification
    assert outcome.head_output < 1e-5
    assert outcome.logits < 1e-5
    assert outcome.control_logits > 1e3 * outcome.logits


def test_what_the_model_does_notice_is_not_called_refuted(traces):
    """An alternative with another output, smuggled in: the model's outputs change, and the verdict falls to open."""
    found = whence.decide(traces["bert"], rules.argmax(), layer=0, head=0)
    place = found.verdicts.index("refuted")
    wrong = replace(found.decisions[place], alternative=found.decisions[place].alternative.roll(3, -1))
    broken = replace(found, decisions=(*found.decisions[:place], wrong, *found.decisions[place + 1 :]))
    assert broken.verify().verdicts[place] == "open"
    assert not broken.check()


def test_half_precision_is_judged_in_its_own_dtype(traces):
    model = build("bert").model.to(torch.bfloat16)
    trace = whence.trace(Model(model), dict(traces["bert"].inputs))
    found = whence.decide(trace, rules.argmax(), layer=0, head=0)
    assert found.counts["refuted"] > 0
    assert found.check()
    assert found.verification.control_logits > 3 * found.verification.logits


def test_without_a_model_nothing_is_called_refuted(traces, tmp_path):
    trace = whence.Trace.load(traces["bert"].save(tmp_path / "trace.safetensors"))
    found = whence.decide(trace, rules.argmax(), layer=0, head=0)
    assert found.counts["refuted"] == 0
    assert "not verified in the model" in " ".join(found.sentences())
    assert found.verify(traces["bert"].model).counts["refuted"] > 0
    assert whence.decide(traces["bert"], rules.argmax(), layer=0, head=0, verify=False).counts["refuted"] == 0


def test_a_sum_and_a_mean_decide_alike_and_add_intervals(traces):
    rule = rules.mass([1, 2, 3, 9], at_least=0.2)
    one = [whence.decide(traces["llama"], rule, layer=0, head=h) for h in (0, 3)]
    both = whence.decide(traces["llama"], rule, layer=0, heads=[0, 3], combine="sum")
    mean = whence.decide(traces["llama"], rule, heads=[(0, 0), (0, 3)])
    torch.testing.assert_close(both.lower, one[0].lower + one[1].lower, atol=1e-9, rtol=0)
    torch.testing.assert_close(both.upper, one[0].upper + one[1].upper, atol=1e-9, rtol=0)
    torch.testing.assert_close(mean.upper, both.upper / 2, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("rule", "answer"),
    [
        (rules.argmax([3, 7]), {"#", "3", "7"}),
        (rules.order(3, 7), {"over"}),
        (rules.above(4, 0.02), {"0.02"}),
        (rules.expected(within=2.0), {"±"}),
        (rules.linear(torch.linspace(-1, 1, 30)), {"0"}),
        (rules.mass(rules.around_peak(2), label="the peak"), {"the peak"}),
        (rules.mass({20: [1, 2], 25: [3]}, at_least=0.1), {"0.1"}),
    ],
)
def test_every_rule_answers_checks_and_prints(traces, rule, answer):
    found = whence.decide(traces["llama"], rule, layer=1, head=0, queries=[20, 25])
    assert found.check()
    assert len(found.to_frame()) == 2
    assert all(any(a in s for a in answer) for s in found.sentences())
    assert set(found.verdicts) <= {"certified", "refuted", "open"}
    assert found.to_dict()["checked"] is True


def test_saved_and_loaded_it_still_checks_and_a_changed_file_does_not(traces, tmp_path):
    found = whence.decide(traces["gpt_oss"], rules.argmax(), layer=0, heads=[0, 1])
    again = Decisions.load(found.save(tmp_path / "decisions.safetensors"))
    assert again.verdicts == found.verdicts
    assert again.answers == found.answers
    assert again.check()
    assert again.verification.to_dict() == found.verification.to_dict()
    with pytest.raises(InputError, match="no trace"):
        again.verify()
    assert not replace(again, verdicts=tuple("certified" for _ in again.verdicts)).check()
    assert not replace(again, values=again.values * 1.01).check()
    assert not replace(found, rows=found.rows.roll(1, 1)).check()


def test_names_find_keys_and_queries(traces):
    names = [f"C{i}" for i in range(30)]
    found = whence.decide(traces["bert"], rules.order("C3", "C9"), layer=0, head=0, query="C12", names=names)
    assert found.queries == (12,)
    assert "C12" in found.sentences()[0]
    assert "C3" in found.answers[0]


def test_a_figure_is_drawn(traces):
    found = whence.decide(traces["bert"], rules.argmax(), layer=0, head=0)
    axes = found.plot()
    assert len(axes.get_yticklabels()) == 30
    assert str(found.counts["refuted"]) in axes.get_legend().get_texts()[1].get_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give one head"),
        ({"heads": [0]}, "give the layer"),
        ({"layer": 0, "heads": [1, 1]}, "twice"),
        ({"layer": 0, "head": 9}, "no head 9"),
        ({"layer": 9, "head": 0}, "no layer 9"),
        ({"layer": 0, "head": 0, "query": 99}, "out of range"),
        ({"layer": 0, "head": 0, "query": 1, "queries": [1]}, "both given"),
        ({"layer": 0, "head": 0, "queries": []}, "no query"),
        ({"layer": 0, "head": 0, "combine": "max"}, "combine='max'"),
        ({"layer": 0, "head": 0, "names": ["a"]}, "1 names"),
    ],
)
def test_what_cannot_be_asked_is_refused(traces, options, message):
    with pytest.raises(InputError, match=message):
        whence.decide(traces["bert"], rules.argmax(), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rules.mass([1], at_least=2.0), "at_least=2.0"),
        (lambda: rules.above(1, -0.1), "threshold=-0.1"),
        (lambda: rules.path(median=4), "median=4"),
    ],
)
def test_rules_refuse_what_means_nothing(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (rules.order(3, 3), "twice"),
        (rules.linear([1.0, 2.0]), "one for each key"),
        (rules.expected(within=-1.0), "negative"),
        (rules.mass({5: [1]}), "no keys for query 4"),
        (rules.argmax([29]), "sees none"),
    ],
)
def test_a_rule_that_does_not_fit_the_row_is_refused(traces, rule, message):
    with pytest.raises(InputError, match=message):
        whence.decide(traces["llama"], rule, layer=0, head=0, query=4)
