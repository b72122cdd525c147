"""An answer explained token by token: which tokens, read at which rows of the logits, rather than which others."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whence.core.numerics.tolerances import SAME_ROW
from whence.errors import InputError
from whence.mixing.alti_logit import alti_logits
from whence.mixing.attribute_one import explain
from whence.mixing.contributions import Contributions, contributions
from whence.mixing.prediction import Prediction
from whence.mixing.read_out import read_out
from whence.mixing.span_attribution import SpanAttribution
from whence.model.load import Model
from whence.reading.generation import continuation_ids, decoded
from whence.reading.inputs import Prepared
from whence.reading.tokenised import label_ids
from whence.reading.trace import Trace
from whence.results.labels import Tokens
from whence.results.method import Method


@dataclass(frozen=True)
class Span:
    """The explained tokens: `positions` are rows of the logits, each of which predicts the token of `ids` beside it."""

    model: Model
    trace: Trace
    positions: tuple[int, ...]
    ids: tuple[int, ...]
    foils: tuple[int, ...] | None
    tokens: Tokens
    answer: str | None  # the text of the explained tokens, which `tokens.spans` point into

    @property
    def rows(self) -> list[tuple[int, int, int | None]]:
        """(position, target, foil) of each."""
        foils = self.foils or (None,) * len(self.ids)
        return list(zip(self.positions, self.ids, foils, strict=True))

    @property
    def inputs(self) -> Tokens:
        """The tokens that are scored: prompt and answer, or an encoder–decoder's source."""
        stacks = self.trace.stacks
        return stacks["encoder"].tokens if "encoder" in stacks else self.trace.tokens


def is_writer(model: Model) -> bool:
    """Whether the model writes text: a decoder, or an encoder–decoder with a language-model head."""
    can = getattr(model.model, "can_generate", None)
    return bool(can()) if callable(can) else False


def is_translator(model: Model) -> bool:
    """Whether it is an encoder–decoder."""
    return bool(getattr(getattr(model.model, "config", None), "is_encoder_decoder", False))


def several_tokens(model: Model, target: Any) -> bool:
    """Whether a target is more than one token: then it is an answer, not one choice of the vocabulary."""
    if isinstance(target, str) and model.tokenizer is not None:
        return len(model.tokenizer(target, add_special_tokens=False)["input_ids"]) > 1
    return isinstance(target, (list, tuple, Tensor))


def has_answer(model: Model, trace: Trace) -> bool:
    """Whether the trace holds an answer: after its prompt, or in what an encoder–decoder's decoder reads."""
    if trace.logits is None or trace.logits.dim() != 2:
        return False
    if is_translator(model):
        return "decoder" in trace.stacks and len(trace.of("decoder").tokens) > 1
    return trace.prompt_length is not None


def span_of(model: Model, trace: Trace, target: Any = None, foil: Any = None) -> Span:
    """The answer of a traced model: what follows the prompt, or what an encoder–decoder's decoder reads after its start.

    target: only this part of it, a text (or a token's id) that stands there once. foil: the tokens of another answer,
    one for each that is explained.
    """
    trace.refuse_dropped_logits("an answer")
    stack = trace.of("decoder")
    ids = stack.tokens.ids
    if ids is None or trace.logits is None or trace.logits.dim() != 2:
        raise InputError(f"{model.name} gives no next-token logits here: load it with task='text-generation'.")
    start = 1 if is_translator(model) else trace.prompt_length
    if start is None or start >= len(ids):
        raise InputError("there is nothing after the prompt: give continuation= or max_new_tokens=.")
    first, last = start, len(ids)
    if target is not None:
        first, last = _part(model, ids, start, target)
    chosen = ids[first:last]
    foils = None if foil is None else _foils(model, trace, stack.tokens, first, chosen, foil)
    answer, tokens = _answer(model, ids, first, last)
    return Span(model, trace, tuple(range(first - 1, last - 1)), chosen, foils, tokens, answer)


def explain_span(
    span: Span, entry: Method, options: Mapping[str, Any], mixed: Contributions | None = None
) -> SpanAttribution:
    """One method's scores for every explained token; `mixed`: the method's contributions, where they are known."""
    trace = span.trace
    rows = [row for row in span.rows if row[1] != row[2]]  # a token that is its own foil: nothing between them
    inputs = span.inputs
    if entry.name == "alti-logit":
        found = list(alti_logits(trace, rows, span.model))
    elif entry.contrast or entry.gives == "scores":
        found = [explain(_prediction(span, row), entry, options).values for row in rows]
    else:
        rolled = (mixed or contributions(trace, entry.name, **options)).rollout()
        inputs = rolled.key_tokens or rolled.tokens
        found = [w.to(rolled.values) @ rolled.values[-1] for w in _read_rows(span)]
    scores = iter(found)
    zeros = torch.zeros_like(found[0])
    values = torch.stack([zeros if row[1] == row[2] else next(scores) for row in span.rows])
    assert trace.logits is not None
    logits = trace.logits[list(span.positions)].double()
    at = torch.arange(len(span.ids)), torch.tensor(span.ids)
    settings = {
        "target": list(span.ids),
        "foil": None if span.foils is None else list(span.foils),
        "signed": entry.signed,
        "text": trace.text,
        "answer": span.answer,
        "prompt_length": trace.prompt_length,
        **options,
    }
    return SpanAttribution(
        values=values.detach(),
        axes=("explained", "input"),
        tokens=span.tokens,
        key_tokens=inputs,
        provenance=trace.provenance.by(entry.name, **settings),
        extra={
            "position": torch.tensor(span.positions),
            "logit": logits[at],
            "probability": logits.softmax(-1)[at],
        },
    )


