"""whence's own methods, declared by place, so that listing them imports nothing heavy.

One `declare("name", "whence.module:function", question=…, paper=…, cost=…, needs=…, summary=…)` per method.
"""

from __future__ import annotations

from whence.method_table import declare

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
declare(
    "identifiable-transformer",
    "whence.identifiable.training.fit:train",
    question="models",
    paper=BHARDWAJ,
    cost="training",
    needs=("labelled texts",),
    summary="a text classifier whose attention weights are the only ones that give its output",
)
declare(
    "tie-keys",
    "whence.identifiable.conversion.convert:tie_keys",
    question="models",
    paper="whence",
    cost="training",
    needs=("model", "texts"),
    summary="a pretrained encoder converted so that its attention is unique at every length",
)
declare(
    "token-identifiability",
    "whence.tokens.token_identifiability:token_identifiability",
    question="tokens",
    paper=BRUNNER,
    cost="training",
    needs=("model", "texts"),
    summary="how often a hidden state still tells which input token it was, layer by layer",
)

# Where did this hidden state come from?
declare(
    "attention",
    "whence.mixing.methods:attention",
    question="mixing",
    paper="Vaswani et al. 2017",
    cost="trace",
    summary="the mean over heads of the attention weights, layer by layer",
)
declare(
    "effective",
    "whence.mixing.methods:effective",
    question="mixing",
    paper="Brunner et al. 2020",
    cost="trace",
    summary="effective attention (mean over heads) as the mixing matrix",
)
declare(
    "rollout",
    "whence.mixing.methods:rollout",
    question="mixing",
    paper="Abnar & Zuidema 2020",
    cost="trace",
    summary="attention with the residual as one half, multiplied through the layers",
)
declare(
    "effective-rollout",
    "whence.mixing.methods:effective_rollout",
    question="mixing",
    paper="Abnar & Zuidema 2020; Brunner et al. 2020",
    cost="trace",
    summary="rollout of effective attention",
)
declare(
    "flow",
    "whence.mixing.methods:flow",
    question="mixing",
    paper="Abnar & Zuidema 2020",
    cost="solver",
    summary="maximum flow through the layers, attention as the width of pipes",
)
declare(
    "norms",
    "whence.mixing.methods:norms",
    question="mixing",
    paper="Kobayashi et al. 2020, 2021",
    cost="trace",
    needs=("wiring",),
    summary="the length of each token's part of a state",
)
declare(
    "alti",
    "whence.mixing.methods:alti",
    question="mixing",
    paper="Ferrando et al. 2022",
    cost="trace",
    needs=("wiring",),
    summary="how much closer each token's part brings the state; ALTI+ for encoder–decoders",
)
declare(
    "globenc",
    "whence.mixing.methods:globenc",
    question="mixing",
    paper="Modarressi et al. 2022",
    cost="trace",
    needs=("wiring", "model"),
    summary="the length of each token's part after the block's second norm",
)
declare(
    "value-zeroing",
    "whence.mixing.value_zeroing:value_zeroing",
    question="mixing",
    paper="Mohebbi et al. 2023",
    cost="passes",
    needs=("wiring", "model"),
    summary="how a token's state turns without another token's value",
)
declare(
    "decompx",
    "whence.mixing.decompx:decompx",
    question="mixing",
    paper="Modarressi et al. 2023",
    cost="trace",
    needs=("wiring", "model"),
    summary="one vector per input token, carried through every layer",
)
declare(
    "alti-logit",
    "whence.mixing.alti_logit:alti_logit",
    question="mixing",
    paper="Ferrando et al. 2023",
    cost="trace",
    needs=("wiring", "model", "head"),
    summary="decoders: which inputs pushed a logit, by layer and head",
)
declare(
    "hidden-token-attribution",
    "whence.mixing.hidden_token_attribution:hidden_token_attribution",
    question="mixing",
    paper="Brunner et al. 2020",
    cost="passes",
    needs=("wiring", "model"),
    summary="how strongly each hidden state reacts to each input embedding",
)
declare(
    "local-vs-global",
    "whence.mixing.local_vs_global:local_vs_global",
    question="mixing",
    paper="Pascual et al. 2021",
    cost="passes",
    needs=("wiring", "model"),
    summary="attention rows against the attribution of the head outputs",
)
declare(
    "gradient",
    "whence.mixing.attribute:gradient",
    question="mixing",
    paper="Simonyan et al. 2014",
    cost="gradients",
    needs=("model", "head", "extra:explain"),
    summary="the length of the gradient at each word embedding",
)
declare(
    "input-x-gradient",
    "whence.mixing.attribute:input_x_gradient",
    question="mixing",
    paper="Shrikumar et al. 2016",
    cost="gradients",
    needs=("model", "head", "extra:explain"),
    summary="embedding times gradient, summed",
)
declare(
    "integrated-gradients",
    "whence.mixing.attribute:integrated_gradients",
    question="mixing",
    paper="Sundararajan et al. 2017",
    cost="gradients",
    needs=("model", "head", "extra:explain"),
    summary="gradients along the way from a baseline to the text",
)
declare(
    "occlusion",
    "whence.mixing.attribute:occlusion",
    question="mixing",
    paper="Zeiler & Fergus 2014; leave-one-out",
    cost="passes",
    needs=("model", "head", "extra:explain"),
    summary="what the prediction loses without each token",
)
declare(
    "lime",
    "whence.mixing.attribute:lime",
    question="mixing",
    paper="Ribeiro et al. 2016",
    cost="passes",
    needs=("model", "head", "extra:explain"),
    summary="a sparse linear model of the prediction around the text",
)
declare(
    "kernel-shap",
    "whence.mixing.attribute:kernel_shap",
    question="mixing",
    paper="Lundberg & Lee 2017",
    cost="passes",
    needs=("model", "head", "extra:explain"),
    summary="Shapley values by weighted regression",
)
