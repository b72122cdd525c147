"""whence's own methods, declared by place, so that listing them imports nothing heavy.

One `declare("name", "whence.module:function", question=…, paper=…, cost=…, needs=…, summary=…)` per method.
"""

from __future__ import annotations

from whence.registry import declare

BRUNNER = "Brunner et al. 2020"
BHARDWAJ = "Bhardwaj et al. 2021"

declare(
    "effective-attention",
    "whence.attention.effective_attention:effective_attention",
    question="attention",
    paper=BRUNNER,
    cost="trace",
    summary="the part of attention that the head output depends on",
)
declare(
    "identifiability",
    "whence.attention.identifiability:identifiability",
    question="attention",
    paper=BRUNNER,
    cost="trace",
    summary="rank, null space, condition, leverage and null share of every row",
)
declare(
    "certify",
    "whence.attention.certify:certify",
    question="attention",
    paper="whence",
    cost="solver",
    summary="the exact interval in which each weight could lie, with a proof",
)
declare(
    "witness",
    "whence.attention.witness:witness",
    question="attention",
    paper="whence",
    cost="solver",
    needs=("model",),
    summary="another attention row with the same output, verified in the model",
)
declare(
    "doppelganger",
    "whence.attention.doppelganger:doppelganger",
    question="attention",
    paper="whence",
    cost="solver",
    needs=("model",),
    summary="other attention for every row of every head at once, the same computation",
)
declare(
    "key-constraint",
    "whence.attention.key_constraint:key_constraint",
    question="attention",
    paper=BHARDWAJ,
    cost="trace",
    needs=("keys",),
    summary="alternatives that some query could have produced: local dimension, near-tied bound",
)
declare(
    "layer-statement",
    "whence.attention.joint:layer_statement",
    question="attention",
    paper=BHARDWAJ,
    cost="trace",
    needs=("projection",),
    summary="what a whole layer's output determines of all its heads",
)
