"""Small models with a tokenizer, loaded once."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

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


@pytest.fixture(scope="session")
def translator() -> Model:
    torch.manual_seed(2)
    config = T5Config(
        vocab_size=CONFIG["vocab_size"], d_model=24, d_kv=8, num_heads=3, d_ff=32, num_layers=2, num_decoder_layers=2,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=3,
    )  # fmt: skip
    return Model(shaken(T5ForConditionalGeneration(config)), tokenizer(), name="tiny-t5")
