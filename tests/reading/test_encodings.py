"""What people have at hand is understood by every function that takes a model and texts: the table of all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import pipeline

import whence
from tests.serving.tiny import TEXT, WORDS, tiny_model
from whence.errors import InputError
from whence.reading.encodings import encoded_texts, sequences_given

datasets = pytest.importorskip("datasets")

TEXTS = [" ".join([*WORDS[i:], *WORDS[:i]][:9]) for i in range(6)]
PAIR = (TEXT, TEXTS[1])

Give = Callable[[Any, Any, Path], Any]


def _ids(traces: Any) -> list[Any]:
    return [t.tokens.ids for t in (traces if isinstance(traces, list) else [traces])]


# Each as (what it answers with for a model and texts), reduced to something that can be compared.
MANY: dict[str, Give] = {
    "trace": lambda m, x, _: _ids(whence.trace(m, x)),
    "traces": lambda m, x, _: _ids(list(whence.traces(m, [x] if isinstance(x, tuple) else x))),
    "faithfulness": lambda m, x, _: whence.faithfulness(m, x, "alti", random=2, ceiling="none").table()["delta"].tolist(),
    "attention_controls": lambda m, x, _: whence.attention_controls(m, x, 2, budget=0).per_text().iloc[:, 0].tolist(),
    "robustness": lambda m, x, _: whence.robustness([m, m], x, "alti", random=2).runs[0].table()["delta"].tolist(),
    "survey": lambda m, x, to: whence.survey(m, x, to / "survey", rows=2).texts.shape,
    "token_identifiability": lambda m, x, _: whence.token_identifiability(
        m, [(TEXTS[0], TEXTS[1]), (TEXTS[2], TEXTS[3]), (TEXTS[4], TEXTS[5])] if isinstance(x, tuple) else x
    ).values.tolist(),
    "tie_keys": lambda m, x, _: whence.tie_keys(
        m, [x, (TEXTS[2], TEXTS[3])] if isinstance(x, tuple) else x, steps=0, lengths=()
    ).settings["texts"],
}  # fmt: skip
DEAR = {"faithfulness", "attention_controls", "robustness", "tie_keys"}
"""Two texts are enough where each costs a hundred passes."""
ONE: dict[str, Give] = {
    "stream": lambda m, x, _: whence.identifiability(whence.stream(m, x)).values.tolist(),
    "doctor": lambda m, x, _: whence.doctor(m, x).trusted,
    "uniqueness": lambda m, x, _: whence.uniqueness(m, x, search=0).sentences()[1:],
    "attribute": lambda m, x, _: whence.attribute(m, x).values.tolist(),
    "report": lambda m, x, _: whence.report(m, x, budget=0, removal=False, detail="light").findings,
}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other or (one != one and other != other) or (isinstance(one, float) and abs(one - other) < 1e-6))


ELSE = {
    "align",
    "load",
    "train",
    "substitute",
    "determined",
    "hidden_token_attribution",
}  # sound, names, labels, traces


def test_the_table_has_every_function_that_takes_a_model() -> None:
    functions = [n for n in whence.__all__ if inspect.isfunction(getattr(whence, n))]
    taking = {
        name
        for name in functions
        if {"model", "models"} & set(inspect.signature(getattr(whence, name)).parameters)
        or name in ("report", "load", "train")
    }
    assert taking - ELSE == set(MANY) | set(ONE)


@pytest.mark.parametrize("name", MANY)
def test_many_texts(name: str, tmp_path: Path) -> None:
    model = tiny_model()
    texts = TEXTS[:2] if name in DEAR else TEXTS
    given = {
        "list": (model, texts),
        "pipeline": (pipeline("text-classification", model=model.model, tokenizer=model.tokenizer), texts),
        "dataset": (model, datasets.Dataset.from_dict({"text": texts, "label": [0, 1] * (len(texts) // 2)})),
        "encoding": (model, model.tokenizer(texts, padding=True, return_tensors="pt")),
        "ragged encoding": (model, model.tokenizer(texts)),
    }
    found = {}
    for i, (what, (m, x)) in enumerate(given.items()):
        (folder := tmp_path / str(i)).mkdir()
        found[what] = MANY[name](m, x, folder)
    for what, answer in found.items():
        assert _same(answer, found["list"]), what
    MANY[name](model, PAIR, tmp_path)


@pytest.mark.parametrize("name", ONE)
def test_one_text(name: str, tmp_path: Path) -> None:
    model = tiny_model()
    piped = pipeline("text-classification", model=model.model, tokenizer=model.tokenizer)
    encoding = model.tokenizer(TEXT, return_tensors="pt")
    one = ONE[name](model, TEXT, tmp_path)
    assert ONE[name](piped, TEXT, tmp_path) == one
    assert ONE[name](model, encoding, tmp_path) == one
    assert ONE[name](model, PAIR, tmp_path) == ONE[name](model, model.tokenizer(*PAIR, return_tensors="pt"), tmp_path)


def test_texts_are_told_from_ids_or_refused() -> None:
    model = tiny_model()
    pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[2], TEXTS[3])]
    assert encoded_texts(model, model.tokenizer([p[0] for p in pairs], [p[1] for p in pairs], padding=True)) == pairs
    with pytest.raises(InputError, match="gives other ids again"):
        encoded_texts(model, {"input_ids": torch.tensor([[2, 1, 3, 3]])})
    with pytest.raises(InputError, match="have no input_ids"):
        encoded_texts(model, {"pixel_values": torch.zeros(1)})
    with pytest.raises(InputError, match="text 1 is 7"):
        sequences_given(model, ["a", 7])
