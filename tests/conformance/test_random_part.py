"""Random configurations against the slow oracle: a few families from a fixed seed; `make conformance` draws 25 anew."""

import random

import pytest
import torch

import whence
from conformance import oracle
from conformance.random_part import Comparison, compare, configuration
from conformance.zoo import build, find

FAMILIES = ["bert", "llama", "gemma2", "gpt_neox"]  # post-norm, pre-norm, sandwich, parallel


@pytest.mark.parametrize("family", FAMILIES)
def test_measures_equal_the_oracle(family):
    chosen = configuration(find(family), random.Random(5))
    assert chosen
    outcome = compare(find(family), chosen, seed=5)
    assert not outcome.refused
    assert {"state", "attention", "alti", "norms", "rollout", "alti rolled out", "rollout rolled out"} <= set(
        outcome.errors
    )
    assert outcome.wrong == []


def test_a_wrong_number_is_called_wrong():
    assert Comparison("x", {}, {"alti": 2e-4, "norms": 1e-6, "state": float("nan")}).wrong == ["alti", "state"]


def test_the_oracle_refuses_a_trace_with_another_value():
    specimen = build("bert")
    layer = whence.trace(whence.Model(specimen.model), specimen.inputs)[0]
    terms, states = oracle.parts(layer)
    ours = oracle.alti(terms, states)
    layer.grouped_values[:, 3] *= 1.1
    moved, other = oracle.parts(layer)
    assert float((other - states).abs().max()) > 1e-3
    assert float((oracle.alti(moved, other) - ours).abs().max()) > 1e-4
    assert torch.allclose(ours.sum(1), torch.ones(len(ours), dtype=torch.float64))
