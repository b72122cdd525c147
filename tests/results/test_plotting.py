"""`.plot()` on results of every shape: Axes come back, with the result's own numbers and labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import whence
from whence.errors import InputError
from whence.mixing.attribution import Attribution
from whence.mixing.contributions import Contributions
from whence.mixing.span_attribution import SpanAttribution

pytest.importorskip("matplotlib", reason="plots come with the extra 'plot'")


@pytest.fixture(scope="module")
def trace(minilm_path: Any) -> Any:
    return whence.trace(whence.load(), "The bank raised its rates because inflation would not fall.")


def picture(axes: Any) -> torch.Tensor:
    return torch.as_tensor(axes.images[0].get_array().data)


def test_matrix_of_one_head_and_the_mean_over_heads(trace: Any) -> None:
    found = whence.effective_attention(trace)
    assert picture(found.plot(layer=2, head=3)).tolist() == found.values[2, 3].double().tolist()
    mean = found.plot(layer=2)
    assert torch.allclose(picture(mean), found.values[2].double().mean(0))
    assert [t.get_text() for t in mean.get_xticklabels()] == list(trace.tokens)
    assert "mean over heads" in mean.get_title()
    with pytest.raises(InputError, match="head 99"):
        found.plot(head=99)


def test_layers_by_heads(trace: Any) -> None:
    found = whence.identifiability(trace)
    assert torch.allclose(picture(found.plot()), found.values.mean(-1))


def test_mixture_and_attribution(trace: Any) -> None:
    mixed = whence.contributions(trace).rollout()
    assert torch.allclose(picture(mixed.plot()), mixed.values[-1].double())
    scores = whence.attribute(trace.model, trace, "alti")
    bars = scores.plot().patches
    assert [b.get_width() for b in bars] == pytest.approx(scores.values.tolist())


def test_given_axes_are_used_and_negative_values_get_two_colours(trace: Any) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    found = whence.effective_attention(trace)
    assert found.plot(ax=axes) is axes
    image = axes.images[0]
    assert image.norm.vmin == -image.norm.vmax or float(found.values[-1].mean(0).min()) >= 0


LONG = (
    "The old doctor told the nurse that she would not leave the ward before the storm was over, because the roads to the "
    "village had been closed since noon and nobody knew when they would open again."
)


@pytest.fixture(scope="module")
def long_trace(minilm_path: Any) -> Any:
    return whence.trace(whence.load(), LONG)


def test_certificates_show_weights_and_both_ends(long_trace: Any) -> None:
    row = whence.certify(long_trace, 3, 2, 5)
    axes = row.plot()
    assert [b.get_width() for b in axes.patches] == pytest.approx(row.weights.tolist())
    (whiskers,) = axes.collections
    ends = [(s[0][0], s[1][0]) for s in whiskers.get_segments()]
    assert [a for a, _ in ends] == pytest.approx(row.lower.tolist(), abs=1e-9)
    assert [b for _, b in ends] == pytest.approx(row.upper.tolist(), abs=1e-9)
    assert axes.get_yticklabels()[0].get_text() == f"{long_trace.tokens[int(row.keys[0])]} {int(row.keys[0])}"
    plain = whence.certify_row(long_trace[3].attention[2, 5], long_trace[3].values[2]).plot()
    assert plain.get_yticklabels()[0].get_text() == str(int(row.keys[0]))


def test_whole_head_is_a_map_of_widths(long_trace: Any) -> None:
    from whence.attention.certify import certify_whole_head

    head = certify_whole_head(long_trace, 1, 5, rows=2)
    assert torch.allclose(picture(head.plot()), head.upper - head.lower)


def test_witness_and_its_verification(long_trace: Any) -> None:
    found = whence.witness(long_trace, 1, 5, 20)
    widths = [b.get_width() for b in found.plot().patches]
    half = len(widths) // 2
    assert max(widths[:half]) == pytest.approx(float(found.row.max()))
    assert max(widths[half:]) == pytest.approx(float(found.alternative.max()))
    checked = found.verify()
    axes = checked.plot()
    assert axes.get_xscale() == "log"
    assert axes.patches[0].get_width() == pytest.approx(checked.head_output)
    assert axes.patches[len(axes.patches) // 2].get_width() == pytest.approx(checked.control_head_output)


def test_statement_overview_and_the_doppelganger(long_trace: Any) -> None:
    from whence.attention.overview import overview

    said = whence.layer_statement(long_trace, 2)
    assert [b.get_width() for b in said.plot().patches] == [
        said.joint.null_dimension,
        said.joint.generic_null_dimension,
    ]
    seen = overview(long_trace, worst=0, best=0)
    assert torch.allclose(picture(seen.plot()), seen.width)
    other = whence.doppelganger(long_trace, rounds=1)
    assert picture(other.plot(layer=1, head=5)).tolist() == other.values[1, 5].tolist()


def test_every_result_of_a_public_function_can_be_plotted() -> None:
    """What a public function returns, when it is a measure, has `.plot`; the rest are models, texts and files."""
    import importlib
    import inspect
    import re

    others = {
        "Model",
        "Trace",
        "Texts",
        "Substituted",
        "Converted",
        "ConvertedDecoder",
        "Trained",
        "Method",
        "Tensor",
        "Report",
        "Diagnosis",
        "Stream",
        "Iterator",
        "Any",
        "list",
        "dict",
    }
    behind_any = (Contributions, Attribution, SpanAttribution)  # what contributions and attribute return
    missing = [kind.__name__ for kind in behind_any if not hasattr(kind, "plot")]
    for name in whence._PUBLIC:
        function = getattr(whence, name)
        if not inspect.isfunction(function):
            continue
        module = importlib.import_module(function.__module__)
        for kind in re.findall(r"\b[A-Z]\w+", str(inspect.signature(function).return_annotation)):
            found = getattr(module, kind, None) or getattr(
                importlib.import_module("whence.attention.align"), kind, None
            )
            if kind not in others and not hasattr(found, "plot"):
                missing.append(f"{name} -> {kind}")
    assert missing == []


def test_bars_of_a_table() -> None:
    scores = {"mine": [[0.9, 0.1, 0.2], [0.3, 0.8, 0.1]], "other": [[0.1, 0.9, 0.2], [0.3, 0.2, 0.1]]}
    found = whence.plausibility(scores, [[1, 0, 0], [0, 1, 0]])
    axes = found.plot()
    assert [t.get_text() for t in axes.get_yticklabels()] == ["mine", "other", "chance"]
    widths = [b.get_width() for b in axes.patches]
    assert widths[0] == 1.0
    assert widths == pytest.approx(found.table().iloc[:, 1].tolist())
