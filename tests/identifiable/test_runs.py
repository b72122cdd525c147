"""Runs are never mixed up and nothing is lost: another run's state, a full disk, damaged checkpoints."""

from __future__ import annotations

import copy
import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

import whence
from whence.errors import InputError, UnavailableError
from whence.identifiable.conversion import distillation, windows
from whence.identifiable.conversion.tied_key import projections, tie
from whence.identifiable.data import Labelled
from whence.identifiable.training import trainer as training
from whence.identifiable.training.demo import demo_data
from whence.identifiable.training.fit import Settings, train
from whence.identifiable.training.vocabulary import train_tokenizer

TINY = Settings(epochs=2, batch_size=16, model={"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16})
DATA = demo_data(160)
OTHER = Labelled((*DATA.texts[:-1], "anna gave ben nothing ."), DATA.labels, DATA.source)  # same name, same number
TEXTS = [f"The {a} {b} again." for a in ("cat", "dog", "old man", "small boat") for b in ("slept", "ran home", "sang")]


@pytest.fixture(scope="module")
def bert() -> whence.Model:
    """A tiny BERT with random weights and a tokenizer of its own."""
    tokenizer = train_tokenizer(TEXTS, 60, 48)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=32,
        max_position_embeddings=48,
    )  # fmt: skip
    return whence.Model(BertModel(config).eval(), tokenizer, name="tiny")


def stop_after(step: int):
    def progress(_what: str, done: float, _total: float) -> None:
        if done == step:
            raise KeyboardInterrupt

    return progress


# -- train -------------------------------------------------------------------------------------------------------------


def test_train_refuses_other_texts_of_the_same_name_and_number(tmp_path: Path) -> None:
    train(DATA, out=tmp_path, settings=TINY)
    with pytest.raises(InputError, match=r"another run: it differs in training texts \(SHA-256"):
        train(OTHER, out=tmp_path, settings=TINY)
    with pytest.raises(InputError, match=r"differs in test texts \(SHA-256 none there"):
        train(DATA, demo_data(20, seed=1), out=tmp_path, settings=TINY)


def test_train_refuses_another_version_s_run(tmp_path: Path) -> None:
    train(DATA, out=tmp_path, settings=TINY)
    note = json.loads((tmp_path / "run.json").read_text())
    note["versions"]["torch"] = "1.0"
    (tmp_path / "run.json").write_text(json.dumps(note))
    with pytest.raises(InputError, match=r"version of torch \('1\.0' there"):
        train(DATA, out=tmp_path, settings=TINY)


def test_a_finished_run_says_so_and_does_nothing(tmp_path: Path) -> None:
    first = train(DATA, out=tmp_path, settings=TINY)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    said: list[str] = []
    again = train(DATA, out=tmp_path, settings=TINY, say=said.append)
    assert said == [f"The run in {str(tmp_path)!r} is finished: nothing was done."]
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before
    assert again.metrics == json.loads((tmp_path / "metrics.json").read_text())
    for one, two in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)


def stopped_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two epochs that stopped in the second; gives its checkpoint."""
    plain = training.Trainer.training_step

    def stop(self, *args, **kwargs):
        if self.state.global_step >= 11:
            raise KeyboardInterrupt
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(training.Trainer, "training_step", stop)
    with pytest.raises(KeyboardInterrupt):
        train(DATA, out=folder, settings=TINY)
    monkeypatch.undo()
    checkpoint = training.last_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    return checkpoint


@pytest.mark.parametrize("harm", ["model.safetensors", "optimizer.pt", "trainer_state.json", "gone", "list"])
def test_a_damaged_checkpoint_is_named_with_the_way_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    checkpoint = stopped_run(tmp_path, monkeypatch)
    if harm == "gone":
        (checkpoint / "model.safetensors").unlink()
    elif harm == "list":
        (checkpoint / training.COMPLETE).write_text("{")
    else:
        os.truncate(checkpoint / harm, (checkpoint / harm).stat().st_size // 2)
    with pytest.raises(InputError, match=rf"{checkpoint.name}' is damaged.*Remove that folder and run the same"):
        train(DATA, out=tmp_path, settings=TINY)
    assert checkpoint.exists()


def test_a_checkpoint_half_removed_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark goes before the files: a kill while an old checkpoint is removed leaves nothing that looks whole."""
    removed: list[list[str]] = []
    monkeypatch.setattr(
        training.shutil, "rmtree", lambda path, **_: removed.append(sorted(p.name for p in Path(path).iterdir()))
    )
    train(DATA, out=tmp_path, settings=replace(TINY, epochs=3, checkpoint_steps=4, patience=0))
    older = [names for names in removed if "model.safetensors" in names]
    assert older
    assert all(training.COMPLETE not in names for names in older if "trainer_state.json" in names)


