"""Models that mix tokens outside attention: what does not assume otherwise is right, and the rest names the mixer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import whence
from conformance.zoo import Specimen, build
from whence.errors import WiringError
from whence.model.load import Model

MIXERS = {"jamba": "mamba", "lfm2": "conv", "recurrent_gemma": "temporal_block", "falcon_h1": "mamba"}


@pytest.fixture(scope="module", params=list(MIXERS))
def read(request: pytest.FixtureRequest) -> tuple[Specimen, Any]:
    specimen = build(request.param)
    return specimen, whence.trace(Model(specimen.model, name=request.param), specimen.inputs)


def followed(specimen: Specimen) -> tuple[Tensor, list[Tensor], Tensor]:
    """The word embeddings as a leaf, what every layer of the model gives, and the logits: plain torch."""
    model: Any = specimen.model
    leaf: list[Tensor] = []
    layers: list[Tensor] = []

    def embed(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        leaf.append(output.detach().requires_grad_())
        return leaf[0]

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        layers.append(output[0] if isinstance(output, tuple) else output)

    hooks = [model.get_input_embeddings().register_forward_hook(embed)]
    hooks += [layer.register_forward_hook(keep) for layer in model.model.layers]
    try:
        logits = model(**specimen.inputs).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return leaf[0], layers, logits


def test_hidden_token_attribution_starts_at_the_embeddings(read: Any) -> None:
    specimen, trace = read
    result = whence.hidden_token_attribution(trace, "exact")
    words, layers, _ = followed(specimen)
    # Falcon-H1 has attention in its first layer: there x is what this layer reads, the word embeddings times a factor.
    assert result.provenance.settings["embeddings"] == ("after" if specimen.family == "falcon_h1" else "words")
    state = layers[-1]
    assert torch.allclose(state[0], trace[len(trace) - 1].block_output, atol=1e-5)
    for j in (4, 11):
        squared = torch.zeros(len(result.tokens), dtype=torch.float64)
        for k in range(state.shape[-1]):
            (slope,) = torch.autograd.grad(state[0, j, k], words, retain_graph=True)
            squared += slope[0].square().sum(-1)
        assert torch.allclose(result.values[-1, j], squared.sqrt() / squared.sqrt().sum(), atol=1e-5)


def test_gradients_and_occlusion_are_the_models_own(read: Any) -> None:
    pytest.importorskip("captum")
    specimen, trace = read
    words, _, logits = followed(specimen)
    logit = float(logits[-1, 7].detach())
    (slope,) = torch.autograd.grad(logits[-1, 7], words)
    model = Model(specimen.model, name=specimen.family)
    gradient = whence.attribute(model, trace, "gradient", 7)
    product = whence.attribute(model, trace, "input-x-gradient", 7)
    scale = float(slope.norm(dim=-1).max())
    assert torch.allclose(gradient.values / scale, slope[0].norm(dim=-1) / scale, atol=1e-4)
    assert torch.allclose(product.values, (slope * words)[0].sum(-1), rtol=1e-3, atol=1e-4 * scale)
    left_out = whence.attribute(model, trace, "leave-one-out", 7, baseline="zero")
    embedding: Any = specimen.model.get_input_embeddings()
    for at in (0, 5):

        def without(_module: Any, _inputs: Any, output: Tensor, at: int = at) -> Tensor:
            output = output.clone()
            output[:, at] = 0
            return output

        hook = embedding.register_forward_hook(without)
        with torch.no_grad():
            changed = specimen.model(**specimen.inputs).logits[0, -1, 7]
        hook.remove()
        assert float(left_out.values[at]) == pytest.approx(logit - float(changed), abs=1e-4)


@pytest.mark.parametrize("method", ["alti", "rollout", "norms", "flow", "decompx", "alti-logit"])
def test_what_follows_attention_names_the_mixer(read: Any, method: str) -> None:
    specimen, trace = read
    with pytest.raises(WiringError, match=rf"mix outside the attention that was read, in .*{MIXERS[specimen.family]}"):
        whence.attribute(Model(specimen.model, name=specimen.family), trace, method)
