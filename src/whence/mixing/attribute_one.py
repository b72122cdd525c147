"""One method's scores for one prediction: its own, or a mixing method read at the rows that the prediction is made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from whence.errors import InputError
from whence.mixing.attribution import Attribution
from whence.mixing.contributions import Contributions, contributions
from whence.mixing.prediction import Prediction
from whence.mixing.token_scores import TokenScores
from whence.results.method import Method


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
