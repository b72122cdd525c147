"""Many texts as people have them: a list, a data set, texts that were read, or what a tokenizer made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from whence.errors import InputError
from whence.model.load import Model
from whence.reading.datasets import dataset_rows, is_dataset
from whence.reading.texts import Texts


def is_encoding(given: Any) -> bool:
    """Whether it is what a tokenizer gives, with `input_ids`: iterating over it would give the names of its tensors."""
    return isinstance(given, Mapping) or hasattr(given, "input_ids")


def sequences_given(model: Model, given: Any) -> list[tuple[str, ...]]:
    """(text,) or (text, pair) of each: from one text or pair, a list of them, a `Dataset`, `Texts`, a `BatchEncoding`."""
    if is_encoding(given):
        return encoded_texts(model, given)
    if isinstance(given, Texts):
        return given.sequences
    if is_dataset(given):
        return list(dataset_rows(given))
    if isinstance(given, str) or (isinstance(given, tuple) and len(given) == 2):
        given = [given]
    if not isinstance(given, Iterable):
        raise InputError(f"texts is a {type(given).__name__}: give a list of texts, a data set or an encoding.")
    sequences = []
    for i, one in enumerate(given):
        sequence = (one,) if isinstance(one, str) else tuple(one) if isinstance(one, (tuple, list)) else ()
        if not 1 <= len(sequence) <= 2 or not all(isinstance(part, str) for part in sequence):
            raise InputError(f"text {i} is {one!r:.80}; each must be a text or a pair of texts.")
        sequences.append(sequence)
    return sequences


def encoded_texts(model: Model, given: Any) -> list[tuple[str, ...]]:
    """The texts that an encoding was made of, where they can be told from its ids: read again, they give the same ids."""
    tokenizer = model.tokenizer
    data = dict(given)
    if "input_ids" not in data:
        raise InputError(
            f"these tensors ({', '.join(map(repr, data)) or 'none'}) have no input_ids: texts cannot be told."
        )
    if tokenizer is None:
        raise InputError(
            f"{model.name} came without a tokenizer: give texts, not ids, or whence.Model(model, tokenizer)."
        )
    ids, mask = _rows(data["input_ids"]), _rows(data.get("attention_mask"))
    second = _rows(data.get("token_type_ids"))
    sequences = []
    for i, row in enumerate(ids):
        seen = range(len(row)) if not mask else [j for j, real in enumerate(mask[i]) if real]
        real = [row[j] for j in seen]
        which = given.sequence_ids(i) if getattr(given, "is_fast", False) else second[i] if second else [0] * len(row)
        parts = [[row[j] for j in seen if which[j] == part] for part in (0, 1)]
        parts = [part for part in parts if part]
        texts = tuple(tokenizer.decode(part, skip_special_tokens=True) for part in parts)
        if not texts or not all(texts) or list(tokenizer(*texts)["input_ids"]) != real:
            raise InputError(
                f"row {i} of the encoding reads {' '.join(texts)!r:.60}, which gives other ids again: give the texts themselves."
            )
        sequences.append(texts)
    return sequences


def _rows(ids: Any) -> list[list[int]]:
    """Ids as lists, whether they came as a tensor, an array or lists; one sequence alone is one row."""
    if ids is None:
        return []
    plain: list[Any] = list(ids.tolist() if hasattr(ids, "tolist") else ids)
    return [list(row) for row in plain] if plain and isinstance(plain[0], (list, tuple)) else [plain]
