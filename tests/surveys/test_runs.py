"""The same bytes whatever the number of workers and kills; another run in the same folder is refused."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import whence
from tests.surveys.survey_models import save_tiny, some_texts
from whence.errors import InputError, UnavailableError


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def reference(tiny: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reference") / "run"
    found = whence.survey(tiny, corpus, out, shard_size=4)
    assert found.complete
    assert len(files(out)) == 1 + 3 * 8
    return out


def test_two_workers_write_the_same_bytes(tiny: Path, corpus: Path, reference: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    whence.survey(tiny, corpus, tmp_path, shard_size=4, workers=2, progress=lambda *at: told.append(at))
    assert files(tmp_path) == files(reference)
    assert told[-1] == ("texts", 30, 30)
    assert len(told) == 8


SLOWLY = """
import signal, sys, time, whence
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
from whence.surveys import worker
whole = worker.Worker.files
def slow(self, shard):
    time.sleep(0.3)
    return whole(self, shard)
worker.Worker.files = slow
whence.survey(sys.argv[1], sys.argv[2], sys.argv[3], shard_size=4)
"""


def wait_for(folder: Path, pattern: str, number: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(1200):
        if len(list(folder.glob(pattern))) >= number:
            return
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.05)
    raise AssertionError("no shard was written in a minute")


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_goes_on(blow: int, tiny: Path, corpus: Path, reference: Path, tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", SLOWLY, str(tiny), str(corpus), str(tmp_path)], stderr=subprocess.PIPE
    )
    try:
        wait_for(tmp_path, "texts/*.parquet", 2, run)
        run.send_signal(blow)
        run.wait(30)
    finally:
        run.kill()
        run.communicate()
    assert run.returncode != 0
    done = sorted(path.name for path in (tmp_path / "texts").glob("*.parquet"))
    assert 2 <= len(done) < 8
    stamps = {name: (tmp_path / "heads" / name).stat().st_mtime_ns for name in done}
    part = whence.read_survey(tmp_path)
    assert not part.complete
    assert len(part.texts) == 4 * len(done)
    (tmp_path / "heads" / ".whence-00.part").write_bytes(b"half a file")
    whence.survey(tiny, corpus, tmp_path, shard_size=4)
    assert files(tmp_path) == files(reference)
    for name, stamp in stamps.items():  # what was done was not done again
        assert (tmp_path / "heads" / name).stat().st_mtime_ns == stamp


def test_a_damaged_or_foreign_shard_is_made_again(tiny: Path, corpus: Path, reference: Path, tmp_path: Path) -> None:
    whence.survey(tiny, corpus, tmp_path, shard_size=4)
    (tmp_path / "run.json").write_text((tmp_path / "run.json").read_text().split('"files"')[0] + '"files": null}')
    (tmp_path / "texts" / "000001.parquet").write_bytes(b"PAR1 not a file")
    (tmp_path / "heads" / "000002.parquet").write_bytes((tmp_path / "heads" / "000003.parquet").read_bytes())
    whence.survey(tiny, corpus, tmp_path, shard_size=4)
    assert files(tmp_path) == files(reference)


@pytest.mark.parametrize("table", ["heads", "layers", "texts"])
def test_one_bit_of_a_shard_is_seen(table: str, tiny: Path, corpus: Path, reference: Path, tmp_path: Path) -> None:
    """A finished survey refuses the file by name; one that goes on makes it again."""
    whence.survey(tiny, corpus, tmp_path, shard_size=4)
    path = tmp_path / table / "000001.parquet"
    whole = path.read_bytes()
    for at in (40, len(whole) // 2, len(whole) - 100, None):
        data = bytearray(whole)
        if at is None:
            data = data[: len(data) // 2]
        else:
            data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"000001\.parquet' is damaged .*restore it from a copy"):
            getattr(whence.read_survey(tmp_path), table)
    path.unlink()
    with pytest.raises(InputError, match=r"000001\.parquet' is damaged"):
        getattr(whence.read_survey(tmp_path), table)
    path.write_bytes(data)
    (tmp_path / "run.json").write_text((tmp_path / "run.json").read_text().split('"files"')[0] + '"files": null}')
    with pytest.raises(InputError, match=r"000001\.parquet' is damaged .*run again, makes it anew"):
        getattr(whence.read_survey(tmp_path), table)
    whence.survey(tiny, corpus, tmp_path, shard_size=4)
    assert files(tmp_path) == files(reference)


def test_order_of_texts_in_a_shard_does_not_change_a_text(tiny: Path, tmp_path: Path) -> None:
    """Batches change with the shard, and with them the last bits: numbers agree, samples are the same."""
    texts = some_texts()
    forth = whence.survey(tiny, texts, tmp_path / "a", shard_size=30).heads
    back = whence.survey(tiny, texts[::-1], tmp_path / "b", shard_size=30).heads
    back = back.assign(text=29 - back["text"]).sort_values(["text", "layer", "head"]).reset_index(drop=True)
    for column in forth:
        wrong = (forth[column] - back[column]).abs().fillna(0).max()
        assert wrong <= (2e-3 if forth[column].dtype.kind == "f" else 0), column


def test_another_run_in_the_folder_is_refused(tiny: Path, corpus: Path, reference: Path, tmp_path: Path) -> None:
    before = files(reference)
    with pytest.raises(InputError, match=r"setting epsilon .0.05 there, 0.1 here."):
        whence.survey(tiny, corpus, reference, shard_size=4, epsilon=0.1)
    with pytest.raises(InputError, match=r"texts .SHA-256"):
        whence.survey(tiny, some_texts(30)[::-1], reference, shard_size=4)
    with pytest.raises(InputError, match=r"weights .SHA-256"):
        whence.survey(save_tiny(tmp_path / "tiny", seed=1), corpus, reference, shard_size=4)
    assert files(reference) == before


def test_a_full_disk_leaves_what_is_done(tiny: Path, corpus: Path, reference: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the files of a later shard are larger than all before."""
    kept = files(reference)
    sizes = [max(len(kept[f"{table}/{k:06d}.parquet"]) for table in ("heads", "layers")) for k in range(8)]
    fits = next(k for k in range(1, 8) if sizes[k] > max(sizes[:k]))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(sizes[:fits]), hard))
    try:
        with pytest.raises(UnavailableError, match="the disk is full"):
            whence.survey(tiny, corpus, tmp_path, shard_size=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(list((tmp_path / "texts").glob("*.parquet"))) == fits
    assert not list(tmp_path.rglob("*.part"))
    whence.survey(tiny, corpus, tmp_path, shard_size=4)
    assert files(tmp_path) == files(reference)


def is_worker(process: Any) -> bool:
    """Whether it is one of the survey's; what has ended since it was listed is none."""
    import psutil

    try:
        return "spawn_main" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # zombies included
        return False


@pytest.mark.skipif(os.name != "posix", reason="kills by signal")
def test_a_killed_worker_is_replaced_and_none_outlives_its_parent(
    tiny: Path, corpus: Path, reference: Path, tmp_path: Path
) -> None:
    import psutil

    script = "import sys, whence\nif __name__ == '__main__': whence.survey(*sys.argv[1:4], shard_size=4, workers=2)"
    file = tmp_path / "run_it.py"
    file.write_text(script)
    out = tmp_path / "run"
    run = subprocess.Popen([sys.executable, str(file), str(tiny), str(corpus), str(out)])
    try:
        children: list[psutil.Process] = []
        for _ in range(1200):
            children = [child for child in psutil.Process(run.pid).children() if is_worker(child)]
            if len(children) == 2:
                break
            time.sleep(0.05)
        children[0].kill()
        assert run.wait(120) == 0
    finally:
        run.kill()
        run.wait()
    assert files(out) == files(reference)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
