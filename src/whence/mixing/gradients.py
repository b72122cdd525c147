"""Gradients of a prediction at the word embeddings, and gradients along a path to them.

gradient               ‖∂s/∂x_i‖₂ (Simonyan et al. 2014)
input × gradient       Σ_d x_id ∂s/∂x_id (Shrikumar et al. 2016), signed; its absolute value is a method of its own
integrated gradients   Σ_d (x_id − b_id) ∫₀¹ ∂s/∂x_id(b + α(x − b)) dα (Sundararajan et al. 2017), likewise
"""

from __future__ import annotations

import torch
from torch import Tensor

from whence.mixing.perturbations import captum
from whence.mixing.prediction import Prediction
from whence.mixing.token_scores import TokenScores
from whence.mixing.word_embeddings import EmbeddedText
from whence.reading.capture.untouched import evaluating


def gradient(prediction: Prediction, *, output: str = "logit") -> TokenScores:
    """The length of the gradient at each word embedding."""
    text = EmbeddedText.of(prediction, output)
    return TokenScores(text.gradient().norm(dim=-1), text.tokens)


def input_x_gradient(prediction: Prediction, *, output: str = "logit") -> TokenScores:
    """Embedding times gradient, summed: what the score would lose without the token, were the model linear."""
    text = EmbeddedText.of(prediction, output)
    return TokenScores((text.gradient() * text.embedded[0]).sum(-1), text.tokens)


def absolute_input_x_gradient(prediction: Prediction, *, output: str = "logit") -> TokenScores:
    """The absolute value of `input_x_gradient`, by token."""
    return input_x_gradient(prediction, output=output).absolute()


def integrated_gradients(
    prediction: Prediction, *, output: str = "logit", baseline: str = "mask", steps: int = 50, batch_size: int = 16
) -> TokenScores:
    """Gradients on the way from a baseline to the text; they sum to the change of the score, to `extra` "gap"."""
    text = EmbeddedText.of(prediction, output)
    method = captum("integrated-gradients").IntegratedGradients(text.score)
    with evaluating(prediction.model.model), torch.enable_grad():
        values, gap = method.attribute(
            text.embedded.detach(), text.absent(baseline), n_steps=steps, internal_batch_size=batch_size,
            return_convergence_delta=True,
        )  # fmt: skip
    summed: Tensor = values.detach().sum(-1)[0]
    return TokenScores(summed, text.tokens, {"gap": gap.detach()})


def absolute_integrated_gradients(
    prediction: Prediction, *, output: str = "logit", baseline: str = "mask", steps: int = 50, batch_size: int = 16
) -> TokenScores:
    """The absolute value of `integrated_gradients`, by token."""
    options = {"output": output, "baseline": baseline, "steps": steps, "batch_size": batch_size}
    return integrated_gradients(prediction, **options).absolute()  # type: ignore[arg-type]