def _prediction(span: Span, row: tuple[int, int, int | None]) -> Prediction:
    return Prediction(span.model, span.trace, *row)


def _read_rows(span: Span) -> list[Tensor]:
    """[token] of each row: which final states it is read from.

    Measured at the first and the last row; where each of these reads its own state alone, so do those between.
    """
    stack = span.trace.of("decoder")
    n = len(stack.tokens)
    own = {p: torch.nn.functional.one_hot(torch.tensor(p), n).double() for p in span.positions}
    ends = {p: read_out(span.model, span.trace, stack, p) for p in (span.positions[0], span.positions[-1])}
    if all(bool((weights - own[p]).abs().max() < SAME_ROW) for p, weights in ends.items()):
        return list(own.values())
    return [ends[p] if p in ends else read_out(span.model, span.trace, stack, p) for p in span.positions]


def _part(model: Model, ids: Sequence[int], start: int, target: Any) -> tuple[int, int]:
    """First and last (exclusive) position of the part of the answer that `target` names."""
    after = list(ids[start:])
    if isinstance(target, int) and not isinstance(target, bool):
        places = [(i, i + 1) for i, token in enumerate(after) if token == target]
    elif isinstance(target, str) and model.tokenizer is not None and target.strip():
        text, tokens = _answer(model, ids, start, len(ids))
        spans, wanted = [s or (0, 0) for s in tokens.spans or ()], target.strip()
        found = [i for i in range(len(text or "")) if (text or "").startswith(wanted, i)]
        overlap = [[k for k, (a, b) in enumerate(spans) if a < at + len(wanted) and b > at] for at in found]
        places = [(hits[0], hits[-1] + 1) for hits in overlap if hits]
    else:
        raise InputError(f"target={target!r} is neither a text nor a token's id.")
    if len(places) != 1:
        said = decoded(model.tokenizer, after) if model.tokenizer is not None else str(after)
        raise InputError(
            f"target={target!r} stands {len(places)} times in the answer {said!r:.120}: it must stand once."
        )
    return start + places[0][0], start + places[0][1]


def _foils(
    model: Model, trace: Trace, tokens: Tokens, first: int, explained: Sequence[int], foil: Any
) -> tuple[int, ...]:
    """The foil's ids, one for each explained token."""
    if isinstance(foil, int) and not isinstance(foil, bool):
        foil = [foil]
    if isinstance(foil, str) and is_translator(model):
        made = list(model.tokenizer(text_target=foil, add_special_tokens=False)["input_ids"])
    else:
        before = list((tokens.ids or ())[:first])
        spans = (tokens.spans or ())[first:]
        start = next((span[0] for span in spans if span is not None), None)
        text = None if trace.text is None or start is None else trace.text[:start]
        made = continuation_ids(
            model, Prepared({"input_ids": torch.tensor([before])}, None, text=text), foil, "foil"
        ).tolist()
    if len(made) != len(explained):
        raise InputError(
            f"foil={foil!r:.60} has {len(made)} tokens for {len(explained)} that are explained: a contrast sets token against "
            "token. Give as many, or explain a part with target=."
        )
    if tuple(made) == tuple(explained):
        raise InputError(f"foil={foil!r:.60} is the answer itself: there is nothing between them to explain.")
    vocabulary = 0 if trace.logits is None else trace.logits.shape[-1]
    if not all(0 <= i < vocabulary for i in made):
        raise InputError(f"foil={foil!r:.60} has ids outside the vocabulary of {vocabulary} tokens.")
    return tuple(int(i) for i in made)


def _answer(model: Model, ids: Sequence[int], first: int, last: int) -> tuple[str | None, Tokens]:
    """The text of these tokens, and the tokens with their places in it."""
    tokens = label_ids(model, torch.tensor(list(ids[first:last])))
    if model.tokenizer is None:
        return None, tokens
    before = decoded(model.tokenizer, list(ids[:first]))
    ends = [0] + [len(decoded(model.tokenizer, list(ids[:i]))) - len(before) for i in range(first + 1, last + 1)]
    text = decoded(model.tokenizer, list(ids[:last]))[len(before) :]
    spans = tuple((a, b) for a, b in itertools.pairwise(ends))
    return text, Tokens(tokens.text, tokens.raw, tokens.ids, spans, tokens.words, tokens.special)
