"""Two runs are never mixed up: identities, run folders and records refuse another run and name the difference."""

from __future__ import annotations

import errno
import json
import os
import random
import resource

import pytest

from whence.errors import InputError, UnavailableError
from whence.results.records import Records
from whence.results.run_folder import run_folder
from whence.results.run_identity import RunIdentity, hash_texts

ONE = RunIdentity("train", {"texts": "a" * 64, "weights": "b" * 64}, {"seed": 0, "model": {"size": 1}}, {"torch": "2"})


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (RunIdentity("train", {**ONE.hashes, "texts": "c" * 64}, ONE.settings, ONE.versions), r"texts \(SHA-256 cccc"),
        (RunIdentity("train", {"texts": "a" * 64}, ONE.settings, ONE.versions), "weights .SHA-256 none there"),
        (
            RunIdentity("train", ONE.hashes, {"seed": 1, "model": {"size": 1}}, ONE.versions),
            "setting seed .1 there, 0 here",
        ),
        (RunIdentity("train", ONE.hashes, {"seed": 0, "model": {"size": 2}}, ONE.versions), "setting model"),
        (RunIdentity("train", ONE.hashes, ONE.settings, {"torch": "3"}), "version of torch .'3' there, '2' here"),
        (RunIdentity("convert", ONE.hashes, ONE.settings, ONE.versions), r"method .convert there, train here"),
    ],
)
def test_every_difference_is_named(other, named, tmp_path):
    run_folder(tmp_path, other)
    with pytest.raises(InputError, match=named):
        run_folder(tmp_path, ONE)
    with Records(tmp_path / "r", other):
        pass
    with pytest.raises(InputError, match=named):
        Records(tmp_path / "r", ONE)


def test_the_same_run_is_the_same_after_a_way_through_json():
    again = RunIdentity.from_dict(json.loads(json.dumps(ONE.to_dict())))
    assert ONE.differences(again) == ()
    assert again.digest == ONE.digest
    assert (
        RunIdentity("x", settings={"shares": (0.7, 0.3)}).differences(RunIdentity("x", settings={"shares": [0.7, 0.3]}))
        == ()
    )


def test_texts_that_differ_never_share_a_hash():
    lists = [
        ["a", "b"],
        ["ab"],
        ["a\nb"],
        ['a"', "b"],
        [("a", "b")],
        [("a", None)],
        [("a", "None")],
        ["b", "a"],
        [""],
        [],
    ]
    assert len({hash_texts(one) for one in lists}) == len(lists)
    assert len(hash_texts(["\ud800"])) == 64  # a lone surrogate has a hash, too


def test_a_finished_run_is_finished_while_its_files_are_there(tmp_path):
    folder = run_folder(tmp_path, ONE)
    assert not folder.finished
    assert not run_folder(tmp_path, ONE).finished
    (tmp_path / "model").write_text("weights")
    folder.finish(["model"])
    assert run_folder(tmp_path, ONE).finished
    (tmp_path / "model").write_text("Weights")
    with pytest.raises(InputError, match="'model' is gone or was changed"):
        run_folder(tmp_path, ONE)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"method": "train"}', b"null"])
def test_a_damaged_run_json_is_named_with_the_way_on(tmp_path, content):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(InputError, match=r"run\.json' is damaged .*remove this one to run again"):
        run_folder(tmp_path, ONE)


def test_state_without_a_name_is_not_taken_over(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(InputError, match="unknown run"):
        run_folder(tmp_path, ONE, state="checkpoint*")


def test_records_cut_anywhere_keep_every_whole_one(tmp_path):
    path = tmp_path / "r.jsonl"
    entries = [{"i": i, "text": "x" * i, "share": i / 3} for i in range(20)]
    with Records(path, ONE) as records:
        for entry in entries:
            records.append(entry)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for cut in random.Random(0).sample(range(len(whole)), 60):
        path.write_bytes(whole[:cut])
        with Records(path, ONE) as records:
            kept = len(records)
            assert kept == max(0, sum(end <= cut for end in ends) - 1)
            assert list(records) == entries[:kept]
            for entry in entries[kept:]:
                records.append(entry)
        assert path.read_bytes() == whole


def test_a_damaged_record_is_refused_by_its_line(tmp_path):
    path = tmp_path / "r.jsonl"
    with Records(path, ONE) as records:
        for i in range(3):
            records.append({"value": i})
    data = path.read_bytes()
    at = data.index(b'"value": 1')
    path.write_bytes(data[: at + 9] + b"7" + data[at + 10 :])
    with pytest.raises(InputError, match="line 3, is damaged"):
        Records(path, ONE)


def test_a_full_disk_keeps_the_records_so_far(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    with Records(path, ONE) as records:
        records.append({"i": 0})
        before = path.read_bytes()

        def full(_fd):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(UnavailableError, match="disk is full"):
            records.append({"i": 1})
        monkeypatch.undo()
    assert path.read_bytes() == before


def test_a_full_disk_is_one_sentence_also_when_the_file_is_closed(tmp_path):
    """A real refusal by the system, which is still there when the file is closed."""
    path, (soft, hard) = tmp_path / "r.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        with Records(path, ONE) as records:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
            for i in range(100):
                records.append({"i": i})

    try:
        with pytest.raises(UnavailableError, match="disk is full"):
            fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size <= 2000
    with Records(path, ONE) as records:
        there = list(records)
        assert there == [{"i": i} for i in range(len(there))]
        assert len(there) > 10


def test_what_a_killed_writer_left_is_removed_by_the_next_start(tmp_path):
    for start in range(2):  # before run.json was there, and after
        (tmp_path / f".whence-{start}.part").write_bytes(b"half a file")
        run_folder(tmp_path, ONE)
        assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    (tmp_path / ".whence-0.part").write_bytes(b"of another run")
    with pytest.raises(InputError, match="another run"):
        run_folder(tmp_path, RunIdentity("convert"))
    assert (tmp_path / ".whence-0.part").exists()


def test_a_run_json_that_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(InputError, match=r"run\.json' is damaged"):
        run_folder(tmp_path, ONE)


def test_a_folder_with_files_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(InputError, match=r"holds 'README\.md', which the run would write"):
        run_folder(tmp_path, ONE, state=("checkpoint-*", "README.md"))
    assert not (tmp_path / "run.json").exists()


def test_of_several_processes_only_the_first_writes_or_clears(tmp_path, monkeypatch):
    half = tmp_path / ".whence-of-the-first.part"
    half.write_text("on its way", encoding="utf-8")
    monkeypatch.setenv("RANK", "1")
    assert not run_folder(tmp_path, ONE).finished
    assert [p.name for p in tmp_path.iterdir()] == [half.name]
    monkeypatch.setenv("RANK", "0")
    run_folder(tmp_path, ONE)
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
    half.write_text("on its way", encoding="utf-8")
    monkeypatch.setenv("RANK", "1")
    run_folder(tmp_path, ONE)
    assert half.exists()
