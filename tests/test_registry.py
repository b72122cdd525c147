"""The method registry: declared once, imported late, found or refused with the nearest names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from whence import method_table as registry
from whence.errors import InputError
from whence.method_table import QUESTIONS, Method, declare, method, methods, register

ABOUT = {"paper": "Nobody 2020", "cost": "trace", "summary": "gives a number"}


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registry with nothing in it, for one test."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_complete", True)
    return


@pytest.mark.usefixtures("empty")
class TestRegistering:
    def test_a_decorated_function_stays_itself(self) -> None:
        @register("double", question="tokens", needs=("model",), **ABOUT)
        def double(x: int) -> int:
            return 2 * x

        found = method("double")
        assert found.function is double
        assert found(21) == double(21) == 42
        assert found.needs == ("model",)

    def test_sorted_by_question_then_name(self) -> None:
        for name, question in (("b", "mixing"), ("z", "attention"), ("a", "mixing"), ("c", "models")):
            declare(name, "math:sqrt", question=question, **ABOUT)
        assert [m.name for m in methods()] == ["z", "a", "b", "c"]
        assert [m.name for m in methods("mixing")] == ["a", "b"]
        assert methods("tokens") == ()

    def test_declared_functions_are_imported_on_first_use(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "whence_late.py").write_text("class Holder:\n    @staticmethod\n    def f(): return 'here'\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        late = declare("late", "whence_late:Holder.f", question="mixing", **ABOUT)
        assert "whence_late" not in sys.modules
        assert methods()[0].to_dict()["location"] == "whence_late:Holder.f"
        assert "whence_late" not in sys.modules
        assert late() == "here"
        assert late.function is late.function
        del sys.modules["whence_late"]

    def test_frozen(self) -> None:
        made = declare("sqrt", "math:sqrt", question="mixing", **ABOUT)
        with pytest.raises(FrozenInstanceError):
            made.name = "other"  # type: ignore[misc]
        assert hash(made) == hash(method("sqrt"))

    def test_the_same_function_may_be_declared_and_decorated(self) -> None:
        declare("twice", f"{__name__}:twice", question="mixing", **ABOUT)
        register("twice", question="mixing", **ABOUT)(twice)
        assert method("twice").function is twice

    def test_a_name_is_taken_once(self) -> None:
        declare("sqrt", "math:sqrt", question="mixing", **ABOUT)
        with pytest.raises(InputError, match=r"'sqrt' is taken by math:sqrt; math:isqrt"):
            declare("sqrt", "math:isqrt", question="mixing", **ABOUT)

    def test_unknown_names_get_the_nearest(self) -> None:
        for name in ("alti", "hta", "rollout"):
            declare(name, "math:sqrt", question="mixing", **ABOUT)
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
        good = {"name": "x", "location": "math:sqrt", "question": "mixing", **ABOUT}
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
