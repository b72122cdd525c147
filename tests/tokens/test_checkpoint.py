"""A measurement that was stopped goes on, and nothing of another one, or of a damaged file, gets into it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tokens.conftest import sentences
from whence.errors import InputError
from whence.tokens.result import TokenIdentifiability
from whence.tokens.token_identifiability import token_identifiability
from whence.tokens.training import Training

TEXTS = sentences(60)
MAPS = ("naive", "linear", "mlp", "ridge", "procrustes")


def measure(model: Any, texts: Any = TEXTS, **options: Any) -> TokenIdentifiability:
    return token_identifiability(
        model, texts, **{"maps": MAPS, "bootstrap": 20, "training": Training(epochs=2), **options}
    )


def stop_after(step: int) -> Any:
    def progress(what: str, done: float, _total: float) -> None:
        if what == "Fitting maps" and done == step:
            raise KeyboardInterrupt

    return progress


def same(one: TokenIdentifiability, other: TokenIdentifiability) -> bool:
    ours, theirs = ({"values": r.values, **r.extra} for r in (one, other))
    clocks = {"seconds", "processor_seconds"}
    reports = [{k: v for k, v in r.report.items() if k not in clocks} for r in (one, other)]
    return (
        reports[0] == reports[1]
        and ours.keys() == theirs.keys()
        and all(torch.equal(ours[k].nan_to_num(7), theirs[k].nan_to_num(7)) for k in ours)
    )


@pytest.fixture
def stopped(tiny: Any, tmp_path: Path) -> Path:
    """The folder of a run that was stopped after 5 of 9 cells."""
    with pytest.raises(KeyboardInterrupt):
        measure(tiny("bert"), checkpoint=tmp_path / "run", progress=stop_after(5))
    assert len(list((tmp_path / "run").glob("fitted-*"))) == 5
    return tmp_path / "run"


def test_a_stopped_run_goes_on_and_a_finished_one_does_nothing(tiny: Any, stopped: Path) -> None:
    model, whole = tiny("bert"), measure(tiny("bert"))
    times = {path.name: path.stat().st_mtime_ns for path in stopped.glob("fitted-*")}
    steps: list[float] = []

    def progress(what: str, done: float, _total: float) -> None:
        if what == "Fitting maps":
            steps.append(done)
            if done == 6:
                now = {path.name: path.stat().st_mtime_ns for path in stopped.glob("fitted-*")}
                assert {name: now[name] for name in times} == times

    assert same(measure(model, checkpoint=stopped, progress=progress), whole)
    assert steps == list(range(1, 10))
    assert {path.name for path in stopped.iterdir()} == {"run.json", "result.safetensors"}
    said: list[str] = []
    again = measure(model, checkpoint=stopped, say=said.append, progress=stop_after(1))
    assert said == [f"The run in {str(stopped)!r} is finished: nothing was done."]
    assert same(again, whole)


def test_another_run_is_refused_with_the_difference(tiny: Any, stopped: Path) -> None:
    with pytest.raises(InputError, match=r"differs in texts \(SHA-256"):
        measure(tiny("bert"), TEXTS[1:], checkpoint=stopped)
    with pytest.raises(InputError, match=r"setting seed \(0 there, 1 here\)"):
        measure(tiny("bert"), seed=1, checkpoint=stopped)
    with pytest.raises(InputError, match="setting training"):
        measure(tiny("bert"), training=Training(epochs=3), checkpoint=stopped)
    with pytest.raises(InputError, match=r"weights \(SHA-256"):
        measure(tiny("gpt2"), checkpoint=stopped)


def test_a_damaged_file_is_named_with_the_way_on(tiny: Any, stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path / "other")
    path = next(stopped.glob("fitted-0-+0-whole*"))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match=r"fitted-0-\+0-whole.* Without .* it is fitted anew"):
        measure(tiny("bert"), checkpoint=stopped)
    path.unlink()
    assert same(measure(tiny("bert"), checkpoint=stopped), measure(tiny("bert"), checkpoint=tmp_path / "other"))
