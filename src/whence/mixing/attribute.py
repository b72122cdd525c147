"""Input scores for one prediction: the mixing methods read at the rows that the head reads, and the methods that explain it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, overload

from torch import Tensor

from whence import method_table
from whence.errors import InputError
from whence.mixing.contributions import Contributions, contributions
from whence.mixing.prediction import Prediction, prediction_of
from whence.mixing.token_scores import TokenScores
from whence.model.load import as_model
from whence.reading.trace import Trace
from whence.reading.tracing import trace
from whence.results.method import Method
from whence.results.result import Result


@dataclass(frozen=True)
class Attribution(Result):
    """`values` [input]: a score per input token; `signed` says whether a negative one speaks against the prediction."""

    kind: ClassVar[str] = "attribution"

    @property
    def signed(self) -> bool:
        return bool(self.provenance.settings.get("signed", False))

    def ranked(self) -> list[tuple[str, float]]:
        """Tokens with their scores, the highest first."""
        tokens = self.key_tokens or self.tokens
        order = self.values.argsort(descending=True).tolist()
        return [(tokens[i], float(self.values[i])) for i in order]


@overload
def attribute(
    model: Any, text: Any, method: str = ..., target: int | str | None = ..., **options: Any
) -> Attribution: ...
@overload
def attribute(
    model: Any, text: Any, method: list[str] | tuple[str, ...], target: int | str | None = ..., **options: Any
) -> dict[str, Attribution]: ...
def attribute(
    model: Any,
    text: Any,
    method: str | list[str] | tuple[str, ...] = "alti",
    target: int | str | None = None,
    *,
    foil: int | str | None = None,
    text_pair: str | None = None,
    position: int | None = None,
    **options: Any,
) -> Attribution | dict[str, Attribution]:
    """Which input tokens made the model predict what it predicts?

    method: one of `whence.methods("mixing")`, or several. Those that give shares by layer (alti, rollout, norms, decompx,
    …) are rolled out and read at the rows that the prediction is made from, which is measured: [CLS], the last position,
    [MASK], every row as the head weighs it (mean pooling); without a head, the mean of all. The others explain the
    prediction itself: gradients, perturbations, the last layer's attention. `options` go to the method.

    target: a class (name or number), or a token of the vocabulary (or its id); None: what the model itself prefers.
    foil: explain why the target *rather than* this one. A method whose answer does not depend on them refuses them.
    position: which position predicts, for models with one prediction per token.
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
    traced = text if isinstance(text, Trace) else trace(chosen, text, text_pair)
    if not isinstance(traced, Trace):
        raise InputError("attribute explains one prediction: give one text, not a list.")
    prediction = prediction_of(chosen, traced, target, foil, position)
    results = {name: explain(prediction, entry, options) for name, entry in entries.items()}
    return results[method] if isinstance(method, str) else results


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


def explain(prediction: Prediction, entry: Method, options: Mapping[str, Any]) -> Attribution:
    """One method's scores for a prediction."""
    settings: dict[str, Any] = {**prediction.settings, "signed": entry.signed}
    if entry.gives == "scores":
        scores = entry(prediction, **options)
        if isinstance(scores, Tensor):
            scores = TokenScores(scores, prediction.stack.tokens)
        return _result(prediction, entry, scores, {**settings, **options})
    trace = prediction.trace
    if entry.contrast:
        place = -1 if prediction.position is None else prediction.position
        logit = entry(trace, target=prediction.target, foil=prediction.foil, position=place, **options)
        return _result(prediction, entry, TokenScores(logit.by_input(), logit.tokens), settings)
    return read_out(prediction, entry, contributions(trace, entry.name, **options))


def read_out(prediction: Prediction, entry: Method, contributions: Contributions) -> Attribution:
    """What a mixing method says of the rows that the prediction is made from."""
    mixed, rows = contributions.rollout(), prediction.rows
    settings: dict[str, Any] = {**prediction.settings, "signed": entry.signed}
    read = rows.nonzero()[:, 0].tolist()
    settings |= {"row": read[0] if len(read) == 1 else "mean" if bool((rows == rows[0]).all()) else "weighted"}
    values = rows.to(mixed.values) @ mixed.values[-1]
    tokens = mixed.key_tokens or mixed.tokens
    return _result(
        prediction, entry, TokenScores(values, tokens, {"rows": rows}), {**mixed.provenance.settings, **settings}
    )


def _result(prediction: Prediction, entry: Method, scores: TokenScores, settings: Mapping[str, Any]) -> Attribution:
    if scores.values.shape != (len(scores.tokens),):
        raise InputError(
            f"method {entry.name!r} gave scores of shape {tuple(scores.values.shape)} for {len(scores.tokens)} tokens."
        )
    return Attribution(
        values=scores.values.detach(),
        axes=("input",),
        tokens=scores.tokens,
        provenance=prediction.trace.provenance.by(entry.name, **settings),
        extra=scores.extra,
    )
