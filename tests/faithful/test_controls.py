"""Controls against probabilities found by hand; robustness of equal, and of different, models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau
from transformers import BertConfig, BertForSequenceClassification

import whence
from tests.faithful.faithful_models import CONFIG, shaken
from tests.faithful.test_faithfulness import constant
from whence.errors import InputError
from whence.faithful.controls import AttentionControls, _jsd, _nearly_equal, tau
from whence.model.load import Model
from whence.reading.rerun.substitution import Replace

TEXTS = ["the film was not very good and the film was dull", "a fine film and a good one"]


@pytest.fixture(scope="module")
def found(classifier: Model) -> AttentionControls:
    return whence.attention_controls(classifier, TEXTS, permutations=5, budget=1.0)


def test_uniform_attention_by_hand(classifier: Model, found: AttentionControls) -> None:
    trace = whence.trace(classifier, TEXTS[0])
    n = len(trace.tokens)
    flat = torch.full((3, n, n), 1 / n)
    own = torch.softmax(trace.logits.double(), -1)
    for layers, name in (([1], "uniform_last"), ([0, 1], "uniform_all")):
        changed = whence.substitute(trace, [Replace(layer, flat) for layer in layers], model=classifier).logits
        assert changed is not None
        expected = float((torch.softmax(changed.double(), -1) - own).abs().sum() / 2)
        assert getattr(found.texts[0], name) == pytest.approx(expected, abs=1e-6)


def test_what_the_controls_say(found: AttentionControls) -> None:
    for text in found.texts:
        assert text.permuted_all > 0
        assert text.other < 1e-3  # the same outputs, the same prediction
        assert text.attention_gradient is not None
    table = found.table()
    assert table.loc["permuted_row", "texts"] == 2
    said = " ".join(found.verdict())
    assert "Uniform attention in the last layer keeps" in said
    assert "Kendall τ of attention with gradients" in said


def test_the_nearly_equal_row_is_within_its_tolerance(classifier: Model, found: AttentionControls) -> None:
    trace = whence.trace(classifier, TEXTS[0])
    last, tolerance = trace[1], 0.05
    rows = _nearly_equal(last, 0, tolerance, seed=0).double()
    assert torch.allclose(rows.sum(-1), torch.ones(len(rows), dtype=torch.float64), atol=1e-6)
    assert float(rows.min()) >= 0
    for place, row in enumerate(rows):
        values = last.values[place].double()
        own = last.attention[place, 0].double() @ values
        moved = (row @ values - own).abs().max() / own.square().mean().sqrt()
        assert float(moved) <= tolerance * (1 + 1e-4)
    # The exact set is a part of the set within the tolerance, so that more room moves the row at least as far.
    wider = whence.attention_controls(classifier, TEXTS[:1], permutations=1, budget=0.5, tolerance=0.5)
    assert wider.texts[0].near_jsd > found.texts[0].near_jsd
    assert "within 50%" in " ".join(wider.verdict())
    with pytest.raises(InputError, match="tolerance=0"):
        whence.attention_controls(classifier, TEXTS[:1], tolerance=0.0)


def test_a_model_trained_with_uniform_attention(classifier: Model) -> None:
    with pytest.raises(InputError, match="--variant uniform"):
        whence.attention_controls(classifier, TEXTS, trained_uniform=classifier)
    config = whence.IdentifiableConfig(
        vocab_size=CONFIG["vocab_size"], hidden_size=12, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16,
        max_position_embeddings=40, attention="uniform",
    )  # fmt: skip
    torch.manual_seed(0)
    control = Model(shaken(whence.IdentifiableForSequenceClassification(config)), classifier.tokenizer, name="control")
    found = whence.attention_controls(classifier, TEXTS, permutations=1, budget=0.5, trained_uniform=control)
    expected = []
    for text in TEXTS:
        ids = classifier.tokenizer(text, return_tensors="pt")
        own, theirs = (m.model(input_ids=ids["input_ids"]).logits.argmax() for m in (classifier, control))
        expected.append(bool(own == theirs))
    assert [t.label_trained for t in found.texts] == expected
    assert f"gives {sum(expected)} of 2 of these labels" in " ".join(found.verdict())


def test_tau_and_jsd() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.random(9), draw.random(9)
    assert tau(x, y) == pytest.approx(kendalltau(x, y)[0])
    assert tau(np.ones(5), np.arange(5.0)) is None
    p, q = np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])
    assert _jsd(p, q) == pytest.approx(np.log(2))
    assert _jsd(p, p) == pytest.approx(0.0)


def test_robustness_of_equal_and_different_models(classifier: Model) -> None:
    torch.manual_seed(9)
    labels = {"num_labels": 2, "id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    other = Model(
        shaken(BertForSequenceClassification(BertConfig(**CONFIG, **labels))), classifier.tokenizer, name="other"
    )
    texts = [*TEXTS, "the film was bad", "not a very good film"]
    same = (
        whence.robustness([classifier, classifier], texts, ["rollout", constant], random=1).table().set_index("method")
    )
    assert same.loc["rollout", "spearman"] == pytest.approx(1.0)
    assert same.loc["constant", "undefined"] == 4  # a constant has no rank correlation: not 1, not 0
    apart = whence.robustness([classifier, other], texts, ["rollout", "alti"], random=1, target="yes").table()
    assert (apart["spearman"] < 0.999).all()
    assert "delta_drop" in apart.columns


def test_bad_input(classifier: Model, masked: Model) -> None:
    with pytest.raises(InputError, match="at least two"):
        whence.robustness([classifier], TEXTS)
    with pytest.raises(InputError, match="no classifier"):
        whence.attention_controls(masked, "the film was [MASK]", permutations=1)
    with pytest.raises(InputError, match="permutations=0"):
        whence.attention_controls(classifier, TEXTS, permutations=0)
