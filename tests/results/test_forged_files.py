"""Files with a right hash and a wrong content, as another program may write them: every one is refused in one sentence.

Every array of every kind of file is cut, widened and turned into another kind of number, and every plain value of its
header is replaced by one of another kind. Nothing that does not fit together may load.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import whence
from torture.models import classifier, families, texts
from whence.attention.decide import Decisions
from whence.errors import InputError
from whence.faithful.result import Faithfulness
from whence.mixing.alti_logit import alti_logit
from whence.reading.trace import Trace
from whence.results.records import write_records
from whence.results.result import Result
from whence.results.run_identity import RunIdentity
from whence.results.tensor_file import ABOUT, load_tensors, save_tensors

EACH = 60  # changed headers of each kind of file
FREE = ("settings", "versions", "changed", "seconds", "processor_seconds", "states_bytes", "states_on_disk", "same")
"""What may hold anything: a method's own settings, and what is told of a run besides."""
OPEN = {"logits": {1}, "final_states": {1}, "inputs.attention_mask": {0, 1, 2}, "visible": {0}, "bias": {0}}
"""What of `wrong_arrays` is none: as many labels as there are, states of any width, masks that hold for all heads."""


def made() -> dict[str, Any]:
    """Something of every kind that is saved."""
    models, words = families(), texts(30)
    bert, sentence = models["bert"], words[8]
    trace = whence.trace(bert, sentence)
    writer = whence.trace(models["llama"], sentence)
    crossed = whence.trace(models["bart"], sentence, target=words[3])
    return {
        "trace": trace,
        "trace of a decoder": writer,
        "trace of both": crossed,
        "effective": whence.effective_attention(trace),
        "identifiability": whence.identifiability(trace, keys=True, condition=True),
        "verdict": whence.verdict(trace),
        "doppelganger": whence.doppelganger(trace, rounds=1, sample=2),
        "contributions": whence.contributions(trace),
        "contributions of both": whence.contributions(crossed),
        "value zeroing": whence.contributions(trace, "value-zeroing"),
        "attribution to hidden tokens": whence.hidden_token_attribution(trace, mode="probes", probes=2, of="heads"),
        "local and global": whence.local_vs_global(trace),
        "attribution": whence.attribute(classifier(), sentence, method="gradient"),
        "logit": alti_logit(whence.trace(models["gpt2"], sentence)),
        "answer": whence.attribute(models["gpt2"], sentence, continuation=[5, 6, 7], method="gradient"),
        "tokens": whence.token_identifiability(bert, words, maps=("naive", "ridge"), bootstrap=3, transfer=True),
        "decisions": whence.decide(trace, whence.rules.argmax(), layer=0, head=0, queries=[1, 4]),
    }


