"""The commands that look into a model, run as a user runs them: what they print, as text and as JSON, and how they fail."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from conformance.zoo import build
from whence.cli import main


@pytest.fixture(autouse=True)
def _needs_the_model(minilm_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what a command writes stays here


def run(capsys, *arguments):
    code = main(list(arguments))
    found = capsys.readouterr()
    return code, " ".join(found.out.split()), found


def test_look_says_what_is_certain_and_what_is_not(capsys, long_text):
    code, out, _ = run(capsys, "look", long_text + " " + long_text, "--quiet", "--no-report")
    assert code == 0
    assert "12 heads of 32" in out
    assert "at most 33 tokens can have one and only one attention row" in out
    assert "heads may be read on this text" in out
    assert "Heads that may be read:" in out
    assert "Heads not to read, for example:" in out
    assert "would give the same output" in out
    assert "of the attention was moved; the final states changed by" in out


def test_look_at_a_short_text_says_that_every_row_is_unique(capsys):
    code, out, _ = run(capsys, "look", "The bank raised its rates.", "--quiet")
    assert code == 0
    assert "every row of all 72 heads is the only one with its output" in out
    assert "Heads not to read" not in out
    assert "Heads that may be read: 72 of 72" in out
    assert "counter-example" not in out


def test_look_as_json_has_the_numbers(capsys, long_text):
    code, _, found = run(capsys, "look", long_text, "--json", "--quiet", "--no-report", "--heads", "worst")
    data = json.loads(found.out)
    assert code == 0
    assert len(data["layers"]) == 6
    assert data["best"] == []
    n = len(data["tokens"])
    for layer in data["layers"]:
        assert layer["null_dimension"] == [max(0, n - 32)] * 2
        assert layer["simplex_null_dimension"] == [max(0, n - 33)] * 2
    for row in data["worst"]:
        assert row["checked"]
        for key in row["intervals"]:
            assert key["lower"] - 1e-9 <= key["weight"] <= key["upper"] + 1e-9
    assert data["provenance"]["weights"]
    assert data["verdict"]["epsilon"] == 0.05
    assert len(data["verdict"]["heads"]) == 72
    assert {row["verdict"] for row in data["verdict"]["heads"]} <= {"unique", "read", "careful", "do not read", "flat"}


def test_look_takes_another_threshold_and_shows_it(capsys, long_text):
    code, out, _ = run(capsys, "look", long_text, "--quiet", "--no-report", "--epsilon", "0.001")
    assert code == 0
    assert "the heaviest weight stays within 0.001" in out
    assert main(["look", "a text", "--epsilon", "2"]) == 2
    assert "--epsilon 2.0" in capsys.readouterr().err


def test_look_as_json_writes_the_report_too_and_names_it(capsys, tmp_path):
    text = "The bank raised its rates."
    assert (
        Path(json.loads(run(capsys, "look", text, "--json", "--quiet")[2].out)["report"]).name == "whence-report.html"
    )
    assert (tmp_path / "whence-report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    (tmp_path / "whence-report.html").unlink()
    assert json.loads(run(capsys, "look", text, "--json", "--quiet", "--no-report")[2].out)["report"] is None
    assert not list(tmp_path.iterdir())


def test_look_reads_standard_input(capsys, monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("The bank raised its rates."))
    code, out, _ = run(capsys, "look", "-", "--quiet")
    assert code == 0
    assert "8 tokens" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["look", ""], "is empty"),
        (["look", "x", "--heads", "middle"], "choose worst, best or both"),
        (["look", "word " * 900], "has positions for 512"),
        (["look", "x", "--open", "--no-report"], "--open opens the report"),
        (["look", "x", "--model", "./nowhere"], "there is no folder './nowhere'"),
        (["look", "x", "--attention", "cross"], "--attention cross is not in this trace"),
        (["certify", "a b", "--layer", "7", "--head", "0", "--query", "a"], "no layer 7"),
        (["certify", "a b", "--layer", "0", "--head", "0", "--query", "z"], "'z' is no token here"),
        (["doctor", "./nowhere"], "there is no folder"),
    ],
)
def test_errors_are_one_sentence_and_no_traceback(capsys, arguments, message):
    code, _, found = run(capsys, *arguments, "--quiet")
    assert code == 2
    said = " ".join(found.err.split())
    assert message in said
    assert "Traceback" not in found.err


def test_certify_shows_intervals_and_checks_them(capsys, long_text):
    code, out, _ = run(
        capsys, "certify", long_text + " " + long_text, "--layer", "3", "--head", "2", "--query", "5", "--quiet"
    )
    assert code == 0
    assert "Layer 3, head 2" in out
    assert "can be moved in" in out
    assert "The proofs were checked without the solver." in out
    assert "Another row, put into the model" in out


def test_certify_as_json_carries_its_proof(capsys, long_text):
    _, _, found = run(
        capsys, "certify", long_text, "--layer", "1", "--head", "2", "--query", "-3", "--json", "--quiet", "--top", "2"
    )
    data = json.loads(found.out)
    assert data["checked"]
    assert len(data["keys"]) == 2
    assert len(data["upper_duals"]) == 2


def test_doctor_trusts_the_embedded_model(capsys):
    code, out, _ = run(capsys, "doctor", "--quiet")
    assert code == 0
    assert "This model was read right." in out
    assert out.count("post-norm") == 6


def test_doctor_as_json_and_exit_code_for_a_model_that_is_not_read_whole(capsys, tmp_path):
    build("qwen3_next").model.save_pretrained(tmp_path / "gated")
    code, _, found = run(capsys, "doctor", str(tmp_path / "gated"), "--json", "--quiet")
    data = json.loads(found.out)
    assert code == 1
    assert data["trusted"] is False
    assert any("gate or a scale" in reason for reason in data["reasons"])
    assert data["holds"]["a"]


def test_doctor_refuses_a_model_without_attention(capsys, tmp_path):
    build("mamba").model.save_pretrained(tmp_path / "mamba")
    code, _, found = run(capsys, "doctor", str(tmp_path / "mamba"), "--quiet")
    assert code == 1
    assert "no attention" in " ".join(found.err.split())


def test_methods_lists_what_is_registered(capsys):
    code, out, _ = run(capsys, "methods")
    assert code == 0
    for name in ("effective-attention", "certify", "witness", "doppelganger"):
        assert name in out


def test_the_report_of_a_prompt_and_its_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.writers import decoder, tokenizer

    folder = tmp_path / "writer"
    decoder().model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    page = tmp_path / "answer.html"
    asked = ["look", "Cats purr. Dogs bark.", "-m", str(folder), "--task", "text-generation", "--max-new-tokens", "3"]
    assert main([*asked, "--report", str(page), "-q", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) > 3
    found = re.search(r'"choices":(\[.*?\])', page.read_text())
    assert found is not None
    assert len(json.loads(found[1])) == 3
    assert main([*asked, "--continuation", " no", "--report", str(page), "-q"]) == 2
    assert "--max-new-tokens" in capsys.readouterr().err
