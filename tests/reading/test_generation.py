"""A trace of a prompt and its answer is the trace of the joined ids; chat templates; what cannot follow a prompt."""

from __future__ import annotations

import pytest
import torch

import whence
from tests.writers import decoder, tokenizer, translator
from whence.errors import InputError

PROMPT = "The manager went home because"


def _same(one: whence.Trace, other: whence.Trace) -> None:
    assert one.logits is not None
    assert other.logits is not None
    torch.testing.assert_close(one.attention, other.attention, rtol=0, atol=1e-5)
    torch.testing.assert_close(one.values, other.values, rtol=0, atol=1e-5)
    torch.testing.assert_close(one.logits, other.logits, rtol=0, atol=1e-5)


def test_a_continuation_is_the_joined_ids() -> None:
    model = decoder()
    found = whence.trace(model, PROMPT, continuation=" she was sick.")
    joined = tokenizer()(PROMPT + " she was sick.", return_tensors="pt")["input_ids"]
    assert found.tokens.ids == tuple(joined[0].tolist())
    _same(found, whence.trace(model, joined))
    assert found.text == PROMPT + " she was sick."
    assert found.continuation == " she was sick."
    assert found.prompt_length == len(tokenizer()(PROMPT)["input_ids"])


def test_what_the_model_writes_is_what_generate_writes() -> None:
    model = decoder()
    ids = tokenizer()(PROMPT, return_tensors="pt")["input_ids"]
    written = model.model.generate(input_ids=ids, do_sample=False, max_new_tokens=6, pad_token_id=0)
    found = whence.trace(model, PROMPT, max_new_tokens=6)
    assert found.tokens.ids == tuple(written[0].tolist())
    _same(found, whence.trace(model, written))
    rows = found.logits[found.prompt_length - 1 : -1]
    assert rows.argmax(-1).tolist() == list(found.tokens.ids[found.prompt_length :])


def test_the_answers_of_many_prompts_and_of_ids() -> None:
    model = decoder()
    alone = whence.trace(model, PROMPT, continuation=" he was")
    both = whence.trace(model, [PROMPT, "Cats"], continuation=[" he was", " purr."])
    _same(both[0], alone)
    by_ids = whence.trace(
        model, tokenizer()(PROMPT, return_tensors="pt"), continuation=tokenizer()(" he was")["input_ids"]
    )
    _same(by_ids, alone)


def test_saved_and_read_again(tmp_path: object) -> None:
    found = whence.trace(decoder(), PROMPT, continuation=" he was")
    again = whence.Trace.load(found.save(f"{tmp_path}/trace.safetensors"))
    assert (again.prompt_length, again.continuation) == (found.prompt_length, " he was")


def test_a_chat_goes_through_the_template() -> None:
    model = decoder()
    templated = "<|user|>Dogs bark.\n<|assistant|>"
    assert whence.trace(model, "Dogs bark.", chat=True).text == templated
    messages = [{"role": "user", "content": "Dogs bark."}]
    found = whence.trace(model, messages, max_new_tokens=2)
    assert found.text.startswith(templated)
    _same(found, whence.trace(model, templated, max_new_tokens=2))
    assert whence.trace(model, "Dogs bark.").text == "Dogs bark."


def test_an_encoder_decoder_writes_its_target() -> None:
    found = whence.trace(translator(), "Cats purr.", max_new_tokens=3)
    assert len(found.of("decoder").tokens) <= 4
    with pytest.raises(InputError, match="give what its decoder reads with target="):
        whence.trace(translator(), "Cats purr.", continuation="x")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"continuation": ""}, "is empty"),
        ({"continuation": 1.5}, "holds no token ids"),
        ({"continuation": [[99999]]}, "out of range"),
        ({"continuation": "a", "max_new_tokens": 2}, "give one"),
        ({"max_new_tokens": 0}, "give 1 or more"),
        ({"max_new_tokens": "three"}, "not a number of tokens"),
        ({"max_new_tokens": 500}, "positions for 128"),
        ({"chat": True, "text": ["a", "b"]}, "list of messages"),
    ],
)
def test_refusals(options: dict[str, object], said: str) -> None:
    text = options.pop("text", PROMPT)
    with pytest.raises(whence.errors.WhenceError, match=said):
        whence.trace(decoder(), text, **options)


def test_a_model_that_writes_nothing_is_refused(minilm: whence.Model) -> None:
    with pytest.raises(InputError, match="writes no text"):
        whence.trace(minilm, "The bank", max_new_tokens=3)
    with pytest.raises(InputError, match="no chat template"):
        whence.trace(minilm, "The bank", chat=True)
