"""The same weights with another configuration or another tokenizer are another model, and a run of it is another run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

import whence
from whence.errors import InputError
from whence.identifiable.training.vocabulary import train_tokenizer
from whence.model.identity import model_hashes

TEXTS = [f"The {a} {b} again." for a in ("cat", "dog", "old man", "small boat") for b in ("slept", "ran home", "sang")]


def bert(tokenizer, heads: int = 3, **options) -> whence.Model:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=60, hidden_size=24, num_hidden_layers=2, num_attention_heads=heads, intermediate_size=32,
        max_position_embeddings=128, **options,
    )  # fmt: skip
    return whence.Model(BertModel(config).eval(), tokenizer, name="tiny")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 60, 128)


def test_what_decides_a_model_is_hashed(tokenizer):
    one = model_hashes(bert(tokenizer))
    assert one == model_hashes(bert(tokenizer))
    tokenizer(["a", "a much longer text than the other"], padding=True, truncation=True)  # leaves its settings behind
    assert one == model_hashes(bert(tokenizer))
    other = model_hashes(bert(tokenizer, heads=2))
    assert {name for name in one if one[name] != other[name]} == {"configuration"}
    other = model_hashes(bert(train_tokenizer(TEXTS, 50, 128)))
    assert {name for name in one if one[name] != other[name]} == {"tokenizer"}
    there = bert(tokenizer)
    there.model.config._name_or_path = "elsewhere"
    there.model.config.output_hidden_states = True
    assert one == model_hashes(there)


def test_runs_refuse_another_configuration_and_tokenizer_of_the_same_weights(tokenizer, tmp_path: Path):
    model, turned = bert(tokenizer), bert(tokenizer, heads=2)
    assert model.weights_hash == turned.weights_hash

    def survey(one):
        whence.survey(one, TEXTS[:4], tmp_path / "survey", rows=1, without="alti")

    def tokens(one):
        whence.token_identifiability(one, TEXTS, maps=("naive",), bootstrap=5, checkpoint=tmp_path / "tokens")

    def convert(one):
        whence.tie_keys(one, TEXTS, 1, tokens=16, lengths=(), checkpoint=tmp_path / "c.safetensors")

    for run in (survey, tokens, convert):
        run(model)
        with pytest.raises(InputError, match=r"differs in .*configuration \(SHA-256"):
            run(turned)
    for run in (survey, tokens):
        with pytest.raises(InputError, match=r"differs in tokenizer \(SHA-256"):
            run(bert(train_tokenizer(TEXTS, 50, 128)))
