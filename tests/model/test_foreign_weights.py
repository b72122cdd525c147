"""Converted copies: used only while they are what the catalogue pins, made again otherwise, by one process at a time."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from whence.errors import UnavailableError
from whence.model import catalogue
from whence.model import foreign_weights as foreign


@pytest.fixture
def conversions(tmp_path, monkeypatch):
    """A converter that writes two numbers; gives the entry and a list that grows with every conversion."""
    calls: list[int] = []
    monkeypatch.setattr(foreign, "cache_dir", lambda: tmp_path)

    def convert(_entry, _folder, into):
        calls.append(1)
        time.sleep(0.05)
        into.mkdir()
        save_file({"w": torch.tensor([1.0, 2.0])}, into / "model.safetensors")
        (into / "config.json").write_text('{"layers": 1}')

    monkeypatch.setitem(foreign.CONVERTERS, "gguf", convert)
    convert(None, None, tmp_path / "pinned")
    calls.clear()
    entry = replace(catalogue.get("smollm2"), converted_sha256=foreign.tensors_sha256(tmp_path / "pinned"))
    return entry, calls


@pytest.mark.parametrize(
    "harm", ["weights", "weights and list", "config", "config gone", "another file", "list", "list gone"]
)
def test_what_was_changed_is_made_again(conversions, tmp_path, harm):
    entry, calls = conversions
    folder = foreign.unpacked(entry, tmp_path)
    assert foreign.unpacked(entry, tmp_path) == folder
    assert len(calls) == 1
    listed = foreign._list_of(folder)
    if harm.startswith("weights"):
        save_file({"w": torch.tensor([1.0, 3.0])}, folder / "model.safetensors")
        if harm == "weights and list":  # a list that agrees with the damage does not vouch for it
            hashes = {path.name: foreign._sha256(path) for path in folder.iterdir()}
            listed.write_text(json.dumps(hashes))
    elif harm == "config":
        (folder / "config.json").write_text('{"layers": 2}')
    elif harm == "config gone":
        (folder / "config.json").unlink()
    elif harm == "another file":
        (folder / "tokenizer.json").write_text("{}")
    elif harm == "list":
        listed.write_text("{")
    else:
        listed.unlink()
    assert foreign.unpacked(entry, tmp_path) == folder
    assert len(calls) == 2
    assert json.loads((folder / "config.json").read_text()) == {"layers": 1}
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_conversion_that_gives_other_weights_is_refused(conversions, tmp_path):
    entry, _ = conversions
    with pytest.raises(UnavailableError, match="gave other weights"):
        foreign.unpacked(replace(entry, converted_sha256="0" * 64), tmp_path)
    assert not list(tmp_path.glob("converted/*.part"))
    assert not list(tmp_path.glob("converted/*/config.json"))


def test_many_at_once_convert_once(conversions, tmp_path):
    entry, calls = conversions
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(foreign.unpacked(entry, tmp_path))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1
    assert len(folders) == 6
    assert len(calls) == 1


def test_what_a_kill_left_is_swept(conversions, tmp_path):
    entry, _ = conversions
    (tmp_path / "converted" / "smollm2-half.part" / "ready").mkdir(parents=True)
    foreign.unpacked(entry, tmp_path)
    assert not list(tmp_path.glob("converted/*.part"))


def test_every_converted_model_is_pinned():
    assert all(model.converted_sha256 for model in catalogue.MODELS if model.converter is not None)