KINDS = (
    "trace", "trace of a decoder", "trace of both", "effective", "identifiability", "verdict", "doppelganger",
    "contributions", "contributions of both", "value zeroing", "attribution to hidden tokens", "local and global",
    "attribution", "logit", "answer", "tokens", "decisions",
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("whole")
    return {name: (one.save(folder / name), type(one)) for name, one in made().items()}


def refused(kind: Any, path: Path) -> bool:
    """Whether the file is refused in one sentence; a raw error is none."""
    try:
        kind.load(path)
    except InputError as refusal:
        said = str(refusal)
    else:
        return False
    assert "\n" not in said
    assert "does not hold a whole" in said or "holds a" in said, said
    return True


def wrong_arrays(tensor: Tensor) -> list[Tensor]:
    """The tensor with one more axis, with a last axis of another length, and with another kind of numbers."""
    other = tensor.to(torch.int64) if tensor.is_floating_point() else tensor.to(torch.float32)
    longer = tensor.reshape(1) if tensor.dim() == 0 else torch.cat([tensor, tensor[..., :1]], -1)
    return [tensor[None], longer, other]


@pytest.mark.parametrize("name", KINDS)
def test_arrays_of_another_shape_or_kind_are_refused(saved, name, tmp_path):
    path, kind = saved[name]
    tensors, header = load_tensors(path)
    about = {key: value for key, value in header.items() if key not in (*ABOUT, "tensors")}
    keys = random.Random(0).sample(sorted(tensors), min(30, len(tensors)))
    for key, tensor in ((key, tensors[key]) for key in keys):
        for number, wrong in enumerate(wrong_arrays(tensor)):
            allowed = OPEN.get(key, OPEN.get(key.split(".")[-1], set()))
            if (wrong.shape, wrong.dtype) == (tensor.shape, tensor.dtype) or number in allowed:
                continue
            save_tensors(tmp_path / "f", header["kind"], {**tensors, key: wrong}, about)
            assert refused(kind, tmp_path / "f"), (key, number)
        save_tensors(tmp_path / "f", header["kind"], {n: t for n, t in tensors.items() if n != key}, {**header})
        assert refused(kind, tmp_path / "f"), key  # the header names it
    save_tensors(tmp_path / "f", header["kind"], tensors, about)
    assert not refused(kind, tmp_path / "f")  # and what fits is taken


def places(data: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value of nested JSON, but for what may hold anything."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    found = [way] if way else []
    for key, value in inner:
        if key not in FREE:
            found += places(value, (*way, key))
    return found


def wrong_kind(value: Any, draw: random.Random) -> Any:
    """A value of another kind; of a list, also one that is longer."""
    others: list[Any] = [{"a": 1}, [[]], {}]
    if isinstance(value, list):
        others += [3, "ab", [*value, *value[:1]] if value else [3]]
    elif isinstance(value, dict):
        others = [3, "ab", []]
    elif isinstance(value, str):
        others += [3, True]
    elif isinstance(value, bool):
        others += ["x", 1.5]
    elif isinstance(value, int | float):
        others += ["x", True]
    return draw.choice(others)


def changed(data: Any, way: tuple[Any, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(data))
    inner = copy
    for step in way[:-1]:
        inner = inner[step]
    inner[way[-1]] = value
    return copy


def at(data: Any, way: tuple[Any, ...]) -> Any:
    for step in way:
        data = data[step]
    return data


@pytest.mark.parametrize("name", KINDS)
def test_headers_with_values_of_another_kind_are_refused(saved, name, tmp_path):
    path, kind = saved[name]
    tensors, header = load_tensors(path)
    about = {key: value for key, value in header.items() if key not in ("tensors", *ABOUT)}
    draw, ways = random.Random(name), places(about)
    for way in draw.sample(ways, min(EACH, len(ways))):
        wrong = wrong_kind(at(about, way), draw)
        if wrong == at(about, way) or at(about, way) in ("nan", "inf", "-inf"):  # numbers as words
            continue
        save_tensors(tmp_path / "f", header["kind"], tensors, changed(about, way, wrong))
        assert refused(kind, tmp_path / "f"), (way, at(about, way), wrong)


def test_records_that_do_not_fit_are_refused(tmp_path):
    whole = whence.faithfulness(classifier(), texts(3), methods="gradient", random=1, ceiling="exact")
    assert Faithfulness.load(whole.save(tmp_path / "whole")).records == whole.records
    identity, records = whole.identity.to_dict(), [json.loads(json.dumps(r.to_dict())) for r in whole.records]
    draw = random.Random(0)
    ways = [(0, way) for way in places(records[0])] + [(1, way) for way in places(records[1])]
    for number, way in draw.sample(ways, min(EACH, len(ways))):
        wrong = wrong_kind(at(records[number], way), draw)
        forged = [changed(r, way, wrong) if i == number else r for i, r in enumerate(records)]
        if "key" in way or forged == records:
            continue
        write_records(tmp_path / "f", RunIdentity.from_dict(identity), forged)
        assert refused(Faithfulness, tmp_path / "f"), (way, at(records[number], way), wrong)
    for name in ("model", "methods", "operators", "random", "seed", "signed", "perturbs"):
        about = {**identity, "settings": {**identity["settings"], name: {"a": {}}}}
        write_records(tmp_path / "f", RunIdentity.from_dict(about), records)
        assert refused(Faithfulness, tmp_path / "f"), name


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    trace = whence.trace(families()["bert"], texts(9)[8])
    found = whence.identifiability(trace)
    broken = {**found.extra, "r": found.extra["r"][..., :1]}
    with pytest.raises(InputError, match=r"was not saved to .*: r is \(2, 2, 1\), where 2 layer × 2 head × "):
        whence.attention.identifiability.Identifiability(
            found.values, found.axes, found.tokens, found.provenance, found.key_tokens, extra=broken
        ).save(tmp_path / "f")
    assert not list(tmp_path.iterdir())


def test_files_of_the_format_before_are_read(tmp_path):
    trace = whence.trace(families()["bert"], texts(9)[8])
    for one in (trace, whence.identifiability(trace)):
        tensors, header = load_tensors(one.save(tmp_path / "new"))
        about = {**{n: v for n, v in header.items() if n != "tensors"}, "format": 2}
        save_tensors(tmp_path / "old", header["kind"], tensors, about)
        again = type(one).load(tmp_path / "old")
        assert torch.equal(again.attention if isinstance(again, Trace) else again.values,
                           one.attention if isinstance(one, Trace) else one.values)  # fmt: skip


def test_every_kind_is_among_these(saved):
    """A class that is saved and is not tried here would not be held to what it declares."""
    classes = {kind for _, kind in saved.values()}
    known: set[Any] = {Trace, Decisions}
    todo = [Result]
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        if kind.arrays and kind.__module__.startswith("whence."):
            known.add(kind)
    assert known - classes == set()
