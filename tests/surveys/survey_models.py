"""A tiny encoder with a tokenizer, heads of 4, so that texts of 6 words already have alternatives."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from tests.faithful.faithful_models import WORDS, tokenizer


def save_tiny(folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(WORDS) + 5, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=40, pad_token_id=0,
    )  # fmt: skip
    model = BertModel(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def some_texts(n: int = 30) -> list[str]:
    """Texts of 3 to 17 words; no two alike."""
    return [" ".join(WORDS[(i * 7 + k * (1 + i % 5)) % len(WORDS)] for k in range(3 + i % 15)) for i in range(n)]
