"""The prediction that is explained: which position, which class or token, and rather than which other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from whence.errors import InputError
from whence.mixing.read_out import read_out
from whence.model.load import Model
from whence.reading.trace import Stack, Trace


@dataclass(frozen=True)
class Prediction:
    """One number that a model gives on one text: a logit, or the difference of two.

    position: of the logits; None where the model makes one prediction for the whole text (or none, `target` None).
    """

    model: Model
    trace: Trace
    position: int | None
    target: int | None
    foil: int | None = None

    @property
    def stack(self) -> Stack:
        """The stack whose final states the head reads."""
        return self.trace.of("decoder") if "decoder" in self.trace.stacks else self.trace.of()

    @cached_property
    def rows(self) -> Tensor:
        """[token], summing to 1: how much the head reads of each final state. Without a head: all of them alike."""
        n = len(self.stack.tokens)
        if self.target is None:
            if self.position is None:
                return torch.full((n,), 1 / n, dtype=torch.float64)
            return torch.nn.functional.one_hot(torch.tensor(self.position), n).double()
        return read_out(self.model, self.trace, self.stack, self.position)

    def score(self, logits: Tensor, output: str = "logit") -> Tensor:
        """(sequence, …) logits → (sequence): the number that is explained; with a foil, the target's less the foil's."""
        if self.target is None:
            raise InputError(
                f"{self.model.name} makes no prediction (it has no head): load it with a task, or use a mixing method."
            )
        if output not in ("logit", "probability"):
            raise InputError(f"output={output!r} is not 'logit' or 'probability'.")
        logits = logits if self.position is None else logits[:, self.position]
        if output == "probability":
            if logits.shape[-1] == 1:
                raise InputError("output='probability' of a single number is always 1: explain the 'logit'.")
            logits = torch.softmax(logits, dim=-1)
        return logits[:, self.target] if self.foil is None else logits[:, self.target] - logits[:, self.foil]

    @property
    def settings(self) -> dict[str, Any]:
        """What is explained, for the provenance."""
        return {"target": self.target, "foil": self.foil, "position": self.position}


def prediction_of(model: Model, trace: Trace, target: Any, foil: Any, position: int | None) -> Prediction:
    """What is to be explained, each part checked. None: the model's own first choice, at the place where it predicts."""
    place = _position(model, trace, position)
    trace.refuse_dropped_logits("a prediction")
    if trace.logits is None:
        if target is not None or foil is not None:
            raise InputError(f"{model.name} makes no prediction (it has no head), so it has no target or foil.")
        return Prediction(model, trace, place, None)
    logits = trace.logits if place is None else trace.logits[place]
    chosen = int(logits.argmax()) if target is None else choice(model, trace.logits, target, "target")
    other = None if foil is None else choice(model, trace.logits, foil, "foil")
    if other == chosen:
        raise InputError(f"foil={foil!r} is the target itself ({chosen}): there is nothing between them to explain.")
    return Prediction(model, trace, place, chosen, other)


def choice(model: Model, logits: Tensor, given: Any, name: str) -> int:
    """A class (name or number) of a classifier, or a token (or its id) of a vocabulary."""
    if isinstance(given, bool) or not isinstance(given, (int, str)):
        raise InputError(f"{name}={given!r} is not a name or a number.")
    number = given
    if logits.dim() == 1:
        labels = dict(getattr(getattr(model.model, "config", None), "label2id", None) or {})
        number = labels.get(given, given) if isinstance(given, str) else given
        if isinstance(number, str) and number.isdigit():
            number = int(number)
        if isinstance(number, str) or not 0 <= number < len(logits):
            classes = ", ".join(f"{label} ({i})" for label, i in labels.items()) or len(logits)
            raise InputError(f"{name}={given!r} is no class of {model.name}; there are: {classes}.")
        return number
    if isinstance(given, str):
        number = token_id(model, given, name)
    if not 0 <= int(number) < logits.shape[-1]:
        raise InputError(f"{name}={given} is not a token id: the vocabulary has {logits.shape[-1]}.")
    return int(number)


def token_id(model: Model, text: str, name: str = "target") -> int:
    """The one token that a text is; refused where it is several, or not in the vocabulary."""
    if model.tokenizer is None:
        raise InputError(f"{name}={text!r} needs a tokenizer to be looked up: give the token's id.")
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        pieces = ", ".join(map(str, model.tokenizer.convert_ids_to_tokens(ids))) or "none"
        raise InputError(f"{name}={text!r} is {len(ids)} tokens ({pieces}): give one, or its id.")
    unknown = getattr(model.tokenizer, "unk_token_id", None)
    if unknown is not None and ids[0] == unknown and text != model.tokenizer.unk_token:
        raise InputError(
            f"{name}={text!r} is not in the vocabulary of {model.name}: it reads as {model.tokenizer.unk_token}."
        )
    return int(ids[0])


def _position(model: Model, trace: Trace, position: int | None) -> int | None:
    """Where the prediction is made; None where there is one for the whole text."""
    stack = trace.of("decoder") if "decoder" in trace.stacks else trace.of()
    whole = trace.logits is not None and trace.logits.dim() == 1
    n = len(stack.tokens) if trace.logits is None or whole else len(trace.logits)
    if position is not None:
        if whole:
            raise InputError(
                f"position={position} has no effect: {model.name} makes one prediction for the whole text. For the origin "
                "of one hidden token take a row of whence.contributions(trace, …).rollout()."
            )
        if not -n <= position < n:
            raise InputError(f"position={position} is out of range: there are {n} tokens.")
        return position % n
    if trace.logits is None or whole:
        return None
    mask = getattr(model.tokenizer, "mask_token_id", None)
    at = [i for i, token in enumerate(stack.tokens.ids or ()) if mask is not None and token == mask]
    if stack.name == "decoder" and (not at or len(trace.stacks) > 1):
        return n - 1
    if stack.name == "decoder":
        raise InputError(
            "this text is read as by a decoder and has a mask token: say which position predicts, with position=."
        )
    if len(at) != 1:
        raise InputError(f"the text has {len(at)} mask tokens: say which position predicts, with position=.")
    return at[0]
