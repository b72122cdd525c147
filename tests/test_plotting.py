"""`.plot()` on results of every shape: Axes come back, with the result's own numbers and labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import whence
from whence.errors import InputError

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
