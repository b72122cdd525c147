"""`whence attribute` as a person types it, and what `whence mix` says of methods that are not its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whence.cli import main

TEXT = "The bank raised its rates."


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, " ".join(err.split())


def test_methods_side_by_side(minilm_path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "attribute", TEXT, "--method", "alti,rollout", "--quiet")
    assert code == 0
    assert "raised" in out
    assert "the mean of all final states" in out
    code, out, _ = run(capsys, "attribute", TEXT, "--method", "alti", "-o", "distance=l2", "--json", "--quiet")
    data = json.loads(out)
    assert data["provenance"]["settings"]["distance"] == "l2"
    assert abs(sum(data["values"]) - 1) < 1e-4


def test_what_cannot_be_asked(minilm_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (("attribute", TEXT, "--target", "banana"), "has no effect on method 'alti'"),
        (("attribute", TEXT, "--method", "gradient"), "it has no head"),
        (("attribute", TEXT, "--method", "alti", "-o", "steps=3"), "has no option 'steps'"),
        (("attribute", TEXT, "--method", "alti", "-o", "steps"), "is not written NAME=VALUE"),
        (("attribute", TEXT, "--method", "identifiability"), "a measure of its own"),
        (("mix", TEXT, "--method", "occlusion"), "whence attribute does that"),
    ):
        code, out, err = run(capsys, *arguments, "--quiet")
        assert (code, out) == (2, ""), arguments
        assert words in err


def test_a_classifiers_contrast(shared_models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(shared_models / "bert-tiny-sst2")
    given = (
        "--model",
        model,
        "--method",
        "occlusion",
        "--target",
        "positive",
        "--foil",
        "negative",
        "--json",
        "--quiet",
    )
    code, out, _ = run(capsys, "attribute", "A great film.", *given)
    data = json.loads(out)
    assert code == 0
    assert (data["provenance"]["settings"]["target"], data["provenance"]["settings"]["foil"]) == (1, 0)
    assert max(zip(data["values"], data["tokens"]["text"], strict=True))[1] == "great"


def test_what_is_explained_has_its_name(shared_models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(shared_models / "bert-tiny-sst2")
    code, out, _ = run(capsys, "attribute", "A great film.", "--model", model, "--method", "occlusion", "--quiet")
    assert code == 0
    assert "bert-tiny-sst2: the class ‘positive’." in out
