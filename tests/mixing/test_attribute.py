"""Scores for one prediction: the right row, the right embeddings, and Captum behind its extra."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

import whence
from tests.mixing.mixing_oracle import alti as slow_alti
from tests.mixing.mixing_oracle import head_expanded
from whence.errors import InputError, MissingExtraError, WiringError
from whence.method_table import explaining
from whence.method_table import method as method_of
from whence.reading.trace import Trace
from whence.results.labels import Tokens

Zoo = Callable[..., Trace]
IDS = torch.tensor([[5, 17, 33, 8, 42, 6]])


@pytest.fixture(scope="module")
def classifier() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=60, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, num_labels=3
    )
    model = BertForSequenceClassification(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def traced(model: torch.nn.Module, ids: torch.Tensor = IDS) -> Trace:
    found = whence.trace(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return found if isinstance(found, Trace) else found[0]


BY_LAYER = [m.name for m in explaining() if m.gives in ("matrix", "contributions") and not m.contrast]
CONTRAST = [m.name for m in explaining() if m.contrast and m.name != "alti-logit"]


@pytest.mark.parametrize("method", BY_LAYER)
def test_a_classifier_is_read_at_its_first_row(classifier: BertForSequenceClassification, method: str) -> None:
    trace = traced(classifier)
    scores = whence.attribute(classifier, trace, method)
    if method == "hidden-token-attribution":
        expected = whence.hidden_token_attribution(trace).values[-1, 0]
    else:
        expected = whence.contributions(trace, method).rollout().values[-1, 0]
    assert torch.allclose(scores.values.float(), expected.float(), atol=1e-6)
    assert scores.axes == ("input",)
    assert len(scores.ranked()) == 6


def test_other_rows(zoo: Zoo, minilm: whence.Model) -> None:
    decoder = zoo("llama")
    rolled = whence.contributions(decoder, "alti").rollout().values[-1]
    assert torch.equal(whence.attribute(decoder.model, decoder, "alti").values, rolled[-1])
    assert torch.equal(whence.attribute(decoder.model, decoder, "alti", position=4).values, rolled[4])
    with pytest.raises(InputError, match="out of range"):
        whence.attribute(decoder.model, decoder, "alti", position=99)
    headless = whence.attribute(minilm, "The bank raised its rates.")
    assert headless.provenance.settings["row"] == "mean"
    both = zoo("bart")
    assert len(whence.attribute(both.model, both, "alti").tokens) == len(both.of("encoder").tokens) + len(
        both.of("decoder").tokens
    )


def test_a_masked_model_needs_one_mask() -> None:
    config = BertConfig(vocab_size=60, hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=40)
    model = BertForMaskedLM(config).eval()
    with pytest.raises(InputError, match="say which position"):
        whence.attribute(model, traced(model), "alti")
    assert whence.attribute(model, traced(model), "alti", position=2).provenance.settings["row"] == 2


def test_alti_logit_adds_up_to_the_logit(zoo: Zoo) -> None:
    for family in ("granite", "cohere", "opt", "llama", "gpt2", "gemma", "gpt_neox", "olmo2"):
        trace = zoo(family)
        for target, position in ((None, -1), (7, 3)):
            found = whence.contributions(trace, "alti-logit", target=target, position=position)
            parts = found.values.sum() + sum(found.extra[k].sum() for k in ("feedforward", "embedding", "bias"))
            assert trace.logits is not None
            logit = trace.logits[position, found.provenance.settings["target"]]
            assert abs(float(parts - logit)) < 1e-3 * float(trace.logits.abs().max())
            assert bool((found.values[:, :, found.provenance.settings["position"] + 1 :] == 0).all())
            assert torch.allclose(found.extra["direct"].sum((1, 2)), found.values.sum((1, 2)), atol=1e-4)
    assert found.by_input().shape == (12,)
    assert list(found.by_layer().columns) == ["layer", "attention", "feedforward"]


def test_alti_logit_refuses_what_is_not_a_sum(zoo: Zoo) -> None:
    with pytest.raises(InputError, match="reads decoders"):
        whence.contributions(zoo("bert"), "alti-logit")
    with pytest.raises((WiringError, InputError), match=r"post-norm wired|not a linear map"):
        whence.contributions(zoo("openai-gpt"), "alti-logit")
    with pytest.raises(InputError, match="vocabulary has"):
        whence.contributions(zoo("llama"), "alti-logit", target=10**6)


def test_gradients_are_taken_at_the_word_embeddings(classifier: BertForSequenceClassification) -> None:
    pytest.importorskip("captum")
    trace = traced(classifier)
    words = classifier.bert.embeddings.word_embeddings(IDS).detach().requires_grad_()
    logits = classifier(inputs_embeds=words).logits[0]  # word embeddings only: BERT adds positions itself
    (slope,) = torch.autograd.grad(logits[1], words)
    gradient = whence.attribute(classifier, trace, "gradient", 1)
    product = whence.attribute(classifier, trace, "input-x-gradient", 1)
    assert torch.allclose(gradient.values, slope[0].norm(dim=-1), atol=1e-6)
    assert torch.allclose(product.values, (slope * words)[0].sum(-1), atol=1e-6)
    assert not classifier.training
    assert not any(p.grad is not None for p in classifier.parameters())


def test_integrated_gradients_are_complete(classifier: BertForSequenceClassification) -> None:
    pytest.importorskip("captum")
    scores = whence.attribute(classifier, traced(classifier), "ig", 0, baseline="zero", steps=200)
    with torch.no_grad():
        zeros = torch.zeros(1, 6, 24)
        change = classifier(input_ids=IDS).logits[0, 0] - classifier(inputs_embeds=zeros).logits[0, 0]
    assert abs(float(scores.values.sum() - change)) < 1e-2 * max(1.0, abs(float(change)))


def test_occlusion_is_leave_one_out(classifier: BertForSequenceClassification) -> None:
    pytest.importorskip("captum")
    scores = whence.attribute(classifier, traced(classifier), "leave-one-out", 2, baseline="zero", output="probability")
    words = classifier.bert.embeddings.word_embeddings(IDS).detach()
    with torch.no_grad():
        whole = torch.softmax(classifier(inputs_embeds=words).logits, -1)[0, 2]
        for i in range(6):
            without = words.clone()
            without[0, i] = 0
            left = torch.softmax(classifier(inputs_embeds=without).logits, -1)[0, 2]
            assert abs(float(scores.values[i] - (whole - left))) < 1e-6


@pytest.mark.parametrize("method", ["IntegratedGradients", "Lime", "KernelShap"])
def test_captum_called_directly_gives_the_same_scores(classifier: BertForSequenceClassification, method: str) -> None:
    attr = pytest.importorskip("captum.attr")
    pytest.importorskip("sklearn")
    words = classifier.bert.embeddings.word_embeddings(IDS).detach()
    own = getattr(attr, method)(lambda embedded: classifier(inputs_embeds=embedded).logits[:, 1])
    if method == "IntegratedGradients":
        values = own.attribute(words, torch.zeros_like(words), n_steps=50)[0].sum(-1)
        found = whence.attribute(classifier, traced(classifier), "ig", 1, baseline="zero", steps=50)
    else:
        features = torch.arange(6)[None, :, None].expand_as(words)  # a token is one feature
        torch.manual_seed(3)
        with torch.no_grad():
            values = own.attribute(words, torch.zeros_like(words), feature_mask=features, n_samples=100)[0, :, 0]
        name = {"Lime": "lime", "KernelShap": "kernel-shap"}[method]
        found = whence.attribute(classifier, traced(classifier), name, 1, baseline="zero", samples=100, seed=3)
    assert float(values.abs().max()) > 1e-3
    assert torch.allclose(found.values, values.to(found.values), atol=1e-5)


@pytest.mark.parametrize("method", ["lime", "kernel-shap"])
def test_sampled_methods_have_a_seed_and_keep_special_tokens(
    classifier: BertForSequenceClassification, method: str
) -> None:
    pytest.importorskip("captum")
    pytest.importorskip("sklearn")
    trace = traced(classifier)
    stack = trace.of()
    tokens = Tokens(stack.tokens.text, stack.tokens.raw, special=(True, False, False, False, False, True))
    trace = replace(trace, stacks={stack.name: replace(stack, tokens=tokens, key_tokens=tokens)})
    one, two = (whence.attribute(classifier, trace, method, baseline="zero", samples=200, seed=3) for _ in range(2))
    assert torch.equal(one.values, two.values)
    assert one.values[0] == one.values[5] == 0


def test_every_captum_method_on_an_encoder_decoder(zoo: Zoo) -> None:
    pytest.importorskip("captum")
    trace = zoo("bart")
    for method in ("gradient", "input-x-gradient", "integrated-gradients", "occlusion"):
        options = {"steps": 4} if method == "integrated-gradients" else {}
        scores = whence.attribute(trace.model, trace, method, **options)
        assert len(scores.values) == len(trace.of("encoder").tokens)
        assert bool(torch.isfinite(scores.values).all())


def test_without_the_extra(classifier: BertForSequenceClassification, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "captum", None)
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    with pytest.raises(MissingExtraError, match=r"whence\[explain\]"):
        whence.attribute(classifier, traced(classifier), "ig")
    assert len(whence.attribute(classifier, traced(classifier), "gradient").values) == 6


def test_what_cannot_be_asked(classifier: BertForSequenceClassification, minilm: whence.Model) -> None:
    pytest.importorskip("captum")
    trace = traced(classifier)
    for options, words in (
        ({"method": "magic"}, "No method is called 'magic'"),
        ({"method": "gradient", "target": 9}, "no class"),
        ({"method": "gradient", "target": "joy"}, "LABEL_0"),
        ({"method": "occlusion", "baseline": "noise"}, "'mask', 'pad' or 'zero'"),
        ({"method": "gradient", "output": "odds"}, "'logit' or 'probability'"),
        ({"method": "gradient", "distance": "l2"}, "has no option 'distance'"),
    ):
        with pytest.raises(InputError, match=words):
            whence.attribute(classifier, trace, **options)
    with pytest.raises(InputError, match="it has no head"):
        whence.attribute(minilm, "Rates rose.", "gradient")
    with pytest.raises(InputError, match="one text"):
        whence.attribute(minilm, ["Rates rose.", "Rates fell."])


# -- targets and foils ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [m for m in BY_LAYER if m != "flow"] + ["last-attention", "last-effective"])
def test_a_target_without_effect_is_refused(classifier: BertForSequenceClassification, method: str) -> None:
    for given in ({"target": "banana"}, {"target": 1}, {"foil": 0}):
        with pytest.raises(InputError, match="has no effect on method"):
            whence.attribute(classifier, traced(classifier), method, **given)


@pytest.mark.parametrize("method", CONTRAST)
def test_unknown_targets_are_refused(classifier: BertForSequenceClassification, method: str) -> None:
    pytest.importorskip("captum")
    for given, words in (
        ({"target": "banana"}, "no class of"),
        ({"target": 3}, "no class of"),
        ({"target": -1}, "no class of"),
        ({"target": True}, "not a name or a number"),
        ({"target": 1, "foil": "banana"}, "foil='banana' is no class"),
        ({"target": 1, "foil": 1}, "the target itself"),
        ({"target": 1, "position": 2}, "one prediction for the whole text"),
    ):
        with pytest.raises(InputError, match=words):
            whence.attribute(classifier, traced(classifier), method, **given)


def test_a_foil_is_the_difference_of_two_targets(classifier: BertForSequenceClassification) -> None:
    """Linear methods: the scores of "1 rather than 2" are those of 1 less those of 2."""
    pytest.importorskip("captum")
    trace = traced(classifier)
    for method in ("input-x-gradient", "integrated-gradients", "occlusion"):
        one, two = (whence.attribute(classifier, trace, method, k).values for k in (1, 2))
        both = whence.attribute(classifier, trace, method, "LABEL_1", foil="LABEL_2").values
        assert torch.allclose(both, one - two, atol=1e-5)
    one, both = (whence.attribute(classifier, trace, "gradient", 1, foil=k).values for k in (None, 2))
    assert not torch.allclose(one, both)


def test_alti_logit_of_a_contrast(zoo: Zoo) -> None:
    trace = zoo("llama", torch.float64)
    one, two = (whence.attribute(trace.model, trace, "alti-logit", k).values for k in (3, 5))
    both = whence.attribute(trace.model, trace, "alti-logit", 3, foil=5)
    assert torch.allclose(both.values, one - two, atol=1e-10)
    assert (both.provenance.settings["target"], both.provenance.settings["foil"]) == (3, 5)
    with pytest.raises(InputError, match="vocabulary has"):
        whence.attribute(trace.model, trace, "alti-logit", 3, foil=10**6)


@pytest.mark.parametrize("family", ["granite", "cohere", "opt"])
def test_alti_logit_of_scaled_logits(zoo: Zoo, family: str) -> None:
    """One factor on all logits (Granite, Cohere) and a body that hands nothing over (OPT) leave the head linear."""
    trace = zoo(family)
    assert trace.logits is not None
    result = whence.contributions(trace, "alti-logit", target=7, position=3)
    parts = result.values.sum() + sum(result.extra[k].sum() for k in ("feedforward", "embedding", "bias"))
    assert abs(float(parts - trace.logits[3, 7])) < 1e-3 * float(trace.logits.abs().max())


# -- the definitions, slowly ---------------------------------------------------------------------------------------


def test_absolute_forms(classifier: BertForSequenceClassification) -> None:
    pytest.importorskip("captum")
    trace = traced(classifier)
    for method in ("input-x-gradient", "integrated-gradients"):
        signed, absolute = (whence.attribute(classifier, trace, name, 1) for name in (method, f"absolute-{method}"))
        assert bool((signed.values < 0).any())
        assert torch.equal(absolute.values, signed.values.abs())
        assert (signed.signed, absolute.signed) == (True, False)


def test_last_attention_at_the_row_that_is_read(classifier: BertForSequenceClassification) -> None:
    trace = traced(classifier)
    raw = whence.attribute(classifier, trace, "last-attention")
    assert torch.allclose(raw.values, trace.attention[-1, :, 0].mean(0), atol=1e-6)
    effective = whence.attribute(classifier, trace, "last-effective", constraint="output")
    expected = whence.effective_attention(trace, constraint="output").values[-1, :, 0].mean(0)
    assert torch.allclose(effective.values, expected, atol=1e-5)


def test_gradient_rollout_from_its_definition() -> None:
    """∂s/∂A by finite differences, one weight at a time, put into the model."""
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=60, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, num_labels=2
    )
    model = BertForSequenceClassification(config).eval().double()
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    ids = IDS[:, :4]
    trace = traced(model, ids)
    ours = whence.attribute(model, trace, "gradient-rollout", 1).values
    rolled = torch.eye(4, dtype=torch.float64)
    for layer in range(2):
        mattered = torch.zeros(4, 4, dtype=torch.float64)
        for head in range(2):
            attention = trace.attention[layer, head]
            for i in range(4):
                for j in range(4):
                    step = torch.zeros_like(attention)
                    step[i, j] = 1e-5
                    up, down = (_logit(model, ids, layer, head, attention + sign * step) for sign in (1, -1))
                    mattered[i, j] += max(0.0, float((up - down) / 2e-5 * attention[i, j])) / 2
        rolled = rolled + mattered @ rolled
    assert torch.allclose(ours, (rolled - torch.eye(4, dtype=torch.float64))[0], atol=1e-7)


def _logit(
    model: BertForSequenceClassification, ids: torch.Tensor, layer: int, head: int, attention: torch.Tensor
) -> torch.Tensor:
    """Logit 1 with one head's attention replaced; written out from the weights, nothing of whence."""
    body = model.bert
    with torch.no_grad():
        x = body.embeddings(input_ids=ids)[0]
        for number, block in enumerate(body.encoder.layer):
            own = block.attention.self
            query, key, value = (
                getattr(own, name)(x).view(4, 2, 6).transpose(0, 1) for name in ("query", "key", "value")
            )
            weights = torch.softmax(query @ key.mT / 6**0.5, dim=-1)
            if number == layer:
                weights[head] = attention
            mixed = (weights @ value).transpose(0, 1).reshape(4, 12)
            x = block.attention.output.LayerNorm(block.attention.output.dense(mixed) + x)
            inner = torch.nn.functional.gelu(block.intermediate.dense(x))
            x = block.output.LayerNorm(block.output.dense(inner) + x)
        return model.classifier(body.pooler(x[None]))[0, 1]


