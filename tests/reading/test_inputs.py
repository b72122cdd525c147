"""What a user may give, and what is said of what cannot be used."""

from __future__ import annotations

import pytest
import torch

from conformance.zoo import build
from whence.errors import InputError, ModelError
from whence.model.load import Model
from whence.reading.inputs import prepare
from whence.reading.tokenised import position_limit
from whence.reading.tracing import trace


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text '' is empty"),
        (" \n\t ", "is empty"),
        (["fine", ""], "the text '' is empty"),
        ([], "an empty list was given"),
        (3.5, "a float cannot be traced"),
        ({"input_ids": "no"}, "'input_ids' is no tensor"),
        ({}, "no tensor was given"),
        ({"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.zeros(1, 3)}, "no tokens left"),
        ({"input_ids": torch.ones(2, 3, dtype=torch.long), "token_type_ids": torch.ones(3, 3)}, "disagree on how many"),
    ],
)
def test_bad_input_is_refused_in_words(minilm, text, message):
    with pytest.raises(InputError, match=message):
        trace(minilm, text)


def test_a_text_that_is_too_long_says_both_numbers_and_offers_to_cut(minilm):
    with pytest.raises(InputError, match=r"has 1502 tokens and minilm has positions for 512.*truncate=True"):
        trace(minilm, "word " * 1500)
    found = trace(minilm, "word " * 1500, truncate=True, keep=("states",))
    assert len(found.tokens) == 512


def test_ids_beyond_the_vocabulary_mean_a_foreign_tokenizer(minilm, smollm2):
    with pytest.raises(ModelError, match=r"token id 40000 is out of range.*0 … 30521.*does not belong"):
        trace(minilm, [1, 40000, 2])
    foreign = Model(minilm.model, smollm2.tokenizer)
    with pytest.raises(ModelError, match="tokenizer does not belong to this model"):
        trace(foreign, "A sentence with extraordinarily uncommon vocabulary: 日本語 Ελληνικά")


def test_a_text_without_a_tokenizer_is_refused_with_the_way_out():
    with pytest.raises(InputError, match=r"came without a tokenizer.*whence\.Model\(model, tokenizer\)"):
        trace(build("bert").model, "hello")


def test_a_target_for_a_model_without_a_decoder_is_refused(minilm):
    with pytest.raises(InputError, match="no encoder–decoder"):
        trace(minilm, "hello", target="hallo")


def test_a_number_of_pairs_that_does_not_fit_is_refused(minilm):
    with pytest.raises(InputError, match="text_pair has 1 entries for 2 texts"):
        trace(minilm, ["a", "b"], ["c"])


def test_roberta_counts_its_positions_after_the_padding_index():
    model = build("roberta").model
    table = model.roberta.embeddings.position_embeddings
    assert position_limit(model) == table.num_embeddings - table.padding_idx - 1


def test_relative_positions_have_no_limit():
    assert position_limit(build("t5").model) is None


def test_tokens_spans_words_and_marks(minilm):
    text = "The bank's rates, unbelievably, rose."
    tokens = prepare(minilm, text)[0][0].tokens
    assert tokens[0] == "[CLS]"
    assert tokens.special[0]
    assert tokens.special[-1]
    for token, span, special in zip(tokens, tokens.spans, tokens.special, strict=True):
        if not special:
            assert text[span[0] : span[1]] == token
    words = tokens.by_word()
    assert "unbelievably" in list(words)
    assert tokens.kinds()[0] == "[CLS]"
    assert tokens.kinds()[list(tokens).index(",")] == "punctuation"


def test_two_texts_keep_their_words_apart(minilm):
    tokens = prepare(minilm, "one", "one")[0][0].tokens
    words = [w for w in tokens.words if w is not None]
    assert len(set(words)) == 2


def test_byte_level_tokens_are_readable(smollm2):
    tokens = prepare(smollm2, "Ein schöner Tag, heute!")[0][0].tokens
    assert not any("Ġ" in t or "Ã" in t for t in tokens)


def test_a_plain_list_of_ids_is_one_sequence(minilm):
    found = trace(minilm, [101, 2023, 2003, 102])
    assert list(found.tokens) == ["[CLS]", "this", "is", "[SEP]"]


def test_an_image_processor_feeds_a_vision_model():
    specimen = build("vit")

    def processor(image, return_tensors):
        return {"pixel_values": torch.as_tensor(image)[None]}

    image = specimen.inputs["pixel_values"][0]
    found = trace(Model(specimen.model, processor=processor), image.numpy())
    expected = trace(Model(specimen.model), specimen.inputs)
    assert torch.equal(found.attention, expected.attention)
