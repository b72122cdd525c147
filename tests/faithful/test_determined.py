"""Effective attention does not move under a doppelganger; certified bounds hold for every other attention that is found."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

import whence
from tests.faithful.faithful_models import WORDS
from whence.errors import InputError
from whence.faithful.contribution_bounds import contribution_bounds
from whence.faithful.determined import Determined, spearman
from whence.mixing.decomposition import decompose
from whence.model.load import Model
from whence.reading.trace import Trace

LONG = " ".join(WORDS)


@pytest.fixture(scope="module")
def narrow(classifier: Model) -> Model:
    """Heads of 4: at 28 tokens there is much room for other attention."""
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24,
        max_position_embeddings=64,
    )  # fmt: skip
    model = BertForSequenceClassification(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return Model(model, classifier.tokenizer, name="narrow")


@pytest.fixture(scope="module")
def traced(narrow: Model) -> Trace:
    found = whence.trace(narrow, LONG)
    assert isinstance(found, Trace)
    return found


@pytest.fixture(scope="module")
def found(traced: Trace) -> Determined:
    methods = ["effective", "effective-rollout", "rollout", "alti", "norms", "gradient"]
    return whence.determined(traced, methods, rows=[(0, 3)], budget=2.0)


def test_effective_attention_is_invariant_and_others_are_not(found: Determined) -> None:
    by_name = {a.method: a for a in found.agreements}
    assert found.total_variation > 0.05
    assert found.logit_change is not None
    assert found.logit_change < 1e-3
    for name in ("effective", "effective-rollout"):
        assert by_name[name].spearman == pytest.approx(1.0, abs=1e-3)
        assert by_name[name].kept == by_name[name].rows
    assert by_name["rollout"].spearman is not None
    assert by_name["rollout"].spearman < 0.99
    assert by_name["gradient"].kind == "map"
    assert by_name["gradient"].spearman is None
    said = " ".join(found.verdict())
    assert "Invariant by theorem: effective, effective-rollout" in said
    assert "from below" in said


def test_bounds_hold_for_other_attention_with_the_same_outputs(traced: Trace) -> None:
    """ALTI's and the norms' parts, written out for the doppelganger's weights, must lie inside the certified bounds."""
    other = whence.doppelganger(traced, budget=2.0, sample=1)
    moved = 0.0
    for layer, token in ((0, 3), (1, 0), (1, 9)):
        bounds = contribution_bounds(traced, layer, token)
        parts = decompose(traced.of()[layer])
        scale = 1.0 if parts.scale is None else parts.scale[token, 0].double()
        y = parts.state[token].double()
        for weights in (parts.attention[:, token].double(), other.values[layer][:, token]):
            t = torch.einsum("hk,hkd->kd", weights, parts.sources.double()) * scale
            t[token] += parts.own[token].double()
            alti = (y.abs().sum() - (y - t).abs().sum(-1)).numpy()
            norms = t.norm(dim=-1).numpy()
            slack = 1e-5
            assert (bounds.alti_low <= alti + slack).all()
            assert (alti <= bounds.alti_high + slack).all()
            assert (bounds.norms_low <= norms + slack).all()
            assert (norms <= bounds.norms_high + slack).all()
            moved = max(moved, float(np.abs(norms - bounds.norms).max()))
        least, most = bounds.shares()
        share = np.maximum(bounds.alti, 0) / np.maximum(bounds.alti, 0).sum()
        assert (least <= share + 1e-6).all()
        assert (share <= most + 1e-6).all()
    assert moved > 1e-3  # the alternatives did move what is bounded


def test_where_attention_is_unique_the_bounds_are_points(classifier: Model) -> None:
    traced = whence.trace(classifier, "a b c d")  # 6 tokens, heads of 8
    bounds = contribution_bounds(traced, 1, 2)
    assert np.allclose(bounds.alti_low, bounds.alti, atol=1e-5)
    assert np.allclose(bounds.alti_high, bounds.alti, atol=1e-5)
    assert np.allclose(bounds.norms_low, bounds.norms, atol=1e-5)
    assert bounds.largest_other()[1]
    unique = whence.determined(traced, ["alti"], budget=1.0)
    assert "only one" in " ".join(unique.verdict())


def test_bad_rows_and_constant_rows(traced: Trace) -> None:
    with pytest.raises(InputError, match="layer 9"):
        contribution_bounds(traced, 9, 0)
    with pytest.raises(InputError, match="altie"):
        whence.determined(traced, ["altie"])
    assert spearman(np.ones(4), np.arange(4.0)) is None
    assert spearman(np.array([1.0, 2, 3]), np.array([10.0, 20, 30])) == pytest.approx(1.0)
