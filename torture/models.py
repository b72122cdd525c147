"""Tiny random models of several families, for hardship that is not about numbers of note."""

from __future__ import annotations

from typing import Any

import torch

import whence

WORDS = [
    "the",
    "old",
    "doctor",
    "told",
    "nurse",
    "that",
    "she",
    "would",
    "not",
    "leave",
    "ward",
    "before",
    "storm",
    "was",
    "over",
    "because",
    "roads",
    "had",
    "been",
    "closed",
]


def tokenizer() -> Any:
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *dict.fromkeys(WORDS)])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


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
