"""kill -9 at random moments: what the run leaves in the end is bit for bit what an undisturbed one leaves.

Few kills here; `make torture` has thirty of each kind.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from torture.kills import contents


@pytest.mark.parametrize("run", ["train", "language", "convert", "tokens", "survey", "faithful"])
def test_killed_runs_end_bit_identical(run):
    command = [sys.executable, "-m", "torture.kills", run, "--kills", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"{run}: 2 kills (" in done.stdout
    assert "bit-identical" in done.stdout


def test_the_comparison_sees_one_bit(tmp_path):
    import torch
    from safetensors.torch import save_file

    for name, value in (("a", 1.0), ("b", 1.0), ("c", 1.0000001)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.tensor([value])}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "metrics.json").write_text(json.dumps({"seconds": value, "steps": 3}))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a")["model.safetensors"] != contents(tmp_path / "c")["model.safetensors"]
    assert contents(tmp_path / "a")["metrics.json"] == contents(tmp_path / "c")["metrics.json"]
