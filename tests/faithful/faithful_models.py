"""Small models with a tokenizer, and one whose output is a sum over the words that are there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from whence.model.load import Model

WORDS = (*"abcdefghijklmnop", "good", "bad", "fine", "dull", "the", "film", "was", "not", "and", "very")
WEIGHTS = {word: 0.003 * (i - 13.37) for i, word in enumerate(WORDS)}


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {t: i for i, t in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{n}_token": f"[{n.upper()}]" for n in ("pad", "unk", "cls", "sep", "mask")}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=inputs, **names)


class AdditiveForSequenceClassification(nn.Module):
    """p(positive) = ½ + Σ of the weights of the words that are there, exactly: its best order is known."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([0.0] * 5 + [WEIGHTS[w] for w in WORDS], dtype=torch.float64))
        self.config = SimpleNamespace(label2id={"negative": 0, "positive": 1}, id2label={0: "negative", 1: "positive"})
        self.seen: list[Tensor] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        self.seen += [row[mask.bool()] for row, mask in zip(input_ids, attention_mask, strict=True)]
        positive = (0.5 + (self.weights[input_ids] * attention_mask).sum(-1)).clamp(1e-9, 1 - 1e-9)
        return SimpleNamespace(logits=torch.stack([1 - positive, positive], dim=-1).log())


def shaken(model: nn.Module) -> Any:
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


CONFIG: dict[str, Any] = {
    "vocab_size": len(WORDS) + 5, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 40, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def tiny_classifier() -> Model:
    """A random BERT that says "yes" or "no"."""
    torch.manual_seed(0)
    labels = {"num_labels": 2, "id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    return Model(shaken(BertForSequenceClassification(BertConfig(**CONFIG, **labels))), tokenizer(), name="tiny")
