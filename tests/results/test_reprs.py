"""Every result says in a line what it is; arrays go to NumPy and xarray with their labels."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import whence
from whence.errors import MissingExtraError


@pytest.fixture(scope="module")
def trace(minilm: whence.Model) -> whence.Trace:
    return whence.trace(minilm, "The bank raised its rates.")


def test_reprs_are_short_and_hold_no_tensor(trace: whence.Trace, minilm: whence.Model) -> None:
    witness = whence.witness(trace, 5, 3, 2)
    things = [
        trace, trace.tokens, trace[0], trace.of(), whence.effective_attention(trace), whence.identifiability(trace),
        whence.certify(trace, 0, 0, 1), whence.certify_row(trace[0].attention[0, 1], trace[0].values[0]), witness,
        witness.verify(), whence.contributions(trace, "alti"), whence.contributions(trace, "alti").rollout(),
        whence.attribute(minilm, trace), whence.report(trace, budget=0, progress=False), whence.verdict(trace),
        whence.decide(trace, whence.rules.argmax(), layer=0, head=0), whence.layer_statement(trace, 0),
        whence.uniqueness(minilm, search=0), whence.doctor(minilm), whence.local_vs_global(trace), whence.methods()[0],
        whence.doppelganger(trace, budget=0.1),
    ]  # fmt: skip
    for thing in things:
        said = repr(thing)
        assert said.startswith(type(thing).__name__ + "("), said[:80]
        assert len(said) <= 260, said
        assert "\n" not in said
        assert "tensor(" not in said
    assert repr(whence.attribute(minilm, trace)).endswith("of 8 tokens)")
    assert repr(whence.contributions(trace, "alti")) == "Contributions(alti of minilm: 6 layer × 8 hidden × 8 input)"


def test_numpy(trace: whence.Trace) -> None:
    found = whence.effective_attention(trace)
    assert isinstance(found.numpy(), np.ndarray)
    assert np.array_equal(found.numpy(), found.values.numpy())
    half = found.to(torch.bfloat16)  # type: ignore[arg-type]
    assert half.numpy().dtype == np.float32


def test_xarray_gets_values_labels_and_origin(trace: whence.Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """What xarray is given, and what is said where it is not installed."""
    given = SimpleNamespace(DataArray=lambda values, **rest: (values, rest))
    monkeypatch.setitem(sys.modules, "xarray", given)
    found = whence.effective_attention(trace.select(layers=[2, 3]))
    values, rest = found.to_xarray()
    assert values.shape == found.shape
    assert rest["dims"] == ("layer", "head", "query", "key")
    assert rest["coords"]["layer"] == [2, 3]
    assert rest["coords"]["key_token"] == ("key", list(trace.tokens))
    assert rest["attrs"]["model"] == "minilm"
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(MissingExtraError, match="pip install xarray"):
        found.to_xarray()


def test_xarray_itself(trace: whence.Trace) -> None:
    pytest.importorskip("xarray", reason="of the extra dev: pip install -e '.[dev]'")
    found = whence.effective_attention(trace)
    array = found.to_xarray()
    assert array.dims == ("layer", "head", "query", "key")
    assert np.array_equal(array.sel(layer=2, head=3).values, found.values[2, 3].numpy())
    assert array["key_token"].values.tolist() == list(trace.tokens)
