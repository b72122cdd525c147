"""Tiny random models that read words, so that nothing here needs a download."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from conformance.zoo import build
from whence.model.load import Model

WORDS = [f"w{i}" for i in range(90)]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tokenizer(*, frame: bool) -> PreTrainedTokenizerFast:
    """Words by white space; with `frame`, [CLS] … [SEP] around them."""
    vocabulary = {name: i for i, name in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", ".", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if frame:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


@pytest.fixture(scope="session")
def tiny() -> Any:
    """`tiny("bert")`: that family, small and random, with a tokenizer of words."""
    made: dict[str, Model] = {}

    def get(family: str) -> Model:
        if family not in made:
            frame = family in ("bert", "albert", "bart")
            made[family] = Model(build(family).model, tokenizer(frame=frame), name=f"tiny-{family}")
        return made[family]

    return get


def sentences(n: int, *, seed: int = 0, repeat: bool = True, low: int = 3, high: int = 10) -> list[str]:
    """n different sentences of random words; with `repeat` a word may come twice in one."""
    source = random.Random(seed)
    out: dict[str, None] = {}
    while len(out) < n:
        k = source.randint(low, high)
        words = source.choices(WORDS, k=k) if repeat else source.sample(WORDS, k)
        out[" ".join(words)] = None
    return list(out)


@pytest.fixture(scope="session")
def corpus40() -> list[str]:
    return sentences(40)
