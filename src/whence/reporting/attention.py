"""The attention part of the page's data: the grid of heads, the findings, the listed heads and what is exact there."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from whence.attention.certify import TokenCertificate
from whence.attention.heads import key_labels
from whence.attention.overview import Overview
from whence.attention.verdict import Verdict
from whence.reading.trace import Stack
from whence.reporting.analysis import Analysis
from whence.reporting.counter_examples import STOPS, counter_example
from whence.results.labels import Tokens

QUANTITIES: dict[str, dict[str, Any]] = {
    "certain": {
        "title": "Certain rows",
        "about": "Of a head's rows that have alternatives and a weight above ε, the share that is certain: in every "
        "attention row with the same output the heaviest weight stays within ε, and no other key outweighs it by more. "
        "1 where every row is unique; – where no weight can exceed ε.",
        "bad": "low",
        "verdict": True,
    },
    "width": {
        "title": "Width of the bounds",
        "about": "Between which two numbers must a row's heaviest weight lie? The distance of the closed-form bounds: the "
        "mean over the rows. 0 is certain.",
        "bad": "high",
        "full": 0.5,
    },
    "r": {
        "title": "r raw–effective",
        "about": "Pearson correlation of the raw weights with the effective ones, over all rows of the head. 1 is the same "
        "picture.",
        "bad": "low",
    },
    "null_share": {
        "title": "Part outside the output's reach",
        "about": "‖a − a⊥‖₁ / ‖a‖₁: the size of the part of a row that the head output cannot see, over the size of the row; "
        "the mean over the rows. It can exceed 1, and says nothing of how far the weights are determined.",
        "bad": "high",
        "full": 0.5,
    },
    "special_mass": {
        "title": "To special tokens",
        "about": "Raw attention that goes to special tokens such as [CLS] and [SEP]: the mean over the rows.",
        "bad": "high",
        "full": 0.5,
    },
    "effective_special_mass": {
        "title": "To special tokens, effective",
        "about": "Effective attention to special tokens: what of it the head output depends on. It may be negative.",
        "bad": "high",
        "full": 0.5,
    },
    "free": {
        "title": "Free directions",
        "about": "In how many independent directions can a row be moved, as an attention row, with the same head output? "
        "The most over the rows.",
        "bad": "high",
        "full": 8,
    },
}
"""What the grid can be coloured by; `bad`: which end is drawn dark; `full`: the scale of colours never ends before it,
however small all values are; `verdict`: dark means that a head must not be read."""


def tokens_data(tokens: Tokens) -> dict[str, Any]:
    """Tokens as the page needs them: text, raw, special, kind, whether each is glued to the one before, and
    the word that it is a part of (None: it is a word, or stands alone)."""
    glued = [False] * len(tokens)
    for i in range(1, len(tokens)):
        if tokens.special[i] or tokens.special[i - 1]:
            continue
        if tokens.spans is not None and tokens.spans[i] is not None and tokens.spans[i - 1] is not None:
            glued[i] = tokens.spans[i][0] <= tokens.spans[i - 1][1] and not _begins_with_space(tokens.raw[i])  # type: ignore[index]
        elif tokens.words is not None:
            glued[i] = tokens.words[i] is not None and tokens.words[i] == tokens.words[i - 1]
    words: list[str | None] = [None] * len(tokens)
    for group in tokens.groups():
        if len(group) > 1:
            whole = "".join(tokens.text[i] for i in group)
            words = [whole if i in group else word for i, word in enumerate(words)]
    return {
        "text": list(tokens.text),
        "raw": list(tokens.raw),
        "special": list(tokens.special),
        "kind": list(tokens.kinds()),
        "glued": glued,
        "word": words,
    }


def _begins_with_space(raw: str) -> bool:
    return raw[:1] in ("Ġ", "▁", " ", "Ċ")


def stack_data(stack: Stack, overview: Overview) -> dict[str, Any]:
    """One stack's grid, findings and listed rows."""
    found = overview.identifiability
    labels = key_labels(stack)
    grid: dict[str, Tensor] = {
        "certain": certain_share(overview.verdict),
        "null_share": found.values.mean(-1),
        "width": overview.width,
        "r": found.extra["head_r"],
        "special_mass": overview.special_mass,
        "effective_special_mass": overview.effective_special_mass,
        "free": overview.free,
    }
    rows = found.extra["simplex_null_dimension"]
    return {
        "name": stack.name,
        "tokens": tokens_data(stack.tokens),
        "key_tokens": None if labels is stack.tokens else tokens_data(labels),
        "layers": list(found.layers),
        "heads": list(found.heads),
        "head_size": overview.head_size,
        "causal": bool(stack.layers[0].causal),
        "grid": {name: [[json_value(v) for v in row] for row in t.tolist()] for name, t in grid.items()},
        "rank": [
            [int(found.extra["rank"][i].min()), int(found.extra["rank"][i].max())] for i in range(len(found.layers))
        ],
        "free_rows": float((rows > 0).double().mean()),
        "findings": overview.sentences(),
        "verdict": {
            "epsilon": overview.verdict.epsilon,
            "names": overview.verdict.names(),
            "sentences": [[overview.verdict.sentence(layer, head) for head in found.heads] for layer in found.layers],
            "readable": len(overview.verdict.heads_that("read")) + len(overview.verdict.heads_that("unique")),
        },
        "worst": [listed(c) for c in overview.worst],
        "best": [listed(c) for c in overview.best],
    }


def certain_share(verdict: Verdict) -> Tensor:
    """[layer, head]: the number that decides the verdict, so that colour and words agree; 1 where every row is unique."""
    return torch.where(verdict.extra["rows"] == 0, 1.0, verdict.values)


def listed(certificate: TokenCertificate) -> dict[str, Any]:
    """A certified row: the exact interval of each weight and what follows from them."""
    return {
        "layer": certificate.layer,
        "head": certificate.head,
        "query": certificate.query,
        "dimension": certificate.dimension,
        "keys": certificate.keys.tolist(),
        "weights": certificate.weights.tolist(),
        "lower": certificate.lower.tolist(),
        "upper": certificate.upper.tolist(),
        "outside": json_value(certificate.outside),
        "certain": certificate.pairs[certificate.certain].tolist(),
        "sentence": certificate.sentence(certificate.widest),
        "sentences": certificate.sentences(),
        "checked": certificate.check(),
    }


def counter_examples(
    analysis: Analysis,
    rows: list[tuple[int, int, int]],
    attention: str | None,
    *,
    stops: tuple[float, ...] = (0.0, 0.5, 1.0),
) -> list[dict[str, Any]]:
    """Witnesses of `rows` (layer, head, query) that have one, the farthest first."""
    found = [
        counter_example(analysis.trace, analysis.witness(*row, attention), stops=STOPS if i == 0 else stops)
        for i, row in enumerate(rows)
    ]
    return sorted((f for f in found if f is not None), key=lambda f: -f["total_variation"])


def json_value(value: Any) -> Any:
    """A number that JSON can hold: NaN and infinity become None, floats keep nine digits."""
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    return value