FULL = """
import resource, sys
from whence.identifiable.training.demo import demo_data
from whence.identifiable.training.fit import Settings, train
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
from whence.errors import WhenceError
try:
    train(demo_data(160), out=sys.argv[1], settings=Settings(**eval(sys.argv[3])))
except WhenceError as error:
    print(type(error).__name__, error)
"""


def test_train_on_a_full_disk_says_one_sentence_and_goes_on_later(tmp_path: Path) -> None:
    """A real refusal by the system (no file may grow beyond a size), not a stand-in for one."""
    command = [sys.executable, "-c", FULL, str(tmp_path / "full"), "20000", repr(asdict(TINY))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("UnavailableError"), done.stderr[-1500:]
    assert "disk is full" in done.stdout
    assert not list((tmp_path / "full").rglob("model.safetensors"))
    train(DATA, out=tmp_path / "full", settings=TINY)
    train(DATA, out=tmp_path / "whole", settings=TINY)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("full", "whole"))
    assert one == two


# -- convert -----------------------------------------------------------------------------------------------------------


def distil(bert: whence.Model, place: Path, texts=TEXTS, model=None, **options):
    corpus = windows.tokenise(bert.tokenizer, texts, 48)
    student = copy.deepcopy(bert.model)
    torch.manual_seed(1)
    tie(projections(student, 3), [torch.randn(3, 8, 8) * 0.3 for _ in projections(student, 3)])
    schedule = distillation.Schedule(6, 1e-3, 64)
    distillation.distil(student, model or bert.model, corpus, schedule, checkpoint=place, every=2, **options)
    return student


def test_tie_keys_refuses_another_model_s_and_other_texts_checkpoint(bert: whence.Model, tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        distil(bert, place, progress=stop_after(3))
    other = copy.deepcopy(bert.model)
    with torch.no_grad():
        next(other.parameters()).view(-1)[0] += 1
    with pytest.raises(InputError, match=r"another run: it differs in weights \(SHA-256"):
        distil(bert, place, model=other)
    with pytest.raises(InputError, match=r"differs in texts \(SHA-256"):
        distil(bert, place, texts=[*TEXTS[:-1], "The cat sang again."])
    with pytest.raises(InputError, match=r"differs in start \(SHA-256 none there"):
        distil(bert, place, start="f" * 64)
    whole = distil(bert, tmp_path / "whole")
    for one, two in zip(distil(bert, place).parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("harm", ["cut", "flip", "empty"])
def test_a_damaged_distillation_checkpoint_is_named_with_the_way_on(bert, tmp_path: Path, harm: str) -> None:
    place = tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        distil(bert, place, progress=stop_after(3))
    data = bytearray(place.read_bytes())
    if harm == "flip":
        data[-5] ^= 1
    place.write_bytes(data[: len(data) // 2] if harm == "cut" else b"" if harm == "empty" else data)
    with pytest.raises(InputError, match=r"checkpoint' is .*Without '.*checkpoint' the run begins anew"):
        distil(bert, place)


def test_convert_on_a_full_disk_keeps_the_last_good_state(bert: whence.Model, tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        distil(bert, place, progress=stop_after(3))
    good = place.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(good) // 2, hard))
    try:
        with pytest.raises(UnavailableError, match="disk is full"):
            distil(bert, place)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert place.read_bytes() == good
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
