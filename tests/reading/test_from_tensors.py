"""Attention that somebody has already: the same certificates as the trace it came from; bad tensors are named."""

from __future__ import annotations

import pytest
import torch

import whence
from whence.errors import InputError


@pytest.fixture(scope="module")
def trace(minilm: whence.Model, long_text: str) -> whence.Trace:
    return whence.trace(minilm, long_text)


@pytest.fixture(scope="module")
def given(trace: whence.Trace) -> whence.Trace:
    attentions = tuple(layer.attention[None] for layer in trace)
    return whence.from_tensors(attentions, list(trace.tokens.raw), tuple(layer.values[None] for layer in trace))


def test_the_same_certificates_as_the_trace(trace: whence.Trace, given: whence.Trace) -> None:
    for layer, head, query in ((0, 0, 3), (2, 5, 10), (5, 3, 20)):
        ours, theirs = (whence.certify(t, layer, head, query) for t in (given, trace))
        assert ours.dimension == theirs.dimension
        torch.testing.assert_close(ours.lower, theirs.lower, rtol=0, atol=1e-6)
        torch.testing.assert_close(ours.upper, theirs.upper, rtol=0, atol=1e-6)
        assert ours.check()
    one, other = (whence.identifiability(t) for t in (given, trace))
    # The trace has the model's own head outputs, rounded as its fused attention rounds.
    torch.testing.assert_close(one.values, other.values, rtol=0, atol=1e-5)
    assert torch.equal(one.extra["simplex_null_dimension"], other.extra["simplex_null_dimension"])
    assert torch.equal(whence.verdict(given).values.isnan(), whence.verdict(trace).values.isnan())
    assert given.tokens.special == trace.tokens.special


def test_a_causal_mask_is_seen(smollm2: whence.Model) -> None:
    traced = whence.trace(smollm2, "The capital of France is Paris").select(layers=[0, 1])
    attentions = tuple(layer.attention[None] for layer in traced)
    given = whence.from_tensors(attentions, list(traced.tokens), tuple(layer.grouped_values[None] for layer in traced))
    assert given.of().name == "decoder"
    assert torch.equal(given[0].visible, traced[0].visible)
    for query in (1, 4):
        assert whence.certify(given, 1, 0, query).dimension == whence.certify(traced, 1, 0, query).dimension


def test_saved_and_read_again(given: whence.Trace, tmp_path: object) -> None:
    again = whence.Trace.load(given.save(f"{tmp_path}/given.safetensors"))
    assert torch.equal(again.attention, given.attention)


def test_encoder_decoder_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    square, cross = torch.rand(1, 2, 3, 3, generator=generator), torch.rand(1, 2, 2, 3, generator=generator)
    square, cross = square / square.sum(-1, keepdim=True), cross / cross.sum(-1, keepdim=True)
    made = whence.from_tensors(
        encoder_attentions=(square,), encoder_tokens=["a", "b", "c"], cross_attentions=(cross,), decoder_tokens=["x", "y"],
        cross_values=(torch.rand(1, 2, 3, 4, generator=generator),),
    )  # fmt: skip
    assert list(made.stacks) == ["encoder", "cross"]
    assert whence.certify(made, 0, 1, 0, attention="cross").dimension == 0
    with pytest.raises(InputError, match="nothing can be certified"):
        whence.certify(made, 0, 1, 0, attention="encoder")


def test_what_needs_a_model_says_so(given: whence.Trace) -> None:
    with pytest.raises(InputError, match="made of tensors and has no model"):
        whence.witness(given, 5, 3, 2).verify()
    with pytest.raises(whence.errors.WiringError, match="only attention and values were given"):
        whence.contributions(given, "alti")


HALF = torch.full((1, 2, 3, 3), 1 / 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((None, ["a"]), "no attention was given"),
        ((HALF[0, 0], ["a"]), "one tensor for each layer"),
        (((HALF.repeat(2, 1, 1, 1),), ["a", "b", "c"]), "batch of 2"),
        (((HALF,), ["a", "b"]), "3 × 3 positions, and there are 2 × 2 tokens"),
        (((HALF,), "abc"), "tokens must be a list of texts"),
        (((HALF * 0.5,), ["a", "b", "c"]), "sums to 0.5000, not to 1"),
        (((HALF - 1,), ["a", "b", "c"]), "negative attention"),
        (((HALF * torch.nan,), ["a", "b", "c"]), "not finite"),
        (((None,), ["a", "b", "c"]), "attn_implementation='eager'"),
        (((HALF,), ["a", "b", "c"], (HALF, HALF)), "values of 2 layers"),
        (((HALF,), ["a", "b", "c"], (torch.ones(1, 2, 5, 4),)), "values of the shape"),
    ],
)
def test_bad_tensors_are_named(arguments: tuple[object, ...], said: str) -> None:
    with pytest.raises(InputError, match=said):
        whence.from_tensors(*arguments)
