"""Tiny random models of several families, for hardship that is not about numbers of note."""

from __future__ import annotations

from typing import Any

import torch

import whence

WORDS = [
    "the", "old", "doctor", "told", "nurse", "that", "she", "would", "not", "leave", "ward", "before", "storm", "was",
    "over", "because", "roads", "had", "been", "closed",
]  # fmt: skip


def tokenizer() -> Any:
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(WORDS)])
    }
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep", "mask")},
    )


def texts(count: int) -> list[str]:
    """Texts of 3 to 14 words; no two alike."""
    return [" ".join(WORDS[(7 * i + k * (1 + i % 7)) % len(WORDS)] for k in range(3 + i % 12)) for i in range(count)]


def classifier() -> whence.Model:
    """A classifier that sees what it is given: its weights are far from their start."""
    import transformers as t

    words = tokenizer()
    torch.manual_seed(0)
    config = t.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = t.BertForSequenceClassification(config)
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return whence.Model(model.eval(), words, name="classifier")


def families() -> dict[str, whence.Model]:
    """Five families: an encoder, its pre-norm and rotary relatives, two decoders and an encoder–decoder."""
    import transformers as t

    words = tokenizer()
    size = len(words)
    small: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": size}
    bart = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    torch.manual_seed(0)
    made = {
        "bert": t.BertModel(t.BertConfig(**small, intermediate_size=32)),
        "roberta": t.RobertaModel(t.RobertaConfig(**small, intermediate_size=32)),
        "gpt2": t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=size, n_embd=16, n_layer=2, n_head=2, bos_token_id=2, eos_token_id=3)
        ),
        "llama": t.LlamaForCausalLM(t.LlamaConfig(**small, intermediate_size=32, num_key_value_heads=1)),
        "bart": t.BartModel(t.BartConfig(vocab_size=size, d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32, **bart)),
    }
    return {name: whence.Model(model.eval(), words, name=name) for name, model in made.items()}
