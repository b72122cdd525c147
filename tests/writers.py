"""Small models that write, in float64, with a byte-level tokenizer that gives any text back as it was."""

from __future__ import annotations

from functools import cache

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from whence.model.load import Model

TEXTS = [
    "The manager went home because he was sick.",
    "Cats purr.\n\nDogs bark. They run!",
    "she is well and he is not",
]
CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}<|assistant|>{% endif %}"


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=alphabet, special_tokens=["<pad>", "</s>"]
    )
    backend.train_from_iterator(TEXTS, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")
    made.chat_template = CHAT
    return made


@cache
def decoder() -> Model:
    """A Llama of two layers, its weights large enough for its answers to depend on the prompt."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer()), hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, max_position_embeddings=128, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return Model(_shaken(LlamaForCausalLM(config)), tokenizer(), name="tiny-llama")


@cache
def translator() -> Model:
    torch.manual_seed(1)
    config = T5Config(
        vocab_size=len(tokenizer()), d_model=24, d_ff=40, d_kv=8, num_layers=2, num_heads=3, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return Model(_shaken(T5ForConditionalGeneration(config)), tokenizer(), name="tiny-t5")


def _shaken(model: torch.nn.Module) -> torch.nn.Module:
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model.double().eval()
