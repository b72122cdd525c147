"""Where files are written: regular files only, links followed, odd names and full disks in one sentence."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path

import pytest
import torch

from whence.errors import InputError, UnavailableError
from whence.results.files import disk_is_full, make_folder, whole_files, write_atomically
from whence.results.records import read_records
from whence.results.tensor_file import load_tensors


def test_a_link_is_followed_and_stays_one(tmp_path):
    (tmp_path / "real").write_bytes(b"before")
    (tmp_path / "link").symlink_to("real")
    write_atomically(tmp_path / "link", b"after")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"after"
    (tmp_path / "dangling").symlink_to("made")
    write_atomically(tmp_path / "dangling", b"new")
    assert (tmp_path / "made").read_bytes() == b"new"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match="cannot be written"):
        write_atomically(tmp_path / "loop", b"x")


def test_what_is_no_file_is_refused_and_stays(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InputError, match=r"fifo' is a FIFO, not a file: nothing was written"):
        write_atomically(tmp_path / "fifo", b"x")
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    with pytest.raises(InputError, match="is a folder, not a file"):
        write_atomically(tmp_path, b"x")
    (tmp_path / "device").symlink_to("/dev/null")
    with pytest.raises(InputError, match="is a device, not a file"):
        write_atomically(tmp_path / "device", b"x")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b", "x" * 300, "y/" * 3000 + "z", "no/such/folder/x"])
def test_names_that_no_file_can_have(tmp_path, name):
    with pytest.raises(InputError) as problem:
        write_atomically(f"{tmp_path}/{name}", b"x")
    assert "\n" not in str(problem.value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError):
        make_folder(f"{tmp_path}/{name.replace('no/such/folder/', chr(0))}")


def test_the_umask_holds(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "x", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def limited(size):
    """No file may grow beyond `size` bytes: a refusal by the system itself, as a full disk is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_saving_on_a_full_disk_leaves_what_was_there(tmp_path):
    from whence.results.tensor_file import load_tensors, save_tensors

    save_tensors(tmp_path / "t", "x", {"a": torch.arange(8)}, {})
    undo = limited(4096)
    try:
        with pytest.raises(UnavailableError, match=r"disk is full\. What was there before is untouched"):
            save_tensors(tmp_path / "t", "x", {"a": torch.zeros(100_000)}, {})
    finally:
        undo()
    assert torch.equal(load_tensors(tmp_path / "t")[0]["a"], torch.arange(8))
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize("numbers", [1, 3_000, 300_000])
@pytest.mark.parametrize("size", [0, 100, 1_000, 9_000])
def test_torch_s_own_words_for_a_full_disk_are_known(tmp_path, numbers, size):
    """It has several, by how much of the file was still in its buffer."""
    undo = limited(size)
    try:
        with pytest.raises((RuntimeError, OSError)) as problem:
            torch.save({"a": torch.zeros(numbers), **{str(i): i for i in range(2_000)}}, tmp_path / "x.pt")
    finally:
        undo()
    assert disk_is_full(problem.value), problem.value


def test_a_folder_of_files_arrives_whole_or_not(tmp_path):
    from safetensors.torch import save_file

    def write_two():
        with whole_files(tmp_path) as scratch:
            (scratch / "config.json").write_text("new")
            save_file({"a": torch.zeros(100_000)}, scratch / "model.safetensors")

    (tmp_path / "config.json").write_text("old")
    undo = limited(4096)
    try:
        with pytest.raises(UnavailableError, match="disk is full"):
            write_two()
    finally:
        undo()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"config.json": "old"}
    (tmp_path / ".whence-dead.part").mkdir()  # what a kill left
    with whole_files(tmp_path) as scratch:
        (scratch / "config.json").write_text("new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"config.json": "new"}


def test_what_is_no_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("fifo", "loop", "x" * 300, "a\0b", "a\ud800b", "", "."):
        with pytest.raises(InputError, match="there is no file"):
            load_tensors(tmp_path / name)
        with pytest.raises(InputError, match="there is no file"):
            read_records(tmp_path / name, "train")


def test_an_empty_name_is_not_the_folder_one_is_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for write in (make_folder, lambda name: write_atomically(name, b"x")):
        with pytest.raises(InputError, match="empty"):
            write("")
    with pytest.raises(InputError, match="not UTF-8"):
        make_folder("a\udcff")
    assert not list(tmp_path.iterdir())


def test_a_folder_of_files_follows_links_and_replaces_nothing_else(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "real").write_text("old")
    (tmp_path / "out" / "a").symlink_to(tmp_path / "real")
    with whole_files(tmp_path / "out") as scratch:
        (scratch / "a").write_text("new")
    assert (tmp_path / "out" / "a").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    os.mkfifo(tmp_path / "out" / "b")

    def write_both():
        with whole_files(tmp_path / "out") as scratch:
            (scratch / "a").write_text("newer")
            (scratch / "b").write_text("newer")

    with pytest.raises(InputError, match="is a FIFO"):
        write_both()
    assert (tmp_path / "real").read_text() == "new"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"a", "b"}
