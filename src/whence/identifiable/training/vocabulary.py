"""A tokenizer for the texts at hand: byte-pair encoding trained with `tokenizers`, or that of an existing model."""

# torch and transformers leave these functions without types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whence.errors import InputError

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def train_tokenizer(texts: Sequence[str], vocab_size: int = 8000, max_length: int = 512, lowercase: bool = True) -> Any:
    """A byte-pair tokenizer with [CLS] … [SEP] around every text, as a transformers fast tokenizer.

    The same texts give the same tokenizer in every process, so that a run can be repeated and go on after a kill (the
    WordPiece trainer of `tokenizers` numbers its continuation pieces in the random order of a hash table).
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size <= len(SPECIAL):
        raise InputError(f"vocab_size={vocab_size} leaves no room beside the {len(SPECIAL)} special tokens.")
    raw = Tokenizer(models.BPE(unk_token="[UNK]"))
    raw.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    # Words and marks apart, each with the space before it, which is written ▁.
    pieces = pre_tokenizers.Split(Regex(r" ?\w+| ?[^\w\s]"), behavior="isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)])
    raw.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=list(SPECIAL), show_progress=False
    )
    raw.train_from_iterator(texts, trainer)
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(mark, raw.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
    )


END = "<|endoftext|>"


def train_byte_tokenizer(texts: Sequence[str], vocab_size: int = 4000, max_length: int = 512) -> Any:
    """A byte-level byte-pair tokenizer: every text can be written in it and read back, byte by byte.

    >>> made = train_byte_tokenizer(["a fine day, a fine day"], vocab_size=270)
    >>> made.decode(made("a fine Zürich day")["input_ids"])
    'a fine Zürich day'
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise InputError(f"vocab_size={vocab_size} leaves no room beside the {len(alphabet)} bytes and {END}.")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=END,
        bos_token=END,
        pad_token=END,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def tokenizer_of(model: str) -> Any:
    """The tokenizer of an embedded model, a folder or a hub id."""
    from whence.model.load import load

    tokenizer = load(model, "base").tokenizer
    if tokenizer is None:
        raise InputError(f"{model!r} has no tokenizer; name another model, or leave it out to have one trained.")
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return tokenizer
