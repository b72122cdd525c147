"""What the jobs do: they say how far they are, and stop when told."""

from __future__ import annotations

from typing import Any

import pytest

import whence
from tests.serving.tiny import TEXT, tiny_model
from whence.errors import InputError
from whence.serving import work
from whence.serving.schemas import CertifyRequest, MethodRequest
from whence.serving.shelf import Entry, Shelf


class Told(Exception):
    """To stop."""


@pytest.fixture(scope="module")
def held() -> tuple[Shelf, Entry]:
    model = tiny_model()
    return Shelf([model]), Entry(model.name, whence.trace(model, TEXT), {})


@pytest.mark.parametrize(("method", "least"), [("hidden-token-attribution", 3), ("value-zeroing", 15)])
def test_long_measures_tell_how_far_they_are_and_stop(held: Any, method: str, least: int) -> None:
    heard: list[float] = []
    work.contributions(*held, MethodRequest(method=method), lambda _, share: heard.append(share))
    assert len(heard) >= least
    assert heard == sorted(heard)
    assert heard[-1] == pytest.approx(1.0)

    def stop(_: str, share: float) -> None:
        if share > 0.1:
            raise Told

    with pytest.raises(Told):
        work.contributions(*held, MethodRequest(method=method), stop)


def test_certify_on_demand_proves_as_many_weights_as_are_drawn(held: Any) -> None:
    found = work.certify(*held, CertifyRequest(layer=1, head=1, query=3, top=16), lambda *_: None)
    exact = whence.certify(held[1].trace, 1, 1, 3, top=16)
    assert found["keys"] == exact.keys.tolist()
    assert found["lower"] == pytest.approx(exact.lower.tolist())
    assert found["checked"]


def test_methods_that_are_not_there_are_refused(held: Any) -> None:
    with pytest.raises(InputError, match="method='flow'"):
        work.contributions(*held, MethodRequest(method="flow"), lambda *_: None)
    with pytest.raises(InputError, match="method='nothing'"):
        work.attribution(*held, MethodRequest(method="nothing"), lambda *_: None)


def test_models_are_loaded_as_told_and_long_texts_cut_where_that_was_said() -> None:
    from whence.serving.limits import Limits
    from whence.serving.schemas import TraceRequest
    from whence.serving.shelf import Traces
    from whence.serving.work import make_trace

    asked: list[str] = []

    def load(name: str) -> Any:
        asked.append(name)
        return tiny_model()

    shelf, traces = Shelf(["mine"], load), Traces(1 << 30)
    request = TraceRequest(model="mine", text="the nurse " * 100)
    with pytest.raises(InputError, match=r"200 tokens|202 tokens"):
        make_trace(shelf, traces, "a", request, Limits(tokens=150), lambda *_: None)
    make_trace(shelf, traces, "b", request, Limits(tokens=150, truncate=True), lambda *_: None)
    entry = traces.get("b")
    assert entry is not None
    assert len(entry.trace.tokens) == 128
    assert asked == ["mine"]
