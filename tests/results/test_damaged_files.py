"""Damaged results and traces, thousands of them: every one is refused in one sentence; none is believed."""

from __future__ import annotations

import json
import os
import random
import struct

import pytest
import torch
from transformers import BertConfig, BertModel

import whence
from whence.errors import InputError
from whence.reading.trace import Trace
from whence.results.labels import Tokens
from whence.results.provenance import Provenance
from whence.results.result import Result
from whence.results.tensor_file import load_tensors, save_tensors

EACH = 1_100  # damaged files of either kind


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A trace and a result as files."""
    folder = tmp_path_factory.mktemp("whole")
    torch.manual_seed(0)
    config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    trace = whence.trace(BertModel(config).eval(), torch.arange(4)[None])
    values = torch.softmax(torch.randn(2, 3, 4, 4), -1)
    tokens = Tokens(tuple("abcd"), tuple("abcd"))
    result = Result(values, ("layer", "head", "query", "key"), tokens, Provenance("m", "test", {}, {"torch": "2"}, "a"))
    return {Trace: trace.save(folder / "trace"), Result: result.save(folder / "result")}


def damaged(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """`data` harmed in one of the ways that disks, copies and hands harm files; never `data` itself."""
    while True:
        made = bytearray(data)
        at, length = draw.randrange(len(made)), 8 + struct.unpack("<Q", data[:8])[0]
        way = draw.randrange(9)
        if way == 0:
            made = made[:at]
        elif way == 1:
            made[at] ^= 1 << draw.randrange(8)
        elif way == 2:  # in the header, which is most of what is read
            made[draw.randrange(length)] ^= 1 << draw.randrange(8)
        elif way == 3:
            span = draw.randrange(1, 64)
            made[at : at + span] = draw.randbytes(len(made[at : at + span]))
        elif way == 4:
            made[at:at] = draw.randbytes(draw.randrange(1, 16))
        elif way == 5:
            del made[at : at + draw.randrange(1, 16)]
        elif way == 6:  # the header of another file before this one's tensors
            made = bytearray(other[: 8 + struct.unpack("<Q", other[:8])[0]] + data[length:])
        elif way == 7:
            made[:8] = struct.pack("<Q", draw.choice([0, 1, length - 9, length, len(data), 1 << 40, (1 << 64) - 1]))
        else:
            made = bytearray(draw.randbytes(len(made)) if draw.random() < 0.2 else made + draw.randbytes(at + 1))
        if bytes(made) != data:
            return bytes(made)


@pytest.mark.parametrize("kind", [Trace, Result])
def test_every_damaged_file_is_refused_in_one_sentence(saved, kind, tmp_path):
    data, other = saved[kind].read_bytes(), saved[Result if kind is Trace else Trace].read_bytes()
    draw, path = random.Random(kind.__name__), tmp_path / "damaged"
    for number in range(EACH):
        path.write_bytes(damaged(data, other, draw))
        try:
            kind.load(path)
        except InputError as refusal:
            said = str(refusal)
            assert "\n" not in said
            assert "damaged" in said or "not a whole" in said or "not written by" in said or "holds a" in said, said
        else:
            raise AssertionError(f"damaged file {number} was accepted")
    path.write_bytes(data)
    kind.load(path)  # and the whole one is not


def test_a_single_bit_of_the_payload_is_seen(saved, tmp_path):
    data = bytearray(saved[Trace].read_bytes())
    data[-1] ^= 1
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(InputError, match="is damaged: its content is not what was saved"):
        Trace.load(tmp_path / "t")


def test_sizes_and_parts_that_do_not_fit_are_refused_though_sealed(saved, tmp_path):
    """Files with a right hash and a wrong content, as another program or a version to come may write them."""
    for kind, name in ((Trace, "trace"), (Result, "result")):
        tensors, header = load_tensors(saved[kind])
        about = {key: value for key, value in header.items() if key not in ("format", "kind", "whence")}
        for change in range(6):
            changed, less = json.loads(json.dumps(about)), dict(tensors)
            key = next(key for key in less if key.endswith("._outputs") or key == "values")
            if change == 0:
                less.pop(key)
            elif change == 1:
                less[key] = less[key][..., :-1]
            elif change == 2:
                changed.pop("provenance")
            elif change == 3:
                changed["provenance"] = 3
            elif change == 4:
                tokens = changed["stacks"]["encoder"]["tokens"] if kind is Trace else changed["tokens"]
                tokens["text"].append("more")
            else:
                changed.pop("stacks" if kind is Trace else "axes")
            save_tensors(tmp_path / "f", name, less, changed)
            with pytest.raises(InputError, match="does not hold a whole") as refusal:
                kind.load(tmp_path / "f")
            assert "\n" not in str(refusal.value)


def test_a_newer_format_and_an_older_one_are_named(saved, tmp_path):
    from safetensors.torch import save_file

    tensors, header = load_tensors(saved[Result])
    save_tensors(tmp_path / "new", "result", tensors, {**header, "format": 99, "whence": "7.1"})
    with pytest.raises(InputError, match=r"written by whence 7\.1 \(format 99\)"):
        Result.load(tmp_path / "new")
    old = {"format": 1, "kind": "result", "provenance": {"versions": {"whence": "0.1.0"}}}
    save_file(tensors, tmp_path / "old", metadata={"whence": json.dumps(old)})
    with pytest.raises(InputError, match=r"written by whence 0\.1\.0 in a format without a hash"):
        Result.load(tmp_path / "old")


def test_a_loaded_trace_does_not_die_with_its_file(saved, tmp_path):
    path = tmp_path / "t"
    path.write_bytes(saved[Trace].read_bytes())
    trace = Trace.load(path)
    os.truncate(path, 10)  # a mapped file would end the process here
    assert torch.isfinite(trace.attention).all()
    assert float(trace.attention.sum(-1).mean()) == pytest.approx(1, abs=1e-5)
