"""Results: named axes, frames, words, and files that are whole or not there."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from whence.errors import InputError, WhenceError
from whence.results.files import write_atomically
from whence.results.labels import Tokens
from whence.results.provenance import Provenance
from whence.results.result import Result
from whence.results.tensor_file import load_tensors, save_tensors

TOKENS = Tokens(
    ("[CLS]", "un", "kind", "[SEP]"),
    ("[CLS]", "un", "##kind", "[SEP]"),
    None,
    None,
    (None, 0, 0, None),
    (True, False, False, True),
)


@pytest.fixture
def result():
    values = torch.softmax(torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)), -1)
    origin = Provenance("m", "test", {"k": 1}, {"torch": "2"}, "abc")
    return Result(values, ("layer", "head", "query", "key"), TOKENS, origin)


def test_words_sum_what_goes_to_them_and_average_what_comes_from_them(result):
    words = result.words()
    assert list(words.tokens) == ["[CLS]", "unkind", "[SEP]"]
    v = result.values
    columns = torch.stack([v[..., 0], v[..., 1] + v[..., 2], v[..., 3]], -1)
    expected = torch.stack([columns[..., 0, :], (columns[..., 1, :] + columns[..., 2, :]) / 2, columns[..., 3, :]], -2)
    torch.testing.assert_close(words.values, expected)
    torch.testing.assert_close(words.values.sum(-1), torch.ones(2, 3, 3))


def test_the_frame_has_a_line_per_value(result):
    frame = result.to_frame()
    assert len(frame) == result.values.numel()
    line = frame[(frame.layer == 1) & (frame["head"] == 2) & (frame["query"] == 1) & (frame.key == 3)].iloc[0]
    assert line.value == pytest.approx(float(result.values[1, 2, 1, 3]))
    assert (line.query_token, line.key_token) == ("un", "[SEP]")


def test_selecting_keeps_the_numbers_of_the_model(result):
    part = result.select(layer=1, head=[2, 0])
    assert part.layers == (1,)
    assert part.heads == (2, 0)
    assert torch.equal(part.values[0, 1], result.values[1, 0])
    assert set(part.to_frame().layer) == {1}
    with pytest.raises(InputError, match=r"layer \[5\] is not in this result; it has layers \[0, 1\]"):
        result.select(layer=5)


def test_saved_and_loaded_it_is_the_same(result, tmp_path):
    path = result.save(tmp_path / "r.safetensors")
    again = Result.load(path)
    assert torch.equal(again.values, result.values)
    assert (again.axes, again.tokens, again.layers, again.heads) == (
        result.axes,
        result.tokens,
        result.layers,
        result.heads,
    )
    assert again.provenance.to_dict() == result.provenance.to_dict()


def test_html_shows_tokens_as_text_never_as_markup(result):
    tokens = Tokens(("<script>alert(1)</script>", "a", "b", "c"), ("x",) * 4)
    hostile = Result(result.values, result.axes, tokens, result.provenance)
    assert "<script>" not in hostile._repr_html_()


def test_axes_that_do_not_fit_are_refused(result):
    with pytest.raises(InputError, match="2 axes"):
        Result(result.values, ("layer", "head"), TOKENS, result.provenance)


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(b"before")

    def full(_fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WhenceError, match=r"disk is full\. What was there before is untouched"):
        write_atomically(path, b"after")
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        write_atomically(tmp_path / "no" / "x", b"")


def test_files_of_another_kind_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_tensors(tmp_path / "a", "trace", {"x": torch.zeros(1)}, {})
    with pytest.raises(InputError, match="holds a trace, not a result"):
        load_tensors(tmp_path / "a", "result")
    save_file({"x": torch.zeros(1)}, tmp_path / "b")
    with pytest.raises(InputError, match="was not written by whence"):
        load_tensors(tmp_path / "b")
    (tmp_path / "c").write_bytes((tmp_path / "a").read_bytes()[:20])
    with pytest.raises(InputError, match="not a whole safetensors file"):
        load_tensors(tmp_path / "c")
    with pytest.raises(InputError, match="there is no file"):
        load_tensors(tmp_path / "d")
