"""whence: where did this hidden state come from, and may its attention be read?

Names are imported when they are first used, so that `import whence` loads no model library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from whence import errors

__version__ = "0.1.0"

_PUBLIC = {
    "load": "whence.model.load",
    "Model": "whence.model.load",
    "trace": "whence.reading.tracing",
    "stream": "whence.reading.streaming",
    "traces": "whence.reading.tracing",
    "Trace": "whence.reading.trace",
    "from_tensors": "whence.reading.from_tensors",
    "doctor": "whence.reading.wiring.doctor",
    "substitute": "whence.reading.rerun.substitution",
    "methods": "whence.method_table",
    "effective_attention": "whence.attention.effective_attention",
    "identifiability": "whence.attention.identifiability",
    "certify": "whence.attention.certify",
    "certify_row": "whence.core.attention.certificate",
    "witness": "whence.attention.witness",
    "uniqueness": "whence.attention.uniqueness",
    "decide": "whence.attention.decide",
    "align": "whence.attention.align",
    "droppable": "whence.attention.droppable",
    "doppelganger": "whence.attention.doppelganger",
    "layer_statement": "whence.attention.joint",
    "verdict": "whence.attention.verdict",
    "IdentifiableConfig": "whence.identifiable",
    "IdentifiableModel": "whence.identifiable",
    "IdentifiableForSequenceClassification": "whence.identifiable",
    "IdentifiableDecoderConfig": "whence.identifiable",
    "IdentifiableForCausalLM": "whence.identifiable",
    "token_identifiability": "whence.tokens.token_identifiability",
    "read_texts": "whence.reading.texts",
    "train": "whence.identifiable.training.fit",
    "tie_keys": "whence.identifiable.conversion.convert",
    "contributions": "whence.mixing.contributions",
    "hidden_token_attribution": "whence.mixing.hidden_token_attribution",
    "local_vs_global": "whence.mixing.local_vs_global",
    "attribute": "whence.mixing.attribute",
    "report": "whence.reporting.report",
    "faithfulness": "whence.faithful.evaluate",
    "plausibility": "whence.faithful.plausibility",
    "determined": "whence.faithful.determined",
    "attention_controls": "whence.faithful.controls",
    "robustness": "whence.faithful.robustness",
    "survey": "whence.surveys.run",
    "read_survey": "whence.surveys.result",
}

__all__ = ["__version__", "errors", "rules", *sorted(_PUBLIC)]

if TYPE_CHECKING:
    from whence import rules
    from whence.attention.align import align
    from whence.attention.certify import certify
    from whence.attention.decide import decide
    from whence.attention.doppelganger import doppelganger
    from whence.attention.droppable import droppable
    from whence.attention.effective_attention import effective_attention
    from whence.attention.identifiability import identifiability
    from whence.attention.joint import layer_statement
    from whence.attention.uniqueness import uniqueness
    from whence.attention.verdict import verdict
    from whence.attention.witness import witness
    from whence.core.attention.certificate import certify_row
    from whence.faithful.controls import attention_controls
    from whence.faithful.determined import determined
    from whence.faithful.evaluate import faithfulness
    from whence.faithful.plausibility import plausibility
    from whence.faithful.robustness import robustness
    from whence.identifiable import (
        IdentifiableConfig,
        IdentifiableDecoderConfig,
        IdentifiableForCausalLM,
        IdentifiableForSequenceClassification,
        IdentifiableModel,
    )
    from whence.identifiable.conversion.convert import tie_keys
    from whence.identifiable.training.fit import train
    from whence.method_table import methods
    from whence.mixing.attribute import attribute
    from whence.mixing.contributions import contributions
    from whence.mixing.hidden_token_attribution import hidden_token_attribution
    from whence.mixing.local_vs_global import local_vs_global
    from whence.model.load import Model, load
    from whence.reading.from_tensors import from_tensors
    from whence.reading.rerun.substitution import substitute
    from whence.reading.streaming import stream
    from whence.reading.texts import read_texts
    from whence.reading.trace import Trace
    from whence.reading.tracing import trace, traces
    from whence.reading.wiring.doctor import doctor
    from whence.reporting.report import report
    from whence.surveys.result import read_survey
    from whence.surveys.run import survey
    from whence.tokens.token_identifiability import token_identifiability


def __getattr__(name: str) -> Any:
    if name == "rules":
        return importlib.import_module("whence.rules")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'whence' has no attribute {name!r}; it has: {', '.join(sorted(_PUBLIC))}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
