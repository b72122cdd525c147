"""`whence decide`, and `--decide` on `whence certify`."""

from __future__ import annotations

import json

import pytest

from whence.cli import main
from whence.cli.decide import heads_of
from whence.errors import InputError
from whence.rules import parse

TEXT = "The old doctor told the nurse that she would not leave the ward before the storm was over, because the roads to the village had been closed since noon and nobody knew when."  # noqa: E501


def test_a_decision_is_printed_and_given_as_json(minilm_path, capsys, tmp_path):
    command = ["decide", TEXT, "--layer", "1", "--head", "5", "--query", "noon", "--query", "she", "-q"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "noon →" in shown
    assert "The proofs were checked without the solver." in shown
    plot, file = tmp_path / "d.png", tmp_path / "d.safetensors"
    assert main([*command, "--rule", "mass:[CLS],[SEP]>=0.3", "--json", "--plot", str(plot), "--out", str(file)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["checked"] is True
    assert len(told["decisions"]) == 2
    assert told["decisions"][0]["lower"] <= told["decisions"][0]["value"] <= told["decisions"][0]["upper"]
    assert plot.stat().st_size > 1000
    assert file.exists()


def test_certify_takes_rules_along(minilm_path, capsys):
    command = ["certify", TEXT, "--layer", "1", "--head", "5", "--query", "noon", "-q", "--decide", "order:she>nurse"]
    assert main([*command, "--decide", "above:[CLS]>0.3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [d["decisions"][0]["verdict"] for d in told["decisions"]]
    assert len(told["decisions"]) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--layer", "1"],
        ["--head", "5"],
        ["--layer", "1", "--head", "x"],
        ["--layer", "1", "--head", "5", "--rule", "best"],
    ],
)
def test_what_is_asked_wrongly_is_said(minilm_path, arguments, capsys):
    assert main(["decide", TEXT, *arguments, "-q"]) == 2
    assert "error:" in capsys.readouterr().err


def test_heads_and_rules_as_they_are_written():
    assert heads_of(3, ["1", "4"]) == [(3, 1), (3, 4)]
    assert heads_of(None, ["3.1", "2.0"]) == [(3, 1), (2, 0)]
    assert parse("argmax:3,7-9").candidates == [3, 7, 8, 9]
    assert parse("mass:[CLS],2>=0.4").at_least == 0.4
    assert (parse("order:she>nurse").first, parse("order:she>nurse").second) == ("she", "nurse")
    assert parse("above:1.40 s>0.2").key == "1.40 s"
    assert parse("expected:2.5").within == 2.5
    assert parse("path").median == 1
    for wrong in ("", "argmin", "mass:", "above:3", "order:3", "expected:x", "mass:3>=x"):
        with pytest.raises(InputError, match="not understood"):
            parse(wrong)
    with pytest.raises(InputError, match="at_least=2"):
        parse("mass:3>=2")
