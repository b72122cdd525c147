"""Input scores for one prediction: the mixing methods read at the rows that the head reads, and the methods that explain it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, overload

from whence import method_table
from whence.errors import InputError
from whence.mixing.attribute_one import explain
from whence.mixing.attribution import Attribution
from whence.mixing.prediction import prediction_of
from whence.mixing.span import Span, explain_span, is_translator, is_writer, several_tokens, span_of
from whence.mixing.span_attribution import SpanAttribution
from whence.model.load import Model, as_model
from whence.reading.trace import Trace
from whence.reading.tracing import trace
from whence.results.method import Method


@overload
def attribute(
    model: Any, text: Any, method: str = ..., target: int | str | None = ..., *, max_new_tokens: int, **options: Any
) -> SpanAttribution: ...
@overload
def attribute(
    model: Any, text: Any, method: str = ..., target: int | str | None = ..., *, continuation: Any, **options: Any
) -> SpanAttribution: ...
@overload
def attribute(
    model: Any, text: Any, method: str = ..., target: int | str | None = ..., **options: Any
) -> Attribution: ...
@overload
def attribute(model: Any, text: Any, method: str = ..., target: Any = ..., **options: Any) -> Any: ...
@overload
def attribute(
    model: Any, text: Any, method: list[str] | tuple[str, ...], target: Any = ..., **options: Any
) -> dict[str, Any]: ...
def attribute(
    model: Any,
    text: Any,
    method: str | list[str] | tuple[str, ...] = "alti",
    target: Any = None,
    *,
    foil: Any = None,
    text_pair: str | None = None,
    position: int | None = None,
    continuation: Any = None,
    max_new_tokens: int | None = None,
    chat: bool | None = None,
    truncate: bool = False,
    **options: Any,
) -> Any:
    """Which input tokens made the model predict what it predicts?

    method: one of `whence.methods("mixing")`, or several. Those that give shares by layer (alti, rollout, norms, decompx,
    …) are rolled out and read at the rows that the prediction is made from, which is measured: [CLS], the last position,
    [MASK], every row as the head weighs it (mean pooling); without a head, the mean of all. The others explain the
    prediction itself: gradients, perturbations, the last layer's attention. `options` go to the method.

    target: a class (name or number), or a token of the vocabulary (or its id); None: what the model itself prefers.
    foil: explain why the target *rather than* this one. A method whose answer does not depend on them refuses them.
    position: which position predicts, for models with one prediction per token.

    An answer is explained token by token, as a `SpanAttribution` [explained, input] that gathers into sentences or documents
    (`by`): what the model writes (`max_new_tokens`), what is put behind the prompt (`continuation`, or a target of several
    tokens), or what a trace with a continuation holds. Then target is a part of the answer (None: all of it), and foil
    another answer with as many tokens. chat: the prompt goes through the model's chat template, as in `whence.trace`.

    output: explain the "logit" or the "probability". baseline: what stands for a token that is not there: "mask" (the mask
    token, else the padding token, else zeros), "pad" or "zero"; special tokens always stay.

    >>> import whence
    >>> scores = whence.attribute(whence.load(), "The bank raised its rates.", method="alti")
    >>> len(scores.tokens), round(float(scores.values.sum()), 4)
    (8, 1.0)
    """
    entries = {
        name: method_table.method(name, EXPLAINING) for name in ([method] if isinstance(method, str) else method)
    }
    for entry in entries.values():
        _check(entry, target, foil, options)
    chosen = as_model(model)
    asked = _Asked(text, text_pair, target, foil, continuation, max_new_tokens, chat, truncate)
    span = asked.span(chosen) if position is None else None
    if span is not None:
        answers = {name: explain_span(span, entry, options) for name, entry in entries.items()}
        return answers[method] if isinstance(method, str) else answers
    prediction = prediction_of(chosen, asked.trace(chosen), target, foil, position)
    results = {name: explain(prediction, entry, options) for name, entry in entries.items()}
    return results[method] if isinstance(method, str) else results


@dataclass(frozen=True)
class _Asked:
    """What `attribute` was given besides the model and the methods."""

    text: Any
    text_pair: Any
    target: Any
    foil: Any
    continuation: Any
    max_new_tokens: int | None
    chat: bool | None
    truncate: bool

    def trace(self, model: Model, continuation: Any = None, target: Any = None) -> Trace:
        if isinstance(self.text, Trace):
            if self.continuation is not None or self.max_new_tokens is not None or self.chat is not None:
                raise InputError("a trace has its continuation already: give them to whence.trace.")
            return self.text
        traced = trace(
            model, self.text, self.text_pair, target, continuation=continuation, max_new_tokens=self.max_new_tokens,
            chat=self.chat, truncate=self.truncate,
        )  # fmt: skip
        if not isinstance(traced, Trace):
            raise InputError("attribute explains one prediction: give one text, not a list.")
        return traced

    def span(self, model: Model) -> Span | None:
        """The answer that is explained; None where it is one prediction."""
        answers = self.continuation is not None or self.max_new_tokens is not None
        if isinstance(self.text, Trace):
            traced = self.trace(model)
            return None if traced.prompt_length is None else span_of(model, traced, self.target, self.foil)
        forced = not answers and is_writer(model) and several_tokens(model, self.target)
        if not answers and not forced:
            return None
        given = self.target if forced else self.continuation
        traced = self.trace(model, target=given) if is_translator(model) else self.trace(model, continuation=given)
        return span_of(model, traced, None if forced else self.target, self.foil)


EXPLAINING = ("matrix", "contributions", "scores")


def _check(entry: Method, target: Any, foil: Any, options: Mapping[str, Any]) -> None:
    """Options that the method takes, and a target only where it has an effect."""
    entry.check_options(name for name in options if name not in ("target", "foil", "position"))
    for name, given in (("target", target), ("foil", foil)):
        if given is not None and not entry.contrast:
            able = ", ".join(m.name for m in method_table.explaining() if m.contrast)
            raise InputError(
                f"{name}={given!r} has no effect on method {entry.name!r}: it says where the state that the prediction is made "
                f"from came from, whatever is predicted. Leave it out, or use one of {able}."
            )