def test_alti_logit_head_by_head(zoo: Zoo) -> None:
    """u · A V W / σ one position at a time, followed back by a slow ALTI."""
    trace = zoo("llama", torch.float64)
    assert trace.model is not None
    at, word = 5, 7
    found = whence.contributions(trace, "alti-logit", target=word, position=at)
    head, norm = trace.model.model.lm_head, trace.model.model.model.norm
    last = trace[-1 % len(trace)].block_output[at]
    direction = (
        head.weight.detach()[word] * norm.weight.detach() / (last.square().mean() + norm.variance_epsilon).sqrt()
    )
    origin = torch.eye(len(trace.tokens), dtype=torch.float64)
    for i, layer in enumerate(trace.of()):
        for h in range(len(layer.heads)):
            for j in range(at + 1):
                part = layer.attention[h, at, j] * (layer.values[h, j] @ layer.projection.weight[h])
                assert abs(float(part @ direction - found.extra["direct"][i, h, j])) < 1e-10
            assert torch.allclose(found.values[i, h], found.extra["direct"][i, h] @ origin, atol=1e-10)
        parts, _, state = head_expanded(layer)
        origin = slow_alti(parts, state) @ origin


def test_lime_and_shap_of_a_linear_model() -> None:
    """Scores of an additive model are known: kernel SHAP gives each token's part, LIME gives their order."""
    pytest.importorskip("captum")
    pytest.importorskip("sklearn")
    from whence.mixing.prediction import prediction_of

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=60, hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=40, num_labels=2
    )
    model = BertForSequenceClassification(config).eval()
    trace = traced(model)
    parts = torch.tensor([0.5, -1.0, 2.0, 0.25, -0.125, 1.0])

    class Additive(torch.nn.Module):
        config = model.config

        def __init__(self) -> None:
            super().__init__()
            self.words = model.bert.embeddings.word_embeddings

        def forward(self, input_ids: torch.Tensor) -> Any:
            there = (self.words(input_ids) != 0).any(-1).float()  # baseline "zero": a token that is not there
            total = there @ parts
            return SimpleNamespace(logits=torch.stack([total, -total], dim=-1))

    prediction = replace(
        prediction_of(whence.Model(model), trace, 0, None, None), model=whence.Model(Additive().eval())
    )
    values = method_of("kernel-shap")(prediction, baseline="zero", samples=400).values
    assert torch.allclose(values, parts, atol=1e-3)
    values = method_of("lime")(prediction, baseline="zero", samples=400).values
    assert values.argsort().tolist() == parts.argsort().tolist()
