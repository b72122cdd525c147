"""bertviz's views: what is drawn solid is proved, what came without values says so, and bad parameters are named."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import numpy as np
import pytest
import torch

import whence
import whence.bertviz as views
from whence.core.attention.certificate import certify_row
from whence.errors import InputError
from whence.reporting.lines import certain_part


@pytest.fixture(scope="module")
def trace(minilm: whence.Model, long_text: str) -> whence.Trace:
    return whence.trace(minilm, long_text)


def _data(page: str) -> Any:
    return json.loads(re.search(r'id="lines-data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]


def test_the_certain_part_is_below_every_exact_interval(trace: whence.Trace) -> None:
    """certify_row solves the linear programs; the closed-form part must never claim more than they prove."""
    some = trace[4].select([1, 7])
    part = certain_part(some)
    for head in range(2):
        for query in (0, 9, 25):
            exact = certify_row(some.attention[head, query], some.values[head], top=4)
            assert bool((part[head, query, exact.keys] <= exact.lower + 1e-9).all())
    assert bool((part <= some.attention + 1e-12).all())
    unique = whence.trace(trace.model, "The bank raised its rates.")[2]
    torch.testing.assert_close(certain_part(unique), unique.attention.double(), rtol=0, atol=1e-6)


def test_a_trace_fades_and_bare_attention_says_why_not(trace: whence.Trace) -> None:
    attentions = tuple(layer.attention[None] for layer in trace)
    drawn = _data(views.head_view(trace, html_action="return", layer=5, heads=[2]).data)
    assert (drawn["certified"], drawn["layer"], drawn["heads"]) == (True, 5, [2])
    stack = drawn["stacks"]["encoder"]
    weights, certain = (
        np.frombuffer(base64.b64decode(stack[name][5]), np.uint8).reshape(12, len(trace.tokens), -1)
        for name in ("weights", "certain")
    )
    assert np.abs(weights / 255 - trace[5].attention.numpy()).max() < 1 / 255
    assert (certain <= weights).all()
    assert (certain < weights).any()  # longer than a head is wide: something is uncertain
    bare = _data(views.model_view(attentions, list(trace.tokens.raw), html_action="return").data)
    assert bare["stacks"]["encoder"]["certain"] is None
    assert bare["note"].startswith("Nothing can be certified")
    assert bare["stacks"]["encoder"]["tokens"][2] == trace.tokens[2].lower()


def test_a_report_without_values_shows_maps_only(trace: whence.Trace, tmp_path: Any) -> None:
    attentions, values = (tuple(getattr(layer, n)[None] for layer in trace) for n in ("attention", "values"))
    bare = whence.report(attentions, list(trace.tokens.raw))
    assert bare.findings[0].startswith("Nothing can be certified")
    assert "Nothing can be certified" in bare.save(tmp_path / "maps.html").read_text()
    short = whence.trace(trace.model, "It rained.")
    made = whence.report(
        tuple(la.attention[None] for la in short), list(short.tokens.raw), tuple(la.values for la in short)
    )
    assert any("unique" in sentence or "only" in sentence for sentence in made.findings)
    assert len(values) == 6
    assert whence.report(trace.model, "It rained.", budget=0, progress=False).text == "It rained."
    for arguments, said in (((trace, ["a"]), "tokens and values already"), ((7,), "not a int alone")):
        with pytest.raises(InputError, match=said):
            whence.report(*arguments)


def test_same_parameters_and_bad_ones_named(trace: whence.Trace) -> None:
    attentions, tokens = tuple(layer.attention[None] for layer in trace), list(trace.tokens.raw)
    found = views.head_view(attentions, tokens, 5, False, 1, [0], include_layers=[1, 2], html_action="return")
    data = _data(found.data)
    assert (data["split"], data["stacks"]["encoder"]["layers"]) == (5, [1, 2])
    assert "iframe" in found._repr_html_()
    for options, said in (
        ({"sentence_b_start": 900}, "sentence_b_start=900"),
        ({"layer": 17}, "no layer 17"),
        ({"html_action": "print"}, "html_action='print'"),
    ):
        with pytest.raises(InputError, match=said):
            views.head_view(attentions, tokens, **{"html_action": "return", **options})
    with pytest.raises(InputError, match="display_mode"):
        views.model_view(attentions, tokens, display_mode="purple", html_action="return")


def test_hostile_tokens_cannot_leave_the_data() -> None:
    attention = torch.full((1, 1, 2, 2), 0.5)
    page = views.head_view((attention,), ["</script><script>alert(1)", "<b>"], html_action="return").data
    assert "alert(1)" in page
    assert page.count("</script>") == 2
