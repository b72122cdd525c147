"""Parts add up to the model's own states, and ALTI, norms and GlobEnc are what their papers say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import whence
from tests.mixing.mixing_oracle import alti as slow_alti
from tests.mixing.mixing_oracle import head_expanded
from whence.errors import InputError, WiringError
from whence.mixing.alti import alti, closeness, normalise_rows
from whence.mixing.decomposition import Decomposition, decompose
from whence.mixing.norms import part_norms
from whence.reading.trace import Trace

Zoo = Callable[..., Trace]
FAMILIES = [
    "bert", "roberta", "distilbert", "albert", "electra", "deberta-v2", "mpnet", "gpt2", "opt", "bloom", "llama", "mistral",
    "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "cohere", "gpt_neox", "gptj", "falcon", "phi",
    "xlnet",
]  # fmt: skip
EXACT = ["bert", "albert", "gpt2", "opt", "gpt_neox", "gptj", "xlnet"]  # families that stay in float64 all the way


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_add_up_to_the_models_state(zoo: Zoo, family: str) -> None:
    for layer in zoo(family).of():
        split = decompose(layer)
        whole = split.parts().sum(1) + split.bias
        scale = layer.after_attention.abs().max()
        assert (whole - layer.after_attention).abs().max() <= 1e-4 * scale


@pytest.mark.parametrize("family", [*EXACT, "llama", "gemma2", "qwen3", "olmo2"])
def test_equal_to_the_head_expanded_formula(zoo: Zoo, family: str) -> None:
    for layer in zoo(family, torch.float64).of():
        parts, bias, y = head_expanded(layer)
        split = decompose(layer)
        assert torch.allclose(split.parts(), parts, atol=1e-10, rtol=0)
        assert torch.allclose(split.bias, bias, atol=1e-10, rtol=0)
        for distance, order in (("l1", 1), ("l2", 2)):
            ours, _ = alti(split, distance)
            assert torch.allclose(ours, slow_alti(parts, y, order), atol=1e-10, rtol=0)
        assert torch.allclose(part_norms(split), parts.norm(dim=-1), atol=1e-10, rtol=0)


def test_float32_at_full_length(minilm: whence.Model) -> None:
    ids = torch.randint(1000, 20000, (1, 512), generator=torch.Generator().manual_seed(0))
    trace = whence.trace(minilm, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    trace = trace if isinstance(trace, Trace) else trace[0]
    layer = trace[2]
    wide = trace.select(layers=[2]).to(torch.float64)[2]
    exact = decompose(wide)
    rows = torch.tensor([0, 100, 511])
    few = replace(
        exact, attention=exact.attention[:, rows], scale=exact.scale[rows], own=exact.own[rows], bias=exact.bias[rows]
    )
    crossed = replace(few, state=exact.state[rows], crossed=True)
    slow = crossed.parts()
    slow[torch.arange(3), rows] += slow[:, -1]
    expected = slow_alti(slow[:, :-1], crossed.state)
    assert torch.allclose(alti(decompose(layer))[0][rows].double(), expected, atol=1e-4, rtol=0)


def random_split(seed: int, n: int, heads: int, width: int, crossed: bool = False) -> Decomposition:
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    attention = torch.softmax(make(heads, n, n), dim=-1)
    split = Decomposition(
        attention,
        make(heads, n, 3),
        make(heads, 3, width),
        make(n, 1).exp(),
        make(n, width),
        make(n, width),
        make(n, width),
        crossed=crossed,
    )
    return replace(split, state=split.parts().sum(1) + split.bias)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 5), st.integers(1, 12), st.booleans())
def test_any_split(seed: int, n: int, heads: int, width: int, crossed: bool) -> None:
    split = random_split(seed, n, heads, width, crossed)
    parts = split.parts()
    slow = torch.stack([(y.abs().sum() - (y - t).abs().sum(-1)) for y, t in zip(split.state, parts, strict=True)])
    assert torch.allclose(closeness(split), slow, atol=1e-9)
    assert torch.allclose(part_norms(split), parts.norm(dim=-1), atol=1e-10)
    rows, _ = alti(split)
    assert torch.allclose(rows.sum(-1), torch.ones(n, dtype=torch.float64))
    assert bool((rows >= 0).all())


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 8))
def test_a_permutation_of_the_keys_permutes_the_columns(seed: int, n: int) -> None:
    split = random_split(seed, n, 3, 7, crossed=True)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    shuffled = replace(split, attention=split.attention[:, :, order], values=split.values[:, order])
    assert torch.allclose(alti(shuffled)[0][:, :-1], alti(split)[0][:, :-1][:, order])
    assert torch.allclose(part_norms(shuffled)[:, :-1], part_norms(split)[:, :-1][:, order])


def test_degenerate_rows_become_their_own_token() -> None:
    scores = torch.tensor([[0.0, 0.0, 0.0], [1.0, 3.0, 0.0], [0.0, 0.0, 0.0]])
    rows, empty = normalise_rows(scores)
    assert empty.tolist() == [True, False, True]
    assert rows.tolist() == [[1, 0, 0], [0.25, 0.75, 0], [0, 0, 1]]
    rows, _ = normalise_rows(scores, crossed=True)
    assert rows[0].tolist() == [0, 0, 1]


def test_heads_that_give_nothing(zoo: Zoo) -> None:
    split = random_split(3, 5, 4, 6)
    empty = replace(split, values=split.values * torch.tensor([0.0, 1, 0, 1], dtype=torch.float64)[:, None, None])
    assert torch.allclose(part_norms(empty), empty.parts().norm(dim=-1), atol=1e-7)
    nothing = replace(split, values=torch.zeros_like(split.values), own=torch.zeros_like(split.own))
    rows, degenerate = alti(replace(nothing, state=split.bias))
    assert bool(degenerate.all())
    assert torch.equal(rows, torch.eye(5, dtype=torch.float64))


def test_causal_zeros_are_exact(zoo: Zoo) -> None:
    for method in ("alti", "norms", "globenc", "value-zeroing", "decompx", "rollout", "effective-rollout", "flow"):
        values = whence.contributions(zoo("llama"), method).rollout().values
        assert bool((values.triu(1) == 0).all()), method


def test_unproved_wiring_is_refused_with_the_reason(zoo: Zoo) -> None:
    layer = replace(zoo("bert")[0], wiring=None, reason="a gate on the head outputs")
    with pytest.raises(WiringError, match="a gate on the head outputs"):
        decompose(layer)


def test_selected_heads_are_not_the_whole_state(zoo: Zoo) -> None:
    with pytest.raises(WiringError, match="use the whole trace"):
        whence.contributions(zoo("bert").select(heads=[0]), "alti")


@pytest.mark.parametrize("method", ["value-zeroing", "decompx", "hidden token attribution", "gradient-rollout"])
def test_what_runs_whole_layers_refuses_selected_heads(zoo: Zoo, method: str) -> None:
    """Every head's part would be in the numbers, under the name of one."""
    one = zoo("bert").select(heads=[1])

    def run() -> Any:
        if method == "hidden token attribution":
            return whence.hidden_token_attribution(one)
        if method == "gradient-rollout":
            return whence.attribute(one.model, one, method, position=2)
        return whence.contributions(one, method)

    with pytest.raises(InputError, match=f"{method} is of all 4 heads of a layer together, and this trace holds 1 of"):
        run()


def test_wrong_options_say_what_there_is(zoo: Zoo) -> None:
    trace = zoo("bert")
    with pytest.raises(InputError, match="No method is called 'alty'; did you mean 'alti'"):
        whence.contributions(trace, "alty")
    with pytest.raises(InputError, match="has no option 'distnace'; it takes attention, distance"):
        whence.contributions(trace, "alti", distnace="l2")
    with pytest.raises(InputError, match="'l3' is not 'l1' or 'l2'"):
        whence.contributions(trace, "alti", distance="l3")
    with pytest.raises(InputError, match="not a str"):
        whence.contributions("text")  # type: ignore[call-overload]
