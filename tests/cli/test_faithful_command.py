"""`whence faithful` on files of every kind, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faithful.faithful_models import WORDS, tiny_classifier
from whence.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, classifier = tmp_path_factory.mktemp("tiny"), tiny_classifier()
    classifier.model.save_pretrained(place)
    classifier.tokenizer.save_pretrained(place)
    return place


ROWS = [(f"the film was {word} and very {WORDS[k]}", k % 2, "0 0 0 1 0 0 0") for k, word in enumerate(WORDS[16:20])]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "texts.csv"
    path.write_text("text,label,marks\n" + "".join(f"{t},{y},{m}\n" for t, y, m in ROWS))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["faithful", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_table_and_a_verdict(folder: Path, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, save = tmp_path / "run.html", tmp_path / "run.jsonl"
    options = ("--model", folder, "--methods", "rollout,alti", "--save", save, "--html", page, "--rationales", "marks")
    code, out, err = run(capsys, table, *options)
    assert code == 0, err
    assert "rollout" in out
    assert "4 texts: too few" in out
    assert out.index("drop") < out.index("mask") < out.index("4 texts: too few") < out.index("chance")
    assert "…" not in out.replace(" … ", "")  # nothing is cut at 80 columns
    assert '"plausibility"' in page.read_text()
    assert page.read_text().count('"kind":"chart"') == 2  # words deleted, words masked
    assert "alti" in page.read_text()
    before = save.read_bytes()
    code, again, _ = run(capsys, table, *options)
    assert (code, again, save.read_bytes()) == (0, out, before)
    code, _, err = run(capsys, table, *options, "--seed", "3")
    assert code == 2
    assert "seed" in err


def test_json_gold_labels_and_limit(folder: Path, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        capsys, table, "--model", folder, "--methods", "rollout", "--json", "--target", "gold", "--label", "label",
        "--limit", 3, "--operators", "drop", "--ceiling", "none", "--units", "token",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    assert found["plausibility"] is None
    assert found["table"][0]["texts"] == 3
    assert found["settings"]["operators"] == ["drop"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--methods", "altie"), "altie"),
        (("--target", "banana"), "banana"),
        (("--target", "gold"), "needs labels"),
        (("--operators", "burn"), "burn"),
        (("--rationales", "text"), "write 0 1 1"),
        (("--rationales", "label"), "1 marks"),
    ],
)
def test_bad_input_is_one_sentence(
    folder: Path, table: Path, options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, table, "--model", folder, "--methods", "rollout", *options)
    assert code == 2
    assert said in " ".join(err.split())
