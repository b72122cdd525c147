"""A prediction as a function of the text's word embeddings: what gradients and perturbations are taken of.

The output of the model's own word-embedding layer is replaced, so that positions are added once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whence.errors import InputError
from whence.mixing.prediction import Prediction
from whence.reading.capture.attach import accepted
from whence.reading.capture.own_hooks import on_leave
from whence.reading.capture.untouched import evaluating
from whence.reading.rerun.replay import repeated
from whence.reading.rerun.run import on_device
from whence.reading.rerun.word_embeddings import word_embedding
from whence.results.labels import Tokens


@dataclass(frozen=True)
class EmbeddedText:
    """The word embeddings (1, n, d) of the explained text, the layer that made them, and the model's inputs."""

    prediction: Prediction
    layer: nn.Module
    embedded: Tensor
    inputs: Mapping[str, Any]
    output: str

    @classmethod
    def of(cls, prediction: Prediction, output: str) -> EmbeddedText:
        """Found by what the layer is given."""
        model = prediction.model
        prediction.score(
            torch.zeros(1, *_shape(prediction)), output
        )  # refuses what cannot be explained, before it costs
        inputs = accepted(model.model, on_device(model, prediction.trace.inputs))
        layer, embedded = word_embedding(model.model, inputs)
        return cls(prediction, layer, embedded, inputs, output)

    @property
    def tokens(self) -> Tokens:
        """What the scores are of: an encoder–decoder's source, else the text itself."""
        trace = self.prediction.trace
        return trace.of("encoder").tokens if "encoder" in trace.stacks else trace.tokens

    @property
    def special(self) -> Tensor:
        """Boolean [token]: special tokens always stay."""
        return torch.tensor(self.tokens.special, device=self.embedded.device)

    def score(self, embeddings: Tensor) -> Tensor:
        """(sequence, n, d) → (sequence)"""
        with _replaced(self.layer, embeddings):
            logits = self.prediction.model.model(**_repeated(self.inputs, len(embeddings))).logits
        return self.prediction.score(logits, self.output)

    def gradient(self) -> Tensor:
        """(n, d): of the score, at the word embeddings."""
        with evaluating(self.prediction.model.model), torch.enable_grad():
            start = self.embedded.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.score(start).sum(), start)
        return slope[0].detach()

    def absent(self, baseline: str) -> Tensor:
        """(1, n, d): every token replaced by one that says nothing, special tokens kept.

        baseline "mask": the mask token, else the padding token, else zeros; "pad"; "zero".
        """
        if baseline not in ("mask", "pad", "zero"):
            raise InputError(f"baseline={baseline!r} is not 'mask', 'pad' or 'zero'.")
        names = {"mask": ("mask_token_id", "pad_token_id"), "pad": ("pad_token_id",), "zero": ()}[baseline]
        tokenizer = self.prediction.model.tokenizer
        ids = [i for i in (getattr(tokenizer, name, None) for name in names) if i is not None]
        nothing = torch.zeros_like(self.embedded)
        if ids:
            with torch.no_grad():
                nothing = self.layer(torch.full(self.embedded.shape[:2], ids[0], device=self.embedded.device))
        return torch.where(self.special[None, :, None], self.embedded, nothing).detach()


def _shape(prediction: Prediction) -> tuple[int, ...]:
    logits = prediction.trace.logits
    return (1,) if logits is None else tuple(logits.shape)


def _repeated(inputs: Mapping[str, Any], times: int) -> dict[str, Any]:
    """Tensors repeated in a batch, settings as they are."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    return {**inputs, **repeated(tensors, times)}


@contextmanager
def _replaced(layer: nn.Module, embeddings: Tensor) -> Iterator[None]:
    """The word-embedding layer's first output (an encoder–decoder's source) replaced; positions are added after it."""
    calls = 0

    def hook(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        return embeddings if calls == 1 else output

    handle = on_leave(layer, hook)
    try:
        yield
    finally:
        handle.remove()
