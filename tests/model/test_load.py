"""Loading by name, folder and hub id: the right head, no silent randomness, and errors that say what to do."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel

import whence
from whence.errors import InputError, ModelError, UnavailableError
from whence.model.load import Model, hash_weights, load

TINY = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 40,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    BertForSequenceClassification(BertConfig(**TINY)).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def test_the_configuration_names_the_head(folder):
    model = load(folder)
    assert type(model.model).__name__ == "BertForSequenceClassification"
    assert not model.model.training
    assert model.name == "m"
    assert type(load(folder, "base").model).__name__ == "BertModel"


def test_a_head_without_weights_is_refused_instead_of_random(tmp_path):
    BertModel(BertConfig(**TINY)).save_pretrained(tmp_path / "m")
    with pytest.raises(ModelError, match=r"has no weights for classifier\.bias, classifier\.weight.*task='base'"):
        load(tmp_path / "m", "text-classification")


def test_an_unknown_task_lists_the_known_ones(folder):
    with pytest.raises(InputError, match="no task is called 'sing'; there are: base, text-classification"):
        load(folder, "sing")


def test_pickled_weights_are_refused_unless_asked(folder):
    model = load(folder).model
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no safetensors weights.*allow_pickle=True"):
        load(folder)
    assert hash_weights(load(folder, allow_pickle=True).model) == hash_weights(model)


def test_remote_code_is_refused_unless_asked(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match=r"code of its own.*trust_remote_code=True"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("./nowhere", InputError, "there is no folder './nowhere'.*minilm, smollm2"),
        ("someone/some-model", UnavailableError, "not in the Hugging Face cache.*embedded model: minilm, smollm2"),
        (7, InputError, "not a int"),
    ],
)
def test_what_cannot_be_found_is_said(name, kind, message):
    with pytest.raises(kind, match=message):
        load(name)


def test_a_folder_without_a_configuration_and_a_file_are_told_apart(tmp_path):
    with pytest.raises(InputError, match=r"has no config\.json"):
        load(tmp_path)
    (tmp_path / "f").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        load(tmp_path / "f")


def test_the_hash_follows_the_weights(folder):
    model = load(folder)
    first = model.weights_hash
    assert load(folder).weights_hash == first
    with torch.no_grad():
        next(model.model.parameters()).add_(1)
    assert model.weights_hash != first


def test_a_live_model_is_wrapped_as_it_is(folder):
    live = load(folder).model
    assert load(live).model is live
    assert Model(live).name
    with pytest.raises(InputError, match="must be a torch module"):
        Model("minilm")  # type: ignore[arg-type]


def test_the_embedded_models_are_the_ones_they_say(minilm, smollm2):
    assert minilm.model.config.num_hidden_layers == 6
    assert whence.load().name == "minilm"
    found = whence.trace(smollm2, "The capital of France is")
    assert smollm2.tokenizer.decode(found.logits[-1].argmax()).strip() == "Paris"


def test_importing_whence_loads_no_model_library():
    import subprocess
    import sys

    code = "import sys, whence; print([m for m in ('torch', 'transformers', 'fastapi', 'ray') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_public_name_is_there():
    for name in whence.__all__:
        assert getattr(whence, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'tarce'"):
        whence.tarce  # noqa: B018
