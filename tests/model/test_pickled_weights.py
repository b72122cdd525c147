"""Models that come as pickles: read without running anything, converted whole or refused, tokenised as published."""

from __future__ import annotations

import base64
import pickle

import pytest
import torch
from torch import nn

import whence
from whence.errors import InputError, ModelError, UnavailableError
from whence.model import catalogue
from whence.model.foreign_weights import CONVERTERS
from whence.model.pickled_weights import RESIDUE, SMILES, byte_pairs, filled, read_pickle, word_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


class Runs:
    """A pickle that would create a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    trap = tmp_path / "ran"
    torch.save({"weight": Runs(trap)}, tmp_path / "model.bin")
    with pytest.raises(pickle.UnpicklingError):
        read_pickle(tmp_path / "model.bin")
    assert not trap.exists()


class Tied(nn.Linear):
    def tie_weights(self):
        pass


def test_weights_that_are_missing_or_left_over_are_refused():
    weights = {"weight": torch.ones(2, 3, dtype=torch.float16), "bias": torch.zeros(2)}
    assert filled(Tied(3, 2), {**weights, "pooler.weight": torch.ones(1)}, "pooler").weight.dtype == torch.float32
    with pytest.raises(ModelError, match=r"wants \['bias'\]"):
        filled(Tied(3, 2), {"weight": weights["weight"]}, "^$")
    with pytest.raises(ModelError, match=r"no use for \['extra'\]"):
        filled(Tied(3, 2), {**weights, "extra": torch.ones(1)}, "^$")


def test_smiles_and_residues_are_split_as_their_models_expect():
    atoms = word_tokenizer([*SPECIAL, "C", "Cl", "[nH]", "(", ")", "c", "1", ">>"], SMILES)
    ids = atoms("Cc1[nH]c(Cl)c1>>C")["input_ids"]
    assert atoms.convert_ids_to_tokens(ids) == [
        "[CLS]", "C", "c", "1", "[nH]", "c", "(", "Cl", ")", "c", "1", ">>", "C", "[SEP]",
    ]  # fmt: skip
    residues = word_tokenizer([*SPECIAL, *"ACDE"], RESIDUE)
    assert residues("ACD")["input_ids"] == residues("A C D")["input_ids"] == [2, 5, 6, 7, 3]
    assert residues("A[MASK]X")["input_ids"] == [2, 5, 4, 1, 3]


def test_merges_are_recovered_from_ranks():
    words = [bytes([b]) for b in b"abc "] + [b"ab", b"abc", b" a", b" abc"]
    ranks = "\n".join(f"{base64.b64encode(w).decode()} {i}" for i, w in enumerate(words))
    vocabulary, merges = byte_pairs(ranks)
    assert vocabulary["Ġabc"] == 7
    assert merges == [("a", "b"), ("ab", "c"), ("Ġ", "a"), ("Ġ", "abc")]


def test_every_entry_of_the_catalogue_says_what_is_known():
    for entry in catalogue.MODELS:
        assert entry.licence
        assert entry.source
        assert all(len(sha256) == 64 for _, sha256 in entry.files)
        assert entry.converter is None or entry.converter in CONVERTERS
        assert all(catalogue.find(other) is not None for other in entry.needs)
    with pytest.raises(InputError, match="no model"):
        whence.load("gpt2-bpe")


def test_whisper_hears_with_its_published_tokens():
    try:
        model = whence.load("whisper")
    except UnavailableError as problem:
        pytest.skip(str(problem))
    tokenizer = model.tokenizer
    assert tokenizer(" Hello world")["input_ids"] == [50257, 50362, 18435, 995, 50256]
    assert tokenizer.convert_ids_to_tokens([50258, 50363, 51863]) == ["<|en|>", "<|0.00|>", "<|30.00|>"]
    assert tokenizer("The quick brown fox")["input_ids"][2:-1] == [464, 2068, 7586, 21831]
    assert tokenizer.decode([464, 2068, 7586, 21831]) == "The quick brown fox"
    assert len(tokenizer) == model.model.config.vocab_size
    assert model.processor.feature_size == 80
    assert len(model.model.generation_config.alignment_heads) == 8
