"""Rollout of attention weighed by its gradient: which attention mattered to this prediction?

Chefer, Gur & Wolf, "Generic Attention-model Explainability" (ICCV 2021), self-attention:

    Ā_l = mean over heads of max(0, ∂s/∂A_l ⊙ A_l),     R_0 = I,  R_l = R_{l−1} + Ā_l R_{l−1}

read at the rows that the head reads, without the identity.
"""

from __future__ import annotations

import torch

from whence.errors import InputError, ModelError
from whence.mixing.prediction import Prediction
from whence.mixing.token_scores import TokenScores
from whence.model.memory import lock_of
from whence.reading.capture.attach import accepted, attached
from whence.reading.capture.recorder import AttentionRecorder
from whence.reading.capture.untouched import evaluating
from whence.reading.inputs import Prepared
from whence.reading.rerun.run import on_device, prove_model


def gradient_rollout(prediction: Prediction, *, output: str = "logit") -> TokenScores:
    """[input]: what the attention that pushed the score up brought from each token."""
    model, trace, stack = prediction.model, prediction.trace, prediction.stack
    if len(trace.stacks) > 1:
        raise InputError(f"gradient-rollout reads one stack, and this trace has {', '.join(trace.stacks)}.")
    trace.follow("gradient-rollout")
    proof = prove_model(model, Prepared(dict(trace.inputs), trace.tokens))
    proof.refuse_chosen_heads(stack, "gradient-rollout")
    recorder = AttentionRecorder(keep=lambda _: frozenset({"attention"}))
    inputs = accepted(model.model, on_device(model, trace.inputs))
    with (
        lock_of(model.model),
        evaluating(model.model),
        attached(model.model, proof.capture, recorder, 1),
        torch.enable_grad(),
    ):
        score = prediction.score(model.model(**inputs).logits, output)
    weights = [recorder.calls[site.number].weights for site in proof.of(stack.name)]
    if not score.requires_grad or any(not w.requires_grad for w in weights):
        raise ModelError(f"{model.name}: its attention is not on the path of autograd, so it has no gradient.")
    slopes = torch.autograd.grad(score.sum(), weights, allow_unused=True)
    rolled = torch.eye(len(stack.tokens), dtype=torch.float64)
    identity = rolled.clone()
    for weight, slope in zip(weights, slopes, strict=True):
        if slope is None:
            raise ModelError(f"{model.name}: a layer's recorded attention does not lead to the prediction.")
        mattered = (slope.double() * weight.double()).detach().clamp(min=0)[0].mean(0).cpu()
        rolled = rolled + mattered @ rolled
    return TokenScores(prediction.rows @ (rolled - identity), stack.tokens)
