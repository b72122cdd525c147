"""Small models with a tokenizer, loaded once."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from tests.faithful.faithful_models import CONFIG, AdditiveForSequenceClassification, shaken, tiny_classifier, tokenizer
from whence.model.load import Model


@pytest.fixture(scope="session")
def additive() -> Model:
    return Model(AdditiveForSequenceClassification().eval(), tokenizer(), name="additive")


@pytest.fixture(scope="session")
def classifier() -> Model:
    return tiny_classifier()


@pytest.fixture(scope="session")
def masked() -> Model:
    torch.manual_seed(1)
    return Model(shaken(BertForMaskedLM(BertConfig(**CONFIG))), tokenizer(), name="tiny-mlm")
