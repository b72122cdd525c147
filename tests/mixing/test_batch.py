"""Several methods and several texts at once give what each gives alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import whence
from whence.mixing import batch
from whence.mixing.alti import closeness
from whence.mixing.decomposition import Decomposition
from whence.mixing.norms import part_norms
from whence.reading.trace import Trace

Zoo = Callable[..., Trace]
METHODS = ["alti", "norms", "globenc", "rollout", "attention"]


def _traces(family: str, lengths: list[int], dtype: torch.dtype = torch.float64) -> list[Trace]:
    from conformance.zoo import build

    model = build(family).model.to(dtype)
    generator = torch.Generator().manual_seed(3)
    found = []
    for n in lengths:
        ids = torch.randint(5, 50, (1, n), generator=generator)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if family in ("bart", "t5"):
            inputs["decoder_input_ids"] = torch.randint(5, 50, (1, max(2, n - 2)), generator=generator)
        trace = whence.trace(model, inputs)
        found.append(trace[0] if isinstance(trace, list) else trace)
    return found


@pytest.mark.parametrize("family", ["bert", "albert", "gpt2", "llama", "gemma2", "gpt_neox", "bart", "t5"])
def test_a_batch_changes_nothing(family: str) -> None:
    traces = _traces(family, [9, 11, 9, 10, 11, 30])
    assert [len(group) for group in batch.groups(traces)] == [5, 1]  # the long one is on its own
    names = ["alti", "norms", "rollout"] if family in ("bart", "t5") else METHODS
    names = [name for name in names if name != "globenc" or family not in ("gpt_neox", "gemma2")]  # refused there
    together = whence.contributions(traces, names)
    for name in names:
        for trace, found in zip(traces, together[name], strict=True):
            alone = whence.contributions(trace, name)
            assert torch.allclose(found.values, alone.values, atol=1e-12, rtol=0), name
            assert found.tokens == alone.tokens
            assert torch.equal(found.extra["degenerate"], alone.extra["degenerate"])
            assert torch.allclose(found.rollout().values, alone.rollout().values, atol=1e-12, rtol=0), name


def test_options_reach_every_text() -> None:
    traces = _traces("bert", [8, 8, 9])
    for options in ({"distance": "l2"}, {"second_norm": True}):
        for trace, found in zip(traces, whence.contributions(traces, "alti", **options), strict=True):
            assert torch.allclose(found.values, whence.contributions(trace, "alti", **options).values, atol=1e-12)
    for trace, found in zip(traces, whence.contributions(traces, "norms", residual=False), strict=True):
        assert torch.allclose(found.values, whence.contributions(trace, "norms", residual=False).values, atol=1e-12)
    assert whence.contributions([], "alti") == []


def test_texts_of_two_models_are_kept_apart() -> None:
    one, other = _traces("bert", [9, 9]), _traces("bert", [9])
    mixed = [one[0], other[0], one[1]]
    assert [1] in batch.groups(mixed)
    for trace, found in zip(mixed, whence.contributions(mixed, "globenc"), strict=True):
        assert torch.allclose(found.values, whence.contributions(trace, "globenc").values, atol=1e-12)


def test_a_batch_larger_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = _traces("llama", [12, 12, 11, 12])
    whole = [found.values for found in whence.contributions(traces, "alti")]
    for size in (1 << 8, 1 << 12, 1 << 14):  # a few keys of one text; one text; two texts
        monkeypatch.setattr("whence.mixing.alti._BLOCK", size)
        for a, b in zip(whole, whence.contributions(traces, "alti"), strict=True):
            assert torch.allclose(a, b.values, atol=1e-12, rtol=0)


def test_the_trace_keeps_what_the_second_norm_reads(zoo: Zoo) -> None:
    for family in ("bert", "albert", "distilbert", "deberta-v2"):
        for layer in zoo(family).of():
            assert layer.second_norm is not None
            made = layer.second_norm(layer.before_second_norm)
            assert torch.allclose(made, layer.block_output, atol=1e-5)
    for family in ("gpt2", "llama", "gemma2"):
        assert zoo(family)[0].second_norm is None
    # Without it the feed-forward layer is run again, to the same result.
    trace = zoo("bert", torch.float64)
    bare = [replace(layer, second_norm=None, _before_second_norm=None) for layer in trace.of()]
    without = replace(trace, stacks={"encoder": replace(trace.of(), layers=tuple(bare))})
    for method, options in (("globenc", {}), ("alti", {"second_norm": True})):
        with_it = whence.contributions(trace, method, **options).values
        assert torch.allclose(with_it, whence.contributions(without, method, **options).values, atol=1e-10, rtol=0)


def test_a_wrong_second_norm_is_refused(zoo: Zoo) -> None:
    trace = zoo("bert")
    wrong = [replace(layer, _before_second_norm=layer.block_input) for layer in trace.of()]
    with pytest.raises(whence.errors.WiringError, match="second norm misses the block's output"):
        whence.contributions(replace(trace, stacks={"encoder": replace(trace.of(), layers=tuple(wrong))}), "globenc")


def test_heads_that_nearly_cancel() -> None:
    generator = torch.Generator().manual_seed(0)
    vector, small = torch.randn(2, 5, 16, generator=generator)
    values = torch.stack([vector, -vector + 1e-3 * small, torch.randn(5, 16, generator=generator)])
    attention = torch.full((3, 5, 5), 0.2)
    attention[2] = 0
    zeros = torch.zeros(5, 16)
    split = Decomposition(attention, values, torch.eye(16).expand(3, -1, -1), None, zeros, zeros, zeros, crossed=True)
    expected = (0.2 * (values[0].double() + values[1].double())).norm(dim=-1)
    found = part_norms(split)[0, :5].double()
    assert torch.allclose(found, expected, rtol=2e-3)  # as good as the vectors' own digits


def test_weights_too_small_for_normal_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    attention = torch.softmax(60 * torch.randn(2, 6, 6, generator=generator), dim=-1)
    assert bool(((attention > 0) & (attention < 1e-38)).any())
    values, weight, state = (torch.randn(*s, generator=generator) for s in ((2, 6, 3), (2, 3, 8), (6, 8)))
    split = Decomposition(attention, values, weight, None, torch.zeros(6, 8), torch.zeros(6, 8), state)
    slow = state.abs().sum(-1)[:, None] - (state[:, None] - split.parts()).abs().sum(-1)
    assert torch.allclose(closeness(split), slow, atol=1e-5)
