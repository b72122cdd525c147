"""A survey on a real Ray cluster of two nodes, inside a network namespace of the test's own; the same bytes as here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import whence
from whence.errors import InputError

pytest.importorskip("ray", reason="Ray is not installed (extra scale)")


# Its own network, and its own processes: all of them end with the first one.
APART = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")


def namespace() -> str | None:
    """Why no network namespace can be had here; None: one can."""
    if shutil.which("unshare") is None:
        return "no unshare on this machine"
    tried = subprocess.run([*APART, "true"], capture_output=True, text=True)
    return tried.stderr.strip() or None


apart_from_the_network = pytest.mark.skipif(namespace() is not None, reason=f"no network namespace: {namespace()}")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def reference(tiny: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("reference") / "run"
    whence.survey(tiny, corpus, out, shard_size=2)
    return files(out)


def on_a_cluster(*arguments: str, timeout: int = 300) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*APART, sys.executable, "-m", "tests.surveys.ray_run", *arguments],
        capture_output=True, text=True, timeout=timeout, env=environment,
    )  # fmt: skip


@apart_from_the_network
@pytest.mark.slow
def test_an_actor_and_a_node_are_killed_and_the_bytes_are_the_same(
    tiny: Path, corpus: Path, reference: dict[str, bytes], tmp_path: Path
) -> None:
    run = on_a_cluster(str(tiny), str(corpus), str(tmp_path / "run"), "blows")
    assert run.returncode == 0, run.stderr[-3000:]
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["complete"]
    assert told["told"] == 30
    assert told["killed"] == ["actor", "node"]
    assert files(tmp_path / "run") == reference


@apart_from_the_network
@pytest.mark.slow
def test_nodes_that_do_not_see_the_folder_send_the_files_back(
    tiny: Path, corpus: Path, reference: dict[str, bytes], tmp_path: Path
) -> None:
    run = on_a_cluster(str(tiny), str(corpus), str(tmp_path / "run"), "apart")
    assert run.returncode == 0, run.stderr[-3000:]
    assert files(tmp_path / "run") == reference


def test_what_is_missing_is_said(tiny: Path, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--address auto"):
        whence.survey(tiny, corpus, tmp_path, engine="ray")
    with pytest.raises(InputError, match="engine='dask'"):
        whence.survey(tiny, corpus, tmp_path, engine="dask")
    with pytest.raises(InputError, match="goes with engine 'ray'"):
        whence.survey(tiny, corpus, tmp_path, address="auto")
