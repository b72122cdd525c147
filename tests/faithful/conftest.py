"""Small models with a tokenizer, loaded once."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from tests.faithful.faithful_models import CONFIG, AdditiveForSequenceClassification, shaken, tokenizer
from whence.model.load import Model


@pytest.fixture(scope="session")
def additive() -> Model:
    return Model(AdditiveForSequenceClassification().eval(), tokenizer(), name="additive")


@pytest.fixture(scope="session")
def classifier() -> Model:
    torch.manual_seed(0)
    labels = {"num_labels": 2, "id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    return Model(shaken(BertForSequenceClassification(BertConfig(**CONFIG, **labels))), tokenizer(), name="tiny")


@pytest.fixture(scope="session")
def masked() -> Model:
    torch.manual_seed(1)
    return Model(shaken(BertForMaskedLM(BertConfig(**CONFIG))), tokenizer(), name="tiny-mlm")
