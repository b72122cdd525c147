from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tokens.conftest import sentences
from whence.errors import InputError, MissingExtraError
from whence.tokens.breakdown import BY, groups_of
from whence.tokens.result import TokenIdentifiability
from whence.tokens.token_identifiability import token_identifiability
from whence.tokens.training import Training


@pytest.fixture(scope="module")
def result(tiny: Any) -> TokenIdentifiability:
    texts = [text + " ." for text in sentences(40)]
    return token_identifiability(
        tiny("bert"), texts, maps=("naive", "ridge"), training=Training(epochs=2), bootstrap=50
    )


def test_save_and_load(result: TokenIdentifiability, tmp_path: Path) -> None:
    back = TokenIdentifiability.load(result.save(tmp_path / "rates.safetensors"))
    assert torch.equal(back.values.nan_to_num(), result.values.nan_to_num())
    assert back.extra.keys() == result.extra.keys()
    assert back.to_frame().equals(result.to_frame())
    assert back.remarks() == result.remarks()
    assert back.provenance.to_dict() == result.provenance.to_dict()
    assert back.breakdown("kind").equals(result.breakdown("kind"))


def test_frame_and_dict(result: TokenIdentifiability) -> None:
    frame = result.to_frame()
    assert list(frame.columns) == [*result.axes, "value", "low", "high", "chance", "diverged"]
    assert len(frame) == 3 * 2 * 2 * 3  # parts, maps, distances, layers
    assert ((frame["low"] <= frame["value"]) & (frame["value"] <= frame["high"])).all()
    json.dumps(result.to_dict())
    assert "minutes" not in result._repr_html_()
    assert "tiny-bert" in result._repr_html_()


def test_select(result: TokenIdentifiability) -> None:
    some = result.select(layer=[2, 0])
    assert some.layers == (2, 0)
    assert torch.equal(some.rate("ridge"), result.rate("ridge")[[2, 0]])
    assert torch.equal(some.transfer("ridge"), result.transfer("ridge")[[2, 0]][:, [2, 0]])
    assert len(some.to_frame()) == 3 * 2 * 2 * 2
    with pytest.raises(InputError, match="not of heads"):
        result.select(head=0)
    with pytest.raises(InputError, match="breakdown"):
        result.words()
    with pytest.raises(InputError, match="'mlp' was not measured; this result has 'naive', 'ridge'"):
        result.rate("mlp")


@pytest.mark.parametrize("by", BY)
def test_breakdowns_add_up(result: TokenIdentifiability, by: str) -> None:
    frame = result.breakdown(by)
    assert set(frame[by]) == set(groups_of(result, by))
    for (name, distance, layer), lines in frame.groupby(["map", "distance", "layer"]):
        assert lines["tokens"].sum() == result.report["test"]
        overall = (lines["tokens"] * lines["rate"]).sum() / lines["tokens"].sum()
        assert overall == pytest.approx(result.rate(name, distance)[result.layers.index(layer)].item())
        chance = (lines["tokens"] * lines["chance"]).sum() / lines["tokens"].sum()
        assert chance == pytest.approx(result.chance)


def test_groups(result: TokenIdentifiability) -> None:
    assert set(groups_of(result, "kind")) == {"[CLS]", "[SEP]", "punctuation", "rest"}
    assert set(groups_of(result, "piece")) == {"special", "whole word"}
    places = result.extra["position"].tolist()
    assert all(
        (group == "0") == (place == 0) for group, place in zip(groups_of(result, "position"), places, strict=True)
    )
    with pytest.raises(InputError, match="'colour' is no breakdown"):
        result.breakdown("colour")


def test_pieces_of_words() -> None:
    from dataclasses import replace

    from whence.results.labels import Tokens
    from whence.results.provenance import Provenance

    text = ("[CLS]", "un", "##able", "man", "[SEP]")
    tokens = Tokens(text * 2, text * 2, None, None, (None, 0, 0, 1, None) * 2, (True, False, False, False, True) * 2)
    made = TokenIdentifiability(
        torch.zeros(1, 1, 1, 1, 1), ("target", "part", "map", "distance", "layer"), tokens, Provenance("m", "x"),
        extra={"sentence": torch.arange(10) // 5},
    )  # fmt: skip
    expected = ["special", "first piece", "later piece", "whole word", "special"]
    assert groups_of(made, "piece") == expected * 2
    unknown = replace(made, tokens=replace(tokens, words=None))
    assert groups_of(unknown, "piece")[1:4] == ["unknown"] * 3


def test_plots(result: TokenIdentifiability, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    axes = result.plot()
    labels = [line.get_label() for line in axes.lines]
    assert "ridge, cosine" in labels
    assert any(str(label).startswith("chance") for label in labels)
    shown = next(line for line in axes.lines if line.get_label() == "ridge, cosine")
    assert torch.equal(torch.as_tensor(shown.get_ydata()), result.rate("ridge"))
    axes.figure.savefig(tmp_path / "rates.png")
    assert result.plot(ax=axes, part="direction") is axes
    with pytest.raises(InputError, match="over all layers"):
        result.plot(layer=1)
    image = result.plot_transfer("ridge").images[0].get_array()
    assert torch.allclose(torch.as_tensor(image), result.transfer("ridge"))


def test_without_matplotlib(result: TokenIdentifiability, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match="matplotlib: pip install"):
        result.plot()
