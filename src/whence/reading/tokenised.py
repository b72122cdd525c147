"""Texts and ids as tokens with names, and what a model has room for: ids in its vocabulary, positions in its length."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn

from whence.errors import ModelError, WhenceWarning
from whence.model.load import Model
from whence.results.labels import Tokens, readable

UNKNOWN = 0.25  # a warning from this share of unknown tokens on


def warn_of_unknown(model: Model, tokens: Tokens, text: str) -> None:
    """Warn of a text that the tokenizer hardly knows: every measure would be about its unknown tokens."""
    unknown = unknown_id(model.tokenizer)
    ordinary = [i for i, s in zip(tokens.ids or (), tokens.special, strict=False) if not s or i == unknown]
    many = ordinary.count(unknown) if unknown is not None else 0
    if ordinary and many >= UNKNOWN * len(ordinary):
        warnings.warn(
            f"{many} of the {len(ordinary)} tokens of {quoted(text)} are unknown to {model.name} and read as "
            f"{model.tokenizer.unk_token}: what is measured there is about that token, not about the text.",
            WhenceWarning,
            stacklevel=2,
        )


def unknown_id(tokenizer: Any) -> int | None:
    """The id of the unknown token, where it is nothing else besides (GPT-2's is its end of text, too)."""
    names = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id", "mask_token_id")
    found = getattr(tokenizer, "unk_token_id", None)
    return None if found in {getattr(tokenizer, name, None) for name in names} else found


def tokens_of(tokenizer: Any, encoded: Any, index: int, text: str | None, pair: str | None = None) -> Tokens:
    """The tokens of one encoded text, with spans and words where the tokenizer is a fast one."""
    ids = tuple(encoded["input_ids"][index].tolist())
    raw = tuple(str(t) for t in tokenizer.convert_ids_to_tokens(list(ids)))
    marks = set(tokenizer.all_special_ids)
    special = tuple(i in marks for i in ids)
    spans: tuple[tuple[int, int] | None, ...] | None = None
    words: tuple[int | None, ...] | None = None
    fast = getattr(encoded, "encodings", None)
    texts = readable(tokenizer, raw, special)
    if fast:
        encoding = fast[index]
        offsets, sequence = encoding.offsets, encoding.sequence_ids
        spans = tuple(
            None if s or part is None else (a, b) for (a, b), s, part in zip(offsets, special, sequence, strict=True)
        )
        # Word numbers start again in the second text: keep the two apart.
        shift = 1 + max((w for w in encoding.word_ids if w is not None), default=0)
        words = tuple(
            None if w is None or s else w + shift * (part or 0)
            for w, part, s in zip(encoding.word_ids, sequence, special, strict=True)
        )
        source = (text, pair)
        exact = []
        for i, span in enumerate(spans):
            piece = source[sequence[i]] if span is not None else None
            piece_text = piece[span[0] : span[1]].strip() if piece is not None and span is not None else ""
            exact.append(piece_text or texts[i])
        texts = tuple(exact)
    return Tokens(texts, raw, ids, spans, words, special)


def label_ids(model: Model, ids: Tensor) -> Tokens:
    """Tokens for bare ids: names from the tokenizer where there is one."""
    numbers = tuple(ids.tolist())
    if model.tokenizer is None:
        names = tuple(f"#{i}" for i in numbers)
        return Tokens(names, names, numbers)
    raw = tuple(str(t) for t in model.tokenizer.convert_ids_to_tokens(list(numbers)))
    marks = set(model.tokenizer.all_special_ids)
    special = tuple(i in marks for i in numbers)
    return Tokens(readable(model.tokenizer, raw, special), raw, numbers, None, None, special)


def check_ids(model: Model, ids: Tensor) -> None:
    """Refuse ids for which the model has no embedding: the tokenizer belongs to another model."""
    embedding = input_embedding(model.model)
    if embedding is None or ids.numel() == 0:
        return
    size = embedding.weight.shape[0]
    worst = int(ids.max()) if int(ids.min()) >= 0 else int(ids.min())
    if not 0 <= worst < size:
        raise ModelError(
            f"token id {worst} is out of range: {model.name} has embeddings for {size} tokens (0 … {size - 1}). The "
            "tokenizer does not belong to this model; load both from the same place."
        )


def input_embedding(model: nn.Module) -> nn.Embedding | None:
    """The layer that turns ids into vectors; None where it is not an embedding."""
    try:
        found = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return found if isinstance(found, nn.Embedding) else None


def position_limit(model: nn.Module) -> int | None:
    """How many positions the model has; None where nothing limits them (relative positions)."""
    config = getattr(model, "config", None)
    get_text = getattr(config, "get_text_config", None)
    config = get_text() if callable(get_text) else config
    limit = None
    for name in ("max_position_embeddings", "n_positions", "max_source_positions", "n_ctx"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            limit = value
            break
    if limit is None or getattr(config, "relative_attention_num_buckets", None):
        return None
    for name, module in model.named_modules():
        # RoBERTa and its kin begin to count after the padding index, so two rows of the table are never used.
        table = isinstance(module, nn.Embedding) and "position" in name and module.num_embeddings == limit
        if table and module.padding_idx is not None:
            return limit - int(module.padding_idx) - 1
    return limit


def quoted(text: str) -> str:
    """A text within a sentence, cut where it is long."""
    return repr(text if len(text) <= 60 else text[:57] + "…")
