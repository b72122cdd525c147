"""What users get wrong: each is answered with what was given and what to do; a bad text is a row with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

import whence
from tests.surveys.survey_models import some_texts
from whence.cli import main
from whence.errors import InputError, ModelError
from whence.surveys.settings import SurveySettings
from whence.surveys.worker import Task, loaded_here


def test_texts_that_fail_are_rows_with_a_reason(tiny: Path, tmp_path: Path) -> None:
    texts = ["a b c", "", "the film was good", " ".join(["bad"] * 60), "   "]
    found = whence.survey(tiny, texts, tmp_path / "a")
    assert found.texts["reason"].notna().tolist() == [False, True, False, True, True]
    assert "62 tokens" in found.texts["reason"][3]
    assert "is empty" in found.texts["reason"][1]
    assert set(found.heads["text"]) == {0, 2}
    cut = whence.survey(tiny, texts, tmp_path / "b", truncate=True)
    assert cut.texts["truncated"].tolist() == [False, False, False, True, False]
    assert cut.texts["length"].tolist() == [5, 0, 6, 40, 0]
    assert "1 cut to fit" in cut.card()


def test_every_text_fails(tiny: Path, tmp_path: Path) -> None:
    found = whence.survey(tiny, ["", " "], tmp_path)
    assert len(found.failed) == 2
    assert len(found.heads) == 0
    assert "0 of 2 texts measured" in found.card()


def test_one_text_has_no_interval(tiny: Path, tmp_path: Path) -> None:
    found = whence.survey(tiny, ["the film was not very good and not very bad"], tmp_path)
    assert found.mean("r", "layer")["low"].isna().all()
    assert len(found.verdict()) == 8


@pytest.mark.parametrize(
    ("content", "name", "options", "said"),
    [
        ("", "x.txt", {}, "holds no texts"),
        ("a,b\n1,2\n", "x.csv", {"text": "c"}, "it has the columns 'a', 'b'"),
        ('{"text": "a"}\n{"text": 3}\n', "x.jsonl", {}, "row 1 of the column 'text' is 3, not a text"),
        (b"good\n\xff\xfe\n", "x.txt", {}, "line 2, is not UTF-8"),
        ("a b\n", "x.txt", {"limit": 0}, "limit=0"),
        ("a b\n", "x.txt", {"measures": "htta"}, "no measure of a survey is called 'htta'"),
        ("a b\n", "x.txt", {"without": "attention,certainty,alti,tokens"}, "every measure was left out"),
        ("a b\n", "x.txt", {"workers": 0}, "workers=0"),
        ("a b\n", "x.txt", {"epsilon": 2.0}, "epsilon=2.0"),
    ],
)
def test_refused(
    tiny: Path, tmp_path: Path, content: str | bytes, name: str, options: dict[str, object], said: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=said.replace("(", r"\(")):
        whence.survey(tiny, file, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_a_list_of_mixed_types(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="text 1 is 7, not a text"):
        whence.survey(tiny, ["a b", 7], tmp_path / "out")


def test_a_folder_that_cannot_be_made(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        whence.survey(tiny, ["a b"], tmp_path / "file" / "out")


def test_a_folder_with_rows_of_nobody(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "000000.parquet").write_bytes(b"")
    with pytest.raises(InputError, match="unknown run"):
        whence.survey(tiny, ["a b"], tmp_path)


def test_no_survey_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder of a survey"):
        whence.read_survey(tmp_path)


def test_a_worker_without_the_model(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not there on the machine"):
        loaded_here(Task(str(tmp_path / "nowhere"), "0" * 64, SurveySettings()))
    with pytest.raises(ModelError, match="has other weights"):
        loaded_here(Task(str(tiny), "0" * 64, SurveySettings()))


def test_command_report_compare_and_card(
    tiny: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["survey", "--texts", str(corpus), "--model", str(tiny), "--limit", "12"]
    assert main([*run, "--out", str(tmp_path / "a")]) == 0
    assert "heads of 4" in capsys.readouterr().out
    assert main([*run, "--out", str(tmp_path / "a"), "--epsilon", "0.2"]) == 2
    assert "setting epsilon" in capsys.readouterr().err
    assert main(["survey", "report", str(tmp_path / "a")]) == 0
    page = (tmp_path / "a" / "report.html").read_text()
    assert page.count('"kind":"chart"') == 10
    assert "default-src 'none'" in page.replace("&#x27;", "'")  # nothing can be loaded
    assert "unique up to 5 tokens" in (tmp_path / "a" / "report.svg").read_text()
    assert main(["survey", "report", str(tmp_path / "a"), "--card"]) == 0
    assert "Every row was unique up to 5 tokens" in " ".join(capsys.readouterr().out.split())
    assert main(["survey", "compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert "True" not in capsys.readouterr().out  # nothing lies apart from itself
    assert main(["survey", "repeat", str(tmp_path / "a")]) == 2
    # A report in the folder does not make the run another one.
    assert main([*run, "--out", str(tmp_path / "a")]) == 0
    assert main(["survey"]) == 2


def test_on_request(tiny: Path, tmp_path: Path) -> None:
    found = whence.survey(tiny, some_texts(3), tmp_path, measures="hta,local-global", without="certainty,alti,tokens")
    trace = whence.trace(whence.load(tiny), some_texts(3)[0])
    exact = whence.hidden_token_attribution(trace, mode="exact")
    lines = found.layers[found.layers["text"] == 0].set_index("layer")
    own = exact.values.diagonal(dim1=-2, dim2=-1).mean(-1)
    for layer in range(2):
        assert abs(lines.loc[layer, "hta_own"] - float(own[layer])) <= 1e-3  # 16 probes span the whole width of 16
    assert found.heads["local_global_pearson"].between(-1, 1).all()
    assert "certain" not in found.heads
    with pytest.raises(InputError, match="without the measure 'certainty'"):
        found.verdict()
