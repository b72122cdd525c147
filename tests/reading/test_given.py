"""What people have at hand is understood: pipelines, live models, data sets, encodings, pairs."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import AutoModel, pipeline

import whence
from whence.errors import InputError, WhenceWarning
from whence.model.load import as_model

datasets = pytest.importorskip("datasets")
TEXTS = ["The bank raised its rates.", "It rained."]


def _ids(traces: object) -> list[tuple[int, ...]]:
    return [t.tokens.ids for t in traces]  # type: ignore[attr-defined]


def test_a_live_model_finds_its_tokenizer(minilm_path: object) -> None:
    bare = AutoModel.from_pretrained(minilm_path, local_files_only=True)
    assert whence.trace(bare, TEXTS[0]).tokens[1:3] == ("The", "bank")
    assert as_model(bare).tokenizer is as_model(bare).tokenizer  # looked up once


def test_a_live_model_without_a_name_says_what_to_do(minilm: whence.Model) -> None:
    bare = type(minilm.model)(minilm.model.config.__class__(num_hidden_layers=1, hidden_size=24, num_attention_heads=2))
    with pytest.raises(InputError, match="none is found by its name"):
        whence.trace(bare.eval(), TEXTS[0])


def test_a_pipeline(minilm: whence.Model) -> None:
    made = pipeline("feature-extraction", model=minilm.model, tokenizer=minilm.tokenizer)
    found = whence.trace(made, TEXTS[0])
    torch.testing.assert_close(found.attention, whence.trace(minilm, TEXTS[0]).attention)
    assert whence.load(made).tokenizer is minilm.tokenizer


def test_a_pair_and_a_list_of_pairs(minilm: whence.Model) -> None:
    found = whence.trace(minilm, ("A b.", "C d."))
    assert found.text_pair == "C d."
    assert found.tokens.ids == whence.trace(minilm, "A b.", "C d.").tokens.ids
    assert _ids(whence.trace(minilm, [("A b.", "C d."), ("E", "F")]))[0] == found.tokens.ids


def test_a_data_set(minilm: whence.Model) -> None:
    data = datasets.Dataset.from_dict({"sentence": TEXTS, "label": [0, 1]})
    assert _ids(whence.trace(minilm, data)) == _ids(whence.trace(minilm, TEXTS))
    with pytest.raises(InputError, match="splits 'train'"):
        whence.trace(minilm, datasets.DatasetDict({"train": data}))
    with pytest.raises(InputError, match="which column"):
        whence.trace(minilm, datasets.Dataset.from_dict({"a": TEXTS, "b": TEXTS}))


def test_encodings(minilm: whence.Model) -> None:
    expected = _ids(whence.trace(minilm, TEXTS))
    assert _ids(whence.trace(minilm, minilm.tokenizer(TEXTS))) == expected
    assert _ids(whence.trace(minilm, minilm.tokenizer(TEXTS, padding=True, return_tensors="pt"))) == expected


def test_many_unknown_tokens_are_warned_about(minilm: whence.Model) -> None:
    with pytest.warns(WhenceWarning, match=r"\d of the \d tokens of .* are unknown to minilm"):
        whence.trace(minilm, "𓀀 𓁀 hello")
    with warnings.catch_warnings():
        warnings.simplefilter("error", WhenceWarning)
        whence.trace(minilm, TEXTS[0])
