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


def tokenizer_of(model: str) -> Any:
    """The tokenizer of an embedded model, a folder or a hub id."""
    from whence.model.load import load

    found = load(model, "base").tokenizer
    if found is None:
        raise InputError(f"{model!r} has no tokenizer; name another model, or leave it out to have one trained.")
    found.model_input_names = ["input_ids", "attention_mask"]
    return found
