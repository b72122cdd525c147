"""`whence train` and `whence convert`."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from whence.cli import main
from whence.identifiable.training.demo import demo_data

SMALL = ["--epochs", "1", "--hidden-size", "16", "--heads", "2", "--threads", "1", "-q"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    data = demo_data(120)
    lines = [f"{text}\t{label}" for text, label in zip(data.texts, data.labels, strict=True)]
    path = tmp_path / "train.tsv"
    path.write_text("\n".join(["sentence\twho", *lines]) + "\n", encoding="utf-8")
    return path


def test_train_from_a_table(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    given = [
        "train",
        "--data",
        str(table),
        "--test",
        str(table),
        "--text",
        "sentence",
        "--label",
        "who",
        "-o",
        str(out),
    ]
    assert main([*given, *SMALL, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["variant"] == "tied"
    assert shown["test_texts"] == 120
    assert main([*given, *SMALL, "--format", "csv"]) == 0  # finished: the same metrics, as a line of a table
    frame = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert frame["test_accuracy"].tolist() == [shown["test_accuracy"]]
    assert (out / "config.json").exists()


def test_train_says_what_is_missing(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data", str(table), "-o", str(tmp_path / "m"), *SMALL]) == 2
    assert "'sentence', 'who'" in capsys.readouterr().err
    assert main(["train", "-o", str(tmp_path / "m")]) == 2
    assert "--demo" in capsys.readouterr().err
    assert main(["train", "--demo", "--variant", "wide", "-o", str(tmp_path / "m"), *SMALL]) == 2
    assert "small-key" in capsys.readouterr().err


@pytest.mark.slow
def test_train_on_two_processes_shares_the_steps(table: Path, tmp_path: Path) -> None:
    """`accelerate launch` on several processes, here on the processor: data-parallel, one folder."""
    out = tmp_path / "model"
    given = ["train", "--data", str(table), "--label", "who", "-o", str(out), "--batch-size", "16", *SMALL]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, "-m", "whence", *given], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    metrics = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["steps"] == -(-metrics["train_texts"] // 32)


def test_compare(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--data", str(table), "--label", "who", "--compare", "--variants", "concat,tied", "--seeds", "1"]
    assert main(["train", *given, "-o", str(tmp_path / "all"), *SMALL]) == 0
    assert "| tied |" in capsys.readouterr().out


def test_convert(minilm_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join([*demo_data(12).texts, ""]) + "\n", encoding="utf-8")
    given = ["--texts", str(texts), "--steps", "0", "--max-length", "48", "-q", "--json"]
    assert main(["convert", "minilm", *given, "--out", str(tmp_path / "converted")]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tied_residual"] < 1e-4
    assert (tmp_path / "converted" / "fidelity.json").exists()


def test_convert_refuses_a_rotary_decoder(
    shared_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("one\ntwo\n", encoding="utf-8")
    model = str(shared_models / "stories260K")
    assert main(["convert", model, "--texts", str(texts), "--out", str(tmp_path / "out")]) == 1
    assert "RoPE" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_convert_with_second_texts_cut_and_as_a_table(
    minilm_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts.tsv"
    lines = [f"The {a} sat down.\t{'The cat slept. ' * 50}" for a in ("cat", "dog", "nurse", "old man")]
    texts.write_text("\n".join(["text\tsecond", *lines]) + "\n", encoding="utf-8")
    given = ["convert", "--model", "minilm", "--texts", str(texts), "--text", "text", "--pair", "second", "--truncate"]
    given += ["--max-length", "32", "--steps", "0", "--out", str(tmp_path / "out"), "-q"]
    for _ in range(2):  # run, then finished
        assert main([*given, "--format", "csv"]) == 0
        frame = pd.read_csv(io.StringIO(capsys.readouterr().out))
        assert set(frame["after_distillation"]) == {True, False}
        assert "embedding_cosine" in frame
