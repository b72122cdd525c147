"""Which output of the model is watched: the class or token that was asked for, and the one it is set against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from whence.errors import InputError
from whence.model.load import Model

PREDICTED, GOLD = "predicted", "gold"


def one_each(name: str, given: Any, texts: int) -> list[Any]:
    """A single target for all texts, or one for each."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != texts:
            raise InputError(f"{name} has {len(given)} entries for {texts} texts: give one for each, or a single one.")
        return list(given)
    return [given] * texts


def target_id(model: Model, logits: Tensor, target: Any, classes: bool) -> int:
    """The number of a class or a token, from a name, a number, or "predicted"; what does not exist is refused."""
    if target is None or target == PREDICTED:
        return int(logits.argmax())
    if not classes and isinstance(target, str):
        return _token(model, target)
    if isinstance(target, bool) or not isinstance(target, (int, str)):
        raise InputError(f"target={target!r} is a {type(target).__name__}; give a name or a number.")
    names = _labels(model) if classes else {}
    number = names.get(target, target) if isinstance(target, str) else target
    if isinstance(number, str) and number.isdigit():
        number = int(number)
    if isinstance(number, str) or not 0 <= number < len(logits):
        known = ", ".join(names) if names else f"0 … {len(logits) - 1}"
        raise InputError(
            f"target={target!r} is no {'class' if classes else 'token'} of {model.name}; there are: {known}."
        )
    return int(number)


def target_name(model: Model, number: int, classes: bool) -> str:
    """What people call a class or a token."""
    if classes:
        return next((name for name, n in _labels(model).items() if n == number), str(number))
    return str(model.tokenizer.convert_ids_to_tokens(number)) if model.tokenizer is not None else str(number)


def _labels(model: Model) -> Mapping[str, int]:
    config = getattr(model.model, "config", None)
    return {str(k): int(v) for k, v in (getattr(config, "label2id", None) or {}).items()}


def _token(model: Model, word: str) -> int:
    """The one token that this word is; a leading space is tried first, as most decoders write words with one."""
    if model.tokenizer is None:
        raise InputError(f"target={word!r} is a word and {model.name} has no tokenizer: give a token id.")
    for text in (word, f" {word}"):
        ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) == 1 and (text.startswith(" ") or _begins_words(model, ids[0])):
            return int(ids[0])
    ids = model.tokenizer(word, add_special_tokens=False)["input_ids"]
    pieces = model.tokenizer.convert_ids_to_tokens(ids)
    if len(ids) == 1:
        return int(ids[0])
    raise InputError(f"target={word!r} is no single token of {model.name} but {pieces}: choose a word that is one.")


def _begins_words(model: Model, number: int) -> bool:
    """Whether a token is written at the start of a word: marked so (Ġ, ▁), or of a tokenizer without such marks."""
    raw = str(model.tokenizer.convert_ids_to_tokens(number))
    spaced = model.tokenizer(" a", add_special_tokens=False)["input_ids"]
    marked = str(model.tokenizer.convert_ids_to_tokens(spaced[-1]))[:1] in ("Ġ", "▁")
    return raw[:1] in ("Ġ", "▁") or not marked
