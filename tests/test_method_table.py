"""The method table: declared once, imported late, true of its objects, open to methods from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch

import whence
from whence import method_table
from whence.cli import main
from whence.errors import InputError
from whence.method_table import QUESTIONS, Method, declare, explaining, method, methods, options_of, register

ABOUT = {"paper": "Nobody 2026", "cost": "trace", "summary": "the first head", "determined": "weights"}
PLAIN = {"paper": "Nobody 2020", "cost": "trace", "summary": "gives a number"}
TEXT = "The bank raised its rates."


@pytest.mark.parametrize("name", [m.name for m in explaining()])
def test_the_options_are_those_of_the_object(name: str) -> None:
    entry = method(name)
    assert entry.options == options_of(entry.function, entry.gives)


def test_every_entry_says_who_and_what() -> None:
    for entry in methods():
        assert entry.paper
        assert entry.summary
        assert entry.title
        assert callable(entry.function), entry.location
        assert bool(entry.determined) == (entry.gives != "measure") or entry.name == "local-vs-global"


@pytest.fixture
def extra(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The table with room for methods that go again after the test."""
    methods()
    monkeypatch.setattr(method_table, "_registered", dict(method_table._registered))
    return


@pytest.mark.usefixtures("extra")
class TestFromOutside:
    def test_a_function_of_a_layer(self, minilm_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        @register("first-head", gives="matrix", shown=True, **ABOUT)
        def first_head(layer: Any, head: int = 0) -> torch.Tensor:
            return layer.attention[head]

        assert method("first-head").options == ("attention", "head")
        trace = whence.trace(whence.load(), TEXT)
        found = whence.contributions(trace, "first-head", head=2)
        assert torch.equal(found.values, trace.attention[:, 2])
        assert found.provenance.settings["head"] == 2
        two = whence.contributions([trace, trace], "first-head")
        assert torch.equal(two[1].values, trace.attention[:, 0])
        scores = whence.attribute(whence.load(), trace, "first-head")
        rolled = whence.contributions(trace, "first-head").rollout().values[-1]
        assert torch.allclose(scores.values, rolled.mean(0), atol=1e-6)
        assert main(["mix", TEXT, "--method", "first-head", "-o", "head=2", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["provenance"]["method"] == "first-head"
        assert main(["methods", "first-head"]) == 0
        assert "Nobody 2026" in capsys.readouterr().out
        from whence.reporting.analysis import Analysis
        from whence.reporting.mixing import mixtures
        from whence.serving.work import by_layer, explaining

        assert "first-head" in {m.name for m in by_layer()} & {m.name for m in explaining()}
        (entry,), blocks = mixtures(Analysis(trace), ["first-head"])
        assert (entry["title"], entry["paper"], len(blocks)) == ("First head", "Nobody 2026", 6)

    def test_a_function_of_a_prediction(self, minilm_path: Path) -> None:
        @register("ones", gives="scores", **{**ABOUT, "determined": "map"})
        def ones(prediction: Any) -> torch.Tensor:
            return torch.ones(len(prediction.trace.tokens))

        assert whence.attribute(whence.load(), TEXT, "ones").values.tolist() == [1.0] * 8
        with pytest.raises(InputError, match="has no effect"):
            whence.attribute(whence.load(), TEXT, "ones", target=1)
        with pytest.raises(InputError, match=r"ask whence\.attribute"):
            whence.contributions(whence.trace(whence.load(), TEXT), "ones")

    def test_a_wrong_shape_is_refused(self, minilm_path: Path) -> None:
        @register("whole", gives="matrix", **ABOUT)
        def whole(layer: Any) -> torch.Tensor:
            return layer.attention

        with pytest.raises(InputError, match=r"gave \(12, 8, 8\) for layer 0"):
            whence.contributions(whence.trace(whence.load(), TEXT), "whole")

    def test_an_entry_point(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entry = Method("theirs", "mixing", location="math:sqrt", gives="scores", **ABOUT)

        class Point:
            name, dist = "theirs", None

            def __init__(self, thing: object) -> None:
                self.thing = thing

            def load(self) -> object:
                return self.thing

        monkeypatch.setattr(method_table, "entry_points", lambda group: [Point(entry)])
        monkeypatch.setattr(method_table, "_complete", False)
        assert method("theirs") is entry
        monkeypatch.setattr(method_table, "entry_points", lambda group: [Point(3)])
        monkeypatch.setattr(method_table, "_complete", False)
        with pytest.raises(InputError, match="is a int, not a"):
            method("theirs")

    def test_what_an_explanation_must_say(self) -> None:
        with pytest.raises(InputError, match="say whether it is determined"):
            register("mine", gives="matrix", **{**ABOUT, "determined": ""})(lambda layer: layer)
        with pytest.raises(InputError, match="'sometimes' is no kind of determinedness"):
            register("mine", gives="matrix", **{**ABOUT, "determined": "sometimes"})(lambda layer: layer)


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A table with nothing in it, for one test."""
    monkeypatch.setattr(method_table, "_registered", {})
    monkeypatch.setattr(method_table, "_complete", True)
    return


@pytest.mark.usefixtures("empty")
class TestRegistering:
    def test_a_decorated_function_stays_itself(self) -> None:
        @register("double", question="tokens", needs=("model",), **PLAIN)
        def double(x: int) -> int:
            return 2 * x

        found = method("double")
        assert found.function is double
        assert found(21) == double(21) == 42
        assert found.needs == ("model",)

    def test_sorted_by_question_then_name(self) -> None:
        for name, question in (("b", "mixing"), ("z", "attention"), ("a", "mixing"), ("c", "models")):
            declare(name, "math:sqrt", question=question, **PLAIN)
        assert [m.name for m in methods()] == ["z", "a", "b", "c"]
        assert [m.name for m in methods("mixing")] == ["a", "b"]
        assert methods("tokens") == ()

    def test_declared_functions_are_imported_on_first_use(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "whence_late.py").write_text("class Holder:\n    @staticmethod\n    def f(): return 'here'\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        late = declare("late", "whence_late:Holder.f", question="mixing", **PLAIN)
        assert "whence_late" not in sys.modules
        assert methods()[0].to_dict()["location"] == "whence_late:Holder.f"
        assert "whence_late" not in sys.modules
        assert late() == "here"
        assert late.function is late.function
        del sys.modules["whence_late"]

    def test_frozen(self) -> None:
        made = declare("sqrt", "math:sqrt", question="mixing", **PLAIN)
        with pytest.raises(FrozenInstanceError):
            made.name = "other"  # type: ignore[misc]
        assert hash(made) == hash(method("sqrt"))

    def test_the_same_function_may_be_declared_and_decorated(self) -> None:
        declare("twice", f"{__name__}:twice", question="mixing", **PLAIN)
        register("twice", question="mixing", **PLAIN)(twice)
        assert method("twice").function is twice

    def test_a_name_is_taken_once(self) -> None:
        declare("sqrt", "math:sqrt", question="mixing", **PLAIN)
        with pytest.raises(InputError, match=r"'sqrt' is taken by math:sqrt; math:isqrt"):
            declare("sqrt", "math:isqrt", question="mixing", **PLAIN)

    def test_unknown_names_get_the_nearest(self) -> None:
        for name in ("alti", "hta", "rollout"):
            declare(name, "math:sqrt", question="mixing", **PLAIN)
        assert method(" HTA ").name == "hta"
        with pytest.raises(InputError, match=r"'rolout'; did you mean 'rollout'"):
            method("rolout")
        with pytest.raises(InputError, match=r"'xyzzy'; there are: alti, hta, rollout"):
            method("xyzzy")
        with pytest.raises(InputError, match=r"'mixin'; did you mean 'mixing'"):
            methods("mixin")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"question": "why"}, "'why' is no question"),
            ({"cost": "cheap"}, "'cheap' is no cost"),
            ({"location": "math.sqrt"}, "package.module:object"),
            ({"name": "Upper"}, "lower-case"),
            ({"name": ""}, "lower-case"),
        ],
    )
    def test_bad_declarations(self, change: dict[str, str], message: str) -> None:
        good = {"name": "x", "location": "math:sqrt", "question": "mixing", **PLAIN}
        with pytest.raises(InputError, match=message):
            declare(**{**good, **change})
        assert methods() == ()


def twice(x: float) -> float:
    return 2 * x


def test_every_declared_method_is_there() -> None:
    for declared in methods():
        assert isinstance(declared, Method)
        assert callable(declared.function), declared.location
        assert declared.summary
        assert declared.paper


def test_listing_imports_nothing_heavy() -> None:
    code = "import sys, whence.method_table as r; r.methods(); print('torch' in sys.modules, 'numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


def test_questions() -> None:
    assert list(QUESTIONS) == ["attention", "tokens", "mixing", "faithfulness", "models"]
