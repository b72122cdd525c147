"""A tiny random model with a tokenizer of whole words, and waiting for its jobs."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors

import whence

TEXT = "the old doctor told the nurse that she would not leave the ward before the storm was over"
WORDS = tuple(dict.fromkeys([*TEXT.split(), "because", "roads", "had", "been", "closed"]))


def tiny_model(name: str = "tiny") -> Any:
    """BERT with two layers of two heads of 8, and a tokenizer of whole words."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS, ",", "."])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
        model_max_length=128,
    )  # fmt: skip
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=128,
    )  # fmt: skip
    model = BertForSequenceClassification(config).eval()
    return whence.Model(model, tokenizer, name=name)


def finished(client: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Wait for a job through its own events."""
    import json

    with client.stream("GET", f"/api/jobs/{job['id']}/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-2] == "event: end"
    return dict(json.loads(lines[-1].removeprefix("data: ")))
