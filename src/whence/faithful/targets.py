"""Which output of the model is watched: the class or token that was asked for, and the one it is set against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from whence.errors import InputError
from whence.mixing.prediction import choice
from whence.model.load import Model

PREDICTED, GOLD = "predicted", "gold"


def one_each(name: str, given: Any, texts: int) -> list[Any]:
    """A single target for all texts, or one for each."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != texts:
            raise InputError(f"{name} has {len(given)} entries for {texts} texts: give one for each, or a single one.")
        return list(given)
    return [given] * texts


def target_id(model: Model, logits: Tensor, target: Any, classes: bool, name: str = "target") -> int:
    """The number of a class or a token, from its name, its number, or "predicted"; what does not exist is refused."""
    if target is None or target == PREDICTED:
        return int(logits.argmax())
    return choice(model, logits if classes else logits[None], target, name)


def target_name(model: Model, number: int, classes: bool) -> str:
    """What people call a class or a token."""
    if classes:
        labels = getattr(getattr(model.model, "config", None), "label2id", None) or {}
        return next((str(name) for name, n in labels.items() if n == number), str(number))
    return str(model.tokenizer.convert_ids_to_tokens(number)) if model.tokenizer is not None else str(number)
