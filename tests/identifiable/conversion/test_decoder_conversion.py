"""Conversion of decoders, experimental: plain weights for ALiBi and no positions, a refusal with the reason for RoPE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import whence
from tests.identifiable.test_decoder import make
from whence.errors import ModelError
from whence.identifiable.training.documents import demo_documents
from whence.identifiable.training.vocabulary import train_byte_tokenizer

TEXTS = list(demo_documents(60).train)


def loaded(**fields: Any) -> whence.Model:
    tokenizer = train_byte_tokenizer(TEXTS, vocab_size=300, max_length=128)
    return whence.Model(make(dtype=torch.float32, keys="free", vocab_size=len(tokenizer), **fields), tokenizer)


@pytest.mark.parametrize("positions", ["alibi", "none"])
def test_a_decoder_without_rotary_positions_becomes_unique_and_stays_plain_weights(
    positions: str, tmp_path: Path
) -> None:
    model = loaded(position_embedding_type=positions)
    with pytest.raises(ModelError, match="experimental"):
        whence.tie_keys(model, TEXTS, steps=0, lengths=())
    made = whence.tie_keys(model, TEXTS, steps=2, lengths=(), max_length=64, experimental=True)
    assert whence.uniqueness(model, search=0).answer.startswith("unique up to 17 tokens")
    assert whence.uniqueness(made.model, search=0).answer == "unique at every length by Theorem A"
    made.save(tmp_path)
    again = whence.load(str(tmp_path)).model
    assert type(again) is type(model.model)
    assert again.config.keys == "free"  # an ordinary key matrix, W_K = W_V·M
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, made.model.model(ids).logits)


def test_rotary_positions_are_refused_also_as_an_experiment() -> None:
    with pytest.raises(ModelError, match="RoPE"):
        whence.tie_keys(loaded(), TEXTS, steps=0, lengths=(), experimental=True)
