"""One analysis for look, report and server: the same verdict everywhere, and nothing computed twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import whence
from tests.serving.tiny import TEXT, tiny_model
from whence.errors import InputError
from whence.reporting import analysis as module
from whence.reporting.analysis import Analysis


@pytest.fixture(scope="module")
def trace() -> Any:
    torch.set_num_threads(1)
    return whence.trace(tiny_model(), TEXT)


def test_report_takes_epsilon_and_shows_the_verdict_of_python(trace: Any) -> None:
    for epsilon in (0.05, 0.6):
        manifest = whence.report(trace, epsilon=epsilon, budget=0.0).document.manifest
        verdict = whence.verdict(trace, epsilon=epsilon)
        stack = manifest["stacks"][0]
        assert manifest["epsilon"] == stack["verdict"]["epsilon"] == epsilon
        assert stack["verdict"]["names"] == verdict.names()
        assert stack["findings"][: len(verdict.sentences())] == verdict.sentences()
    names = [whence.verdict(trace, epsilon=epsilon).names() for epsilon in (0.05, 0.6)]
    assert names[0] != names[1]
    with pytest.raises(InputError, match=r"epsilon=1\.5"):
        whence.report(trace, epsilon=1.5)
    with pytest.raises(InputError, match=r"epsilon=0\.1, but the analysis given is of this trace with epsilon=0\.05"):
        whence.report(trace, epsilon=0.1, analysis=Analysis(trace))


def test_colour_and_verdict_come_from_the_same_number(trace: Any) -> None:
    stack = whence.report(trace, budget=0.0).document.manifest["stacks"][0]
    for shares, names in zip(stack["grid"]["certain"], stack["verdict"]["names"], strict=True):
        for share, name in zip(shares, names, strict=True):
            expected = (
                "flat" if share is None else "read" if share >= 0.95 else "careful" if share >= 0.5 else "do not read"
            )
            assert name == expected or (name == "unique" and share == 1.0)


def test_look_with_its_report_computes_nothing_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from whence.attention import overview as overviews
    from whence.cli import main

    counts: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def measure(*args: Any, **options: Any) -> Any:
            places = [str(a) for a in args[1:] if isinstance(a, (int, str))]
            counts[" ".join([name, *places])] += 1
            return original(*args, **options)

        monkeypatch.setattr(owner, name, measure)

    for name in ("overview", "contributions", "witness"):
        counted(module, name)
    counted(overviews, "certify")
    monkeypatch.setattr("whence.model.load.load", lambda *_, **__: tiny_model())
    code = main(["look", TEXT, "--model", "tiny", "--json", "--quiet", "--report", str(tmp_path / "r.html")])
    data = json.loads(capsys.readouterr().out)
    assert code == 0
    assert data["verdict"]["heads"]
    assert counts["overview"] == counts["contributions alti"] == 1
    assert any(name.startswith("certify") for name in counts)
    assert any(name.startswith("witness") for name in counts)
    assert {name: n for name, n in counts.items() if n > 1} == {}


def test_rows_that_were_not_searched_are_marked(trace: Any) -> None:
    from whence.reporting.heads import alternatives_of, detail_of, head_blocks
    from whence.reporting.quantise import unpack

    layer = trace[1]
    n = len(trace.tokens)
    found = alternatives_of(layer).by_head()
    head = next(iter(found))
    other, searched = found[head]
    assert searched.all()
    partly = searched.clone()
    partly[3:] = False
    arrays, header = unpack(head_blocks(layer, detail_of("standard", n), {head: (other, partly)})[head])
    assert arrays["searched"][:, 0].tolist() == [float(q < 3) for q in range(n)]
    assert header["searched"] == 3
    moved = 0.5 * (other - layer.attention[layer.heads.index(head)].double()).abs().sum(-1)
    assert header["moved"] == pytest.approx(float(moved[:3].mean()), abs=1e-6)


def test_a_budget_that_runs_out_says_which_rows_it_reached() -> None:
    from whence.core.attention.alternatives import alternative_attention

    torch.manual_seed(0)
    attention, values = torch.softmax(torch.randn(2, 60, 60), -1), torch.randn(2, 60, 8)
    assert alternative_attention(attention, values, budget=60.0, rounds=1).searched.all()
    assert not alternative_attention(attention, values, budget=1e-9).searched.any()


def test_pieces_of_a_word_are_named_with_the_word() -> None:
    from whence.reporting.attention import tokens_data
    from whence.results.labels import Tokens

    tokens = Tokens(
        ("[CLS]", "he", "evo", "lved", "."), ("[CLS]", "he", "evo", "##lved", "."), words=(None, 0, 1, 1, 2),
        special=(True, False, False, False, False),
    )  # fmt: skip
    assert [tokens.name(i) for i in range(5)] == [
        "[CLS]",
        "‘he’",
        "‘evo’ (in ‘evolved’)",
        "‘lved’ (in ‘evolved’)",
        "‘.’",
    ]
    assert tokens_data(tokens)["word"] == [None, None, "evolved", "evolved", None]
