"""What a prediction does when tokens are taken away: one at a time (occlusion), or many at random (LIME, kernel SHAP)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whence.errors import MissingExtraError
from whence.mixing.prediction import Prediction
from whence.mixing.token_scores import TokenScores
from whence.mixing.word_embeddings import EmbeddedText
from whence.reading.capture.untouched import evaluating


def captum(name: str) -> Any:
    """Captum's attribution methods; an error that names the extra where it is not installed."""
    try:
        import captum.attr
    except ImportError as problem:
        raise MissingExtraError(
            f"method {name!r} comes from Captum, which is not installed: pip install 'whence[explain]'."
        ) from problem
    return captum.attr


def occlusion(
    prediction: Prediction, *, output: str = "logit", baseline: str = "mask", batch_size: int = 16
) -> TokenScores:
    """What the score loses without each token (Zeiler & Fergus 2014; leave one out). Special tokens get 0."""
    text = EmbeddedText.of(prediction, output)
    n = len(text.tokens)
    absent = text.absent(baseline)
    with evaluating(prediction.model.model), torch.no_grad():
        whole = text.score(text.embedded)
        scores = torch.zeros(n, dtype=whole.dtype, device=whole.device)
        ordinary = (~text.special).nonzero()[:, 0]
        for some in ordinary.split(batch_size):
            without = text.embedded.repeat(len(some), 1, 1)
            without[torch.arange(len(some)), some] = absent[0, some]
            scores[some] = whole - text.score(without)
    return TokenScores(scores, text.tokens)


def lime(
    prediction: Prediction, *, output: str = "logit", baseline: str = "mask", samples: int | None = None, seed: int = 0,
    batch_size: int = 16,
) -> TokenScores:  # fmt: skip
    """A sparse linear model of the score around the text (Ribeiro et al. 2016). Special tokens get 0."""
    return _sampled(prediction, "lime", output, baseline, samples, seed, batch_size)


def kernel_shap(
    prediction: Prediction, *, output: str = "logit", baseline: str = "mask", samples: int | None = None, seed: int = 0,
    batch_size: int = 16,
) -> TokenScores:  # fmt: skip
    """Shapley values by weighted regression (Lundberg & Lee 2017). Special tokens get 0."""
    return _sampled(prediction, "kernel-shap", output, baseline, samples, seed, batch_size)


def _sampled(
    prediction: Prediction, name: str, output: str, baseline: str, samples: int | None, seed: int, batch_size: int
) -> TokenScores:
    text = EmbeddedText.of(prediction, output)
    library = captum(name)
    try:
        explainer = (library.Lime if name == "lime" else library.KernelShap)(text.score)
    except (ImportError, AssertionError) as problem:
        raise MissingExtraError(f"method {name!r} also needs scikit-learn: pip install 'whence[explain]'.") from problem
    special = text.special
    # Special tokens are one feature, number 0, which never changes.
    numbers = torch.where(special, 0, (~special).cumsum(0) - int(not bool(special.any())))
    features = numbers[None, :, None].expand_as(text.embedded)
    count = samples or max(64, 8 * len(text.tokens))
    with evaluating(prediction.model.model), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        values: Tensor = explainer.attribute(
            text.embedded, text.absent(baseline), feature_mask=features, n_samples=count,
            perturbations_per_eval=batch_size,
        )[0, :, 0]  # fmt: skip
    return TokenScores(torch.where(special, 0.0, values), text.tokens)
