"""The explanations that are compared: methods of the table, given scores, or a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence import method_table
from whence.core.numerics.arrays import AnyArray
from whence.errors import InputError
from whence.faithful.question import TextQuestion
from whence.mixing.attribute import EXPLAINING
from whence.mixing.attribute_one import explain
from whence.mixing.prediction import Prediction, prediction_of
from whence.model.load import Model
from whence.reading.trace import Trace
from whence.reading.tracing import trace
from whence.results.method import Method

SLOW = ("flow", "hidden-token-attribution")  # n² maximum flows, and a Jacobian: only by name
FAST_COSTS = ("trace", "gradients")
PERTURBING = ("occlusion", "lime", "kernel-shap")


@dataclass(frozen=True)
class Explained:
    """What an explanation is made for: one question, and its number among the texts."""

    model: Model
    question: TextQuestion
    number: int

    @cached_property
    def trace(self) -> Trace:
        """Taken once, when a method first needs it."""
        traced = trace(self.model, self.question.prepared)
        assert isinstance(traced, Trace)
        return traced

    @cached_property
    def prediction(self) -> Prediction:
        """The same prediction for every method of the table."""
        question = self.question
        return prediction_of(self.model, self.trace, question.target, question.foil, question.position)


@dataclass(frozen=True)
class Explainer:
    """A named way to score tokens or units. `signed`: whether scores may speak against the target; None: see the scores."""

    name: str
    scores: Callable[[Explained], Any]
    signed: bool | None = None
    perturbs: bool = False
    """It puts mask tokens into the text itself, so that the operator `mask` tests it with its own means."""

    given: Callable[[int], Any] | None = None
    """Scores that came with the call, by the number of the text: a part of what a saved record is about."""

    def of_units(self, asked: Explained) -> AnyArray:
        """A score per unit; tokens' scores are summed."""
        array = scores_of(self.scores(asked))
        units, tokens = asked.question.units, asked.question.prepared.length
        if array.shape == (tokens,):
            array = units.gather(array)
        elif array.shape != (len(units),):
            raise InputError(
                f"{self.name} gave scores of shape {array.shape} for text {asked.number}, which has {tokens} tokens and "
                f"{len(units)} removable units: give one score for each token, or one for each unit."
            )
        if not np.isfinite(array).all():
            raise InputError(f"{self.name} gave scores that are not finite for text {asked.number}.")
        return array


def scores_of(given: Any) -> AnyArray:
    """A list, an array, a tensor or an `Attribution` as numbers."""
    values = given if isinstance(given, (Tensor, np.ndarray)) else getattr(given, "values", given)
    return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values, dtype=np.float64)


def explainers(methods: Any, texts: int, model: Model) -> list[Explainer]:
    """From what the user gives: "fast", "all", a name, a function, {name: scores of every text}, or a list of these."""
    parts = (
        [methods] if isinstance(methods, str) or callable(methods) or isinstance(methods, Mapping) else list(methods)
    )
    explainers_given: list[Explainer] = []
    for part in parts:
        if isinstance(part, str) and part in ("fast", "all"):
            explainers_given += [_of_table(name) for name in _group(part, model)]
        elif isinstance(part, str):
            explainers_given += [_of_table(name) for name in part.split(",")]
        elif isinstance(part, Mapping):
            explainers_given += [_given(str(name), scores, texts) for name, scores in part.items()]
        elif callable(part):
            explainers_given.append(_function(getattr(part, "__name__", type(part).__name__), part))
        else:
            raise InputError(f"a method is a name, a function or {{name: scores}}, not a {type(part).__name__}.")
    names = [one.name for one in explainers_given]
    twice = sorted({name for name in names if names.count(name) > 1 or name == "random"})
    if not explainers_given:
        raise InputError("no method was given: there is nothing to compare.")
    if twice:
        raise InputError(f"methods must have different names, and 'random' is taken: {', '.join(twice)} came twice.")
    return explainers_given


def _group(part: str, model: Model) -> list[str]:
    """ "all": every method that applies, but the slow ones. "fast": those of one trace or a few gradients, and occlusion."""
    can_generate = getattr(model.model, "can_generate", None)
    writes = callable(can_generate) and can_generate()
    return [
        m.name
        for m in method_table.explaining()
        if m.name not in SLOW
        and (part == "all" or m.cost in FAST_COSTS or m.name == "occlusion")
        and (m.name != "alti-logit" or writes)  # it reads decoders only
    ]


def _of_table(name: str) -> Explainer:
    entry = method_table.method(name, EXPLAINING)
    # Effective attention has negative entries, too, but they do not speak against a target.
    return Explainer(entry.name, partial(_scores, entry), entry.signed and entry.contrast, entry.name in PERTURBING)


def _scores(entry: Method, asked: Explained) -> Any:
    with torch.random.fork_rng(devices=[]):
        attribution = explain(asked.prediction, entry, {})
    prepared = asked.question.prepared
    if "decoder_input_ids" not in prepared.inputs:
        return attribution
    # An encoder–decoder: source tokens are removed, and come first where what was written is scored as well.
    source, scored = prepared.tokens, attribution.key_tokens or attribution.tokens
    if source is None or tuple(scored.text[: len(source)]) != tuple(source.text):
        raise InputError(
            f"{entry.name} scores what was written, and words are removed from the source: use alti, rollout, norms, gradients "
            "or occlusion."
        )
    return attribution.values[: len(source)]


def _given(name: str, scores: Any, texts: int) -> Explainer:
    if callable(scores):
        return _function(name, scores)
    if isinstance(scores, str):
        entry = _of_table(scores)
        return Explainer(name, entry.scores, entry.signed, entry.perturbs)
    if not isinstance(scores, Sequence) and not hasattr(scores, "__len__"):
        raise InputError(f"the scores of {name!r} are a {type(scores).__name__}: give a list with one entry per text.")
    if len(scores) != texts:
        raise InputError(f"{name!r} has scores for {len(scores)} texts, and there are {texts}.")
    return Explainer(name, lambda asked: scores[asked.number], given=lambda number: scores[number])


def _function(name: str, function: Callable[..., Any]) -> Explainer:
    """A function of (model, text) that gives a score per token or per unit."""

    def scores(asked: Explained) -> Any:
        prepared = asked.question.prepared
        text = prepared.text if prepared.text_pair is None else (prepared.text, prepared.text_pair)
        return function(asked.model, text)

    return Explainer(name, scores)
