"""An answer explained: every row equals a slow autograd loop or the single prediction, and what is gathered its sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import whence
from tests.writers import decoder, tokenizer, translator
from whence.errors import InputError
from whence.mixing.span_attribution import SpanAttribution

PROMPT = "Cats purr.\n\nDogs bark. They"
ANSWER = " run! he is not"


def _slow_input_x_gradient(ids: Tensor, position: int, word: int, other: int | None) -> Tensor:
    """x · ∂(logit − foil)/∂x at the embeddings, by autograd through the whole model."""
    model = decoder().model
    x = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=x).logits[0, position]
    (logits[word] - (0.0 if other is None else logits[other])).backward()
    return (x * x.grad)[0].sum(-1).detach()


def test_gradients_of_a_span_equal_a_slow_loop() -> None:
    found = whence.attribute(decoder(), PROMPT, "input-x-gradient", continuation=ANSWER)
    ids = tokenizer()(PROMPT + ANSWER, return_tensors="pt")["input_ids"]
    start = len(tokenizer()(PROMPT)["input_ids"])
    slow = torch.stack(
        [_slow_input_x_gradient(ids, p, int(ids[0, p + 1]), None) for p in range(start - 1, ids.shape[1] - 1)]
    )
    torch.testing.assert_close(found.values, slow, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.total("sum").values, slow.sum(0), rtol=0, atol=1e-9)
    torch.testing.assert_close(found.total().values, slow.mean(0), rtol=0, atol=1e-9)
    probabilities = decoder().model(ids).logits[0].softmax(-1)
    expected = torch.stack([probabilities[p, ids[0, p + 1]] for p in range(start - 1, ids.shape[1] - 1)])
    torch.testing.assert_close(found.extra["probability"], expected.detach())


def test_a_foil_is_set_token_against_token() -> None:
    one = tokenizer()(" he was")["input_ids"]
    other = [tokenizer()("x")["input_ids"][0], *one[1:]]
    found = whence.attribute(
        decoder(), "The manager went home because", "input-x-gradient", target=" he was", foil=other
    )
    ids = tokenizer()("The manager went home because he was", return_tensors="pt")["input_ids"]
    start = ids.shape[1] - len(one)
    slow = []
    for k, (a, b) in enumerate(zip(one, other, strict=True)):
        slow.append(_slow_input_x_gradient(ids, start - 1 + k, a, b) if a != b else 0 * ids[0])
    torch.testing.assert_close(found.values, torch.stack([s.double() for s in slow]), rtol=0, atol=1e-9)
    assert found.provenance.settings["foil"] == other


@pytest.mark.parametrize("method", ["alti-logit", "alti", "gradient", "occlusion"])
def test_each_row_is_the_single_prediction(method: str) -> None:
    model = decoder()
    found = whence.attribute(model, PROMPT, method, max_new_tokens=3)
    trace = whence.trace(model, PROMPT, max_new_tokens=3)
    for row, position in enumerate(found.extra["position"].tolist()):
        target = {} if method == "alti" else {"target": trace.tokens.ids[position + 1]}
        one = whence.attribute(model, trace, method, position=position, **target)
        torch.testing.assert_close(found.values[row], one.values, rtol=0, atol=1e-9)
        assert bool((found.values[row, position + 1 :] == 0).all())


def test_integrated_gradients_complete() -> None:
    """The row of a token sums to its logit less that of the baseline, as far as the steps allow."""
    found = whence.attribute(decoder(), PROMPT, "integrated-gradients", max_new_tokens=2, steps=100)
    model, ids = decoder().model, torch.tensor([whence.trace(decoder(), PROMPT, max_new_tokens=2).tokens.ids])
    nothing = model.get_input_embeddings()(torch.zeros_like(ids))
    for row, position in enumerate(found.extra["position"].tolist()):
        word = int(ids[0, position + 1])
        change = (model(ids).logits - model(inputs_embeds=nothing).logits)[0, position, word]
        assert abs(float(found.values[row].sum() - change)) < 2e-2 * max(1.0, abs(float(change)))


def test_a_target_of_several_tokens_is_an_answer() -> None:
    forced = whence.attribute(decoder(), PROMPT, "gradient", target=ANSWER)
    assert isinstance(forced, SpanAttribution)
    torch.testing.assert_close(
        forced.values, whence.attribute(decoder(), PROMPT, "gradient", continuation=ANSWER).values
    )
    part = whence.attribute(decoder(), PROMPT, "gradient", continuation=ANSWER, target="not")
    assert "".join(part.tokens) == "not"
    torch.testing.assert_close(part.values, forced.values[-len(part.tokens) :])


def test_gathered_into_sentences_and_documents() -> None:
    found = whence.attribute(decoder(), PROMPT, "input-x-gradient", continuation=ANSWER)
    sentences = found.by("sentence", "sentence")
    assert list(sentences.key_tokens) == ["Cats purr.", "Dogs bark.", "They", "run!", "he is not"]
    assert list(sentences.tokens) == ["run!", "he is not"]
    ends = [len(tokenizer()(text)["input_ids"]) for text in ("Cats purr.\n\n", "Cats purr.\n\nDogs bark.")]
    first = len(tokenizer()(" run!")["input_ids"])
    expected = found.values[:first, ends[0] : ends[1]].sum(1).mean()
    torch.testing.assert_close(sentences.values[0, 1], expected)
    documents = found.by("document")
    assert list(documents.key_tokens) == ["Cats purr.", "Dogs bark. They", "(the answer so far)"]
    torch.testing.assert_close(documents.values.sum(1), found.values.sum(1))
    quoted = found.by("document", documents=["Dogs bark."], how="sum")
    assert list(quoted.key_tokens) == ["Dogs bark.", "(the answer so far)", "(the rest)"]
    with pytest.raises(InputError, match=r"document 0 .* does not stand in the prompt"):
        found.by("document", documents=["Birds sing."])
    with pytest.raises(InputError, match="'chapter' is not one of"):
        found.by("chapter")


def test_an_encoder_decoder_scores_its_source() -> None:
    model = translator()
    found = whence.attribute(model, "Cats purr.", "input-x-gradient", target="Dogs bark.")
    source, written = (
        tokenizer()("Cats purr.", return_tensors="pt")["input_ids"],
        tokenizer()("Dogs bark.")["input_ids"],
    )
    assert found.shape == (len(written), source.shape[1])
    decoded = torch.tensor([[0, *written]])
    for row, word in enumerate(written):
        x = model.model.get_input_embeddings()(source).detach().requires_grad_()
        model.model(inputs_embeds=x, decoder_input_ids=decoded).logits[0, row, word].backward()
        torch.testing.assert_close(found.values[row], (x * x.grad)[0].sum(-1).detach(), rtol=0, atol=1e-9)
    assert len(whence.attribute(model, "Cats purr.", "gradient", max_new_tokens=3).tokens) <= 3


def test_shown_saved_and_refused(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    found = whence.attribute(decoder(), PROMPT, "input-x-gradient", max_new_tokens=3)
    found.show()
    assert len(capsys.readouterr().out.splitlines()) == 3
    again = SpanAttribution.load(found.save(f"{tmp_path}/a.safetensors"))
    torch.testing.assert_close(again.by("sentence").values, found.by("sentence").values)
    assert "<table>" in found._repr_html_()
    for options, said in (
        ({"max_new_tokens": 3, "target": "zebra"}, "stands 0 times"),
        ({"continuation": " he is", "foil": " he"}, "token against token"),
        ({"continuation": " he is", "foil": " he is"}, "the answer itself"),
    ):
        with pytest.raises(InputError, match=said):
            whence.attribute(decoder(), PROMPT, "gradient", **options)
    with pytest.raises(InputError, match="has no effect on method 'alti'"):
        whence.attribute(decoder(), PROMPT, "alti", foil=" he", max_new_tokens=1)
