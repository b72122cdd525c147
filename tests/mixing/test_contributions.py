"""Every method through one function: shapes, rows, rollout, padding, batches, files, encoder–decoders."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import networkx
import pytest
import torch

import whence
from tests.mixing.mixing_oracle import head_expanded
from whence.errors import InputError, WiringError
from whence.mixing.contributions import Contributions
from whence.mixing.decomposition import decompose
from whence.mixing.flow import maximum_flows
from whence.mixing.rollout import rollout
from whence.reading.rerun.substitution import ZeroValues
from whence.reading.trace import Layer, Trace
from whence.reading.wiring.block_tail import read_blocks
from whence.reading.wiring.proof import proof_of

Zoo = Callable[..., Trace]
TEXTS = ["The bank raised its rates.", "Nobody complained, because inflation was still high in the spring.", "Why?"]
SHARES = ["attention", "effective", "rollout", "effective-rollout", "flow", "norms", "alti", "value-zeroing", "decompx"]


@pytest.mark.parametrize("method", SHARES)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_rows_sum_to_one(zoo: Zoo, family: str, method: str) -> None:
    mixed = whence.contributions(zoo(family), method)
    whole = mixed.rollout()
    n = len(mixed.tokens)
    assert mixed.shape == (2, n, n)
    assert whole.origin == "embeddings"
    for values in (mixed.values, whole.values):
        assert torch.allclose(values.sum(-1), torch.ones(2, n), atol=2e-5)


@pytest.mark.parametrize("method", ["alti", "norms", "globenc", "rollout", "value-zeroing", "decompx"])
def test_padding_batching_and_order_change_nothing(minilm: whence.Model, method: str) -> None:
    alone = [whence.contributions(whence.trace(minilm, text), method).values for text in TEXTS]
    together = whence.contributions(whence.trace(minilm, TEXTS), method)
    backwards = whence.contributions(whence.trace(minilm, TEXTS[::-1]), method)[::-1]
    for one, two, three in zip(alone, together, backwards, strict=True):
        scale = float(one.abs().max())
        assert torch.allclose(one, two.values, atol=1e-4 * scale)
        assert torch.allclose(one, three.values, atol=1e-4 * scale)


def test_half_precision_is_close(zoo: Zoo) -> None:
    from conformance.zoo import build

    specimen = build("bert")
    fine = whence.contributions(zoo("bert"), "alti").values
    specimen.model.to(torch.bfloat16)
    coarse = whence.trace(specimen.model, dict(specimen.inputs))
    coarse = coarse if isinstance(coarse, Trace) else coarse[0]
    assert (whence.contributions(coarse, "alti").values - fine).abs().max() < 0.1


def test_rollout_is_the_product(zoo: Zoo) -> None:
    mixed = whence.contributions(zoo("bert"), "alti")
    assert torch.allclose(mixed.rollout().values[1], mixed.values[1] @ mixed.values[0])
    assert mixed.rollout().rollout() is not mixed
    with pytest.raises(InputError, match="every layer from 0"):
        mixed.select(layer=1).rollout()
    with pytest.raises(InputError, match="layer, token, token"):
        rollout(torch.zeros(3, 3))


def test_rollout_counts_the_residual_as_half(zoo: Zoo) -> None:
    trace = zoo("bert")
    expected = 0.5 * trace.attention.mean(1) + 0.5 * torch.eye(len(trace.tokens))
    assert torch.allclose(whence.contributions(trace, "rollout").values, expected)


@pytest.mark.parametrize(("n", "layers", "seed"), [(3, 2, 0), (4, 3, 1), (5, 2, 2)])
def test_flow_equals_networkx(n: int, layers: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    capacities = torch.softmax(3 * torch.randn(layers, n, n, generator=generator, dtype=torch.float64), dim=-1)
    ours = maximum_flows(capacities)
    graph = networkx.DiGraph()
    for layer in range(layers):
        for i in range(n):
            for j in range(n):
                graph.add_edge((layer, j), (layer + 1, i), capacity=float(capacities[layer, i, j]))
    for layer in range(layers):
        for i in range(n):
            for j in range(n):
                expected = networkx.maximum_flow_value(graph, (0, j), (layer + 1, i))
                assert abs(float(ours[layer, i, j]) - expected) < 1e-7


def test_flow_says_what_it_costs_before_it_starts(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whence.mixing.flow.LONG", 0.0)
    with pytest.warns(UserWarning, match="maximum flows, about 0 minutes"):
        whence.contributions(zoo("bert"), "flow", layers=[1])
    monkeypatch.setattr("whence.mixing.flow.LONG", 1e9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whence.contributions(zoo("bert"), "flow", layers=[1])


def test_flow_of_chosen_layers(zoo: Zoo) -> None:
    whole, last = (whence.contributions(zoo("bert"), "flow", **o) for o in ({}, {"layers": [1]}))
    assert last.layers == (1,)
    assert torch.equal(last.values[0], whole.values[1])


def test_norms_without_the_residual(zoo: Zoo) -> None:
    trace = zoo("bert", torch.float64)
    layer = trace[0]
    lengths = torch.einsum("hqk,hkd->qkd", layer.attention, layer.transformed_values).norm(dim=-1)
    ours = whence.contributions(trace, "norms", residual=False).values[0]
    assert torch.allclose(ours, lengths / lengths.sum(-1, keepdim=True), atol=1e-8)


@pytest.mark.parametrize("family", ["bert", "albert", "distilbert", "gpt2", "llama", "gemma2", "phi3", "bart", "t5"])
def test_the_rest_of_the_block_is_rebuilt(zoo: Zoo, family: str) -> None:
    trace = zoo(family)
    stack = trace.of()
    assert trace.model is not None
    proof = proof_of(trace.model.model, dict(trace.inputs))
    for layer in stack:
        rest = read_blocks(trace.model, proof, trace.inputs)[proof.site(stack.name, layer.index).number].feedforward
        assert rest is not None
        error = (rest(layer.after_attention) - layer.block_output).abs().max()
        assert error <= 1e-4 * layer.block_output.abs().max()


def test_globenc_after_the_second_norm(zoo: Zoo) -> None:
    trace = zoo("bert", torch.float64)
    assert trace.model is not None
    proof = proof_of(trace.model.model, dict(trace.inputs))
    mixed = whence.contributions(trace, "globenc")
    for layer in trace.of():
        rest = read_blocks(trace.model, proof, trace.inputs)[proof.site("encoder", layer.index).number].feedforward
        assert rest is not None
        assert rest.wiring.norm is not None
        parts, _, _ = head_expanded(layer)
        sigma = rest.wiring.norm.scale(rest.before_norm(layer.after_attention))
        expected = (rest.wiring.norm.linear(parts) / sigma[:, None]).norm(dim=-1)
        assert torch.allclose(mixed.values[layer.index], expected, atol=1e-8)
    assert torch.allclose(mixed.rollout().values[1], mixed.values[1] @ mixed.values[0])


def test_alti_after_the_second_norm(zoo: Zoo) -> None:
    mixed = whence.contributions(zoo("bert"), "alti", second_norm=True)
    assert torch.allclose(mixed.values.sum(-1), torch.ones(2, len(mixed.tokens)), atol=1e-5)
    assert (mixed.values - whence.contributions(zoo("bert"), "alti").values).abs().max() > 1e-4


def test_no_feedforward_no_globenc(zoo: Zoo) -> None:
    with pytest.raises(WiringError, match="parallel"):
        whence.contributions(zoo("gpt_neox"), "globenc")


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_value_zeroing_takes_the_path_of_the_model(zoo: Zoo, family: str) -> None:
    trace = zoo(family, torch.float64)
    mixed = whence.contributions(trace, "value-zeroing")
    for number in range(2):
        for key in (0, 3):
            changed = whence.substitute(trace, ZeroValues(layer=number, keys=[key]))
            cosine = torch.nn.functional.cosine_similarity(
                changed.trace[number].block_output, trace[number].block_output, dim=-1
            )
            assert torch.allclose(mixed.extra["change"][number, :, key], 1 - cosine, atol=1e-10)
    assert (mixed.values[0] - mixed.values[1]).abs().max() > 1e-3  # every layer has its own path


def test_value_zeroing_in_pieces_is_the_same(zoo: Zoo) -> None:
    whole, pieces = (whence.contributions(zoo("bert"), "value-zeroing", memory=m) for m in ("2GB", "1MB"))
    assert torch.allclose(whole.values, pieces.values, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "gemma2", "t5"])
def test_decompx_adds_up_and_starts_like_the_norms(zoo: Zoo, family: str) -> None:
    options = {"attention": "encoder"} if family == "t5" else {}
    mixed = whence.contributions(zoo(family), "decompx", **options)  # asserts in every layer that its vectors add up
    assert mixed.origin == "embeddings"
    assert bool((mixed.values >= 0).all())


def test_decompx_says_when_it_does_not_fit(minilm: whence.Model) -> None:
    with pytest.raises(InputError, match="more than memory='1MB'"):
        whence.contributions(whence.trace(minilm, TEXTS[1]), "decompx", memory="1MB")


@pytest.mark.parametrize("family", ["bart", "t5", "marian", "whisper"])
@pytest.mark.parametrize("method", ["alti", "norms", "rollout", "effective-rollout"])
def test_source_and_prefix_share_out_every_row(zoo: Zoo, family: str, method: str) -> None:
    trace = zoo(family)
    mixed = whence.contributions(trace, method)
    source = len(trace.of("encoder").tokens)
    assert mixed.source_length == source
    assert len(mixed.key_tokens or ()) == source + len(mixed.tokens)
    for values in (mixed.values, mixed.rollout().values):
        assert torch.allclose(values.sum(-1), torch.ones(values.shape[:2]), atol=1e-5)
        assert bool((values[..., source:].triu(1) == 0).all())  # no target token comes from a later one


def test_alti_plus_by_hand(zoo: Zoo) -> None:
    trace = zoo("bart", torch.float64)
    mixed = whence.contributions(trace, "alti")
    from whence.mixing.alti import alti

    encoder = rollout(torch.stack([alti(decompose(layer))[0] for layer in trace.of("encoder")]))[-1]
    prefix = torch.eye(len(mixed.tokens), dtype=torch.float64)
    source = torch.zeros(len(mixed.tokens), len(encoder), dtype=torch.float64)
    for own, cross in zip(trace.of("decoder"), trace.of("cross"), strict=True):
        inside = alti(decompose(own))[0]
        across = alti(decompose(cross, crossed=True))[0]
        source = across[:, :-1] @ encoder + across[:, -1:] * (inside @ source)
        prefix = across[:, -1:] * (inside @ prefix)
    assert torch.allclose(mixed.rollout().values[-1], torch.cat([source, prefix], dim=1), atol=1e-12)
    encoder_only = whence.contributions(trace, "alti", attention="encoder")
    assert torch.allclose(encoder_only.rollout().values[-1], encoder)
    with pytest.raises(InputError, match="choose attention='encoder' or 'decoder'"):
        whence.contributions(trace, "flow")
    with pytest.raises(InputError, match="roll it out before"):
        mixed.select(layer=[0, 1]).rollout()


def test_saved_and_loaded(zoo: Zoo, tmp_path: Path) -> None:
    mixed = whence.contributions(zoo("bart"), "alti")
    mixed.save(tmp_path / "mixed.safetensors")
    again = Contributions.load(tmp_path / "mixed.safetensors")
    assert torch.equal(again.rollout().values, mixed.rollout().values)
    assert again.method == "alti"
    assert again.key_tokens == mixed.key_tokens


def test_a_trace_from_a_file_needs_its_model_only_where_it_is_run(zoo: Zoo, tmp_path: Path) -> None:
    trace = zoo("bert")
    trace.save(tmp_path / "trace.safetensors")
    alone = Trace.load(tmp_path / "trace.safetensors")
    assert torch.allclose(
        whence.contributions(alone, "alti").values, whence.contributions(trace, "alti").values, atol=1e-6
    )
    # The trace keeps what GlobEnc needs of the feed-forward layer.
    assert torch.allclose(
        whence.contributions(alone, "globenc").values, whence.contributions(trace, "globenc").values, atol=1e-6
    )
    with pytest.raises(InputError, match="give it with model="):
        whence.contributions(alone, "value-zeroing")


def test_attention_and_effective_attention_as_they_are(zoo: Zoo) -> None:
    """A⊥ = A P, P the orthogonal projection on the columns of T = V W, head by head by its pseudo-inverse."""
    trace = zoo("bert", torch.float64)
    assert torch.equal(whence.contributions(trace, "attention").values, trace.attention.mean(1))
    found = whence.contributions(trace, "effective", constraint="output").values
    rolled = whence.contributions(trace, "effective-rollout", constraint="output").values
    for i, layer in enumerate(trace.of()):
        slow = torch.stack([_effective(layer, head) for head in range(len(layer.heads))]).mean(0)
        assert torch.allclose(found[i], slow, atol=1e-9)
        assert torch.allclose(rolled[i], 0.5 * slow + 0.5 * torch.eye(len(slow), dtype=torch.float64), atol=1e-9)


def _effective(layer: Layer, head: int) -> torch.Tensor:
    passed = layer.values[head] @ layer.projection.weight[head]
    return layer.attention[head] @ passed @ torch.linalg.pinv(passed, rtol=1e-9)


def test_effective_of_a_rank_deficient_projection() -> None:
    """What the output projection drops cannot be told from the output: both functions say the same."""
    from conformance.zoo import build

    specimen = build("bert")
    model = specimen.model.to(torch.float64)
    for block in model.base_model.encoder.layer:
        block.attention.output.dense.weight.data[:, ::2] = 0  # every second value dimension of each head is dropped
    trace = whence.trace(model, dict(specimen.inputs))
    trace = trace if isinstance(trace, Trace) else trace[0]
    for constraint in ("output", "simplex"):
        found = whence.contributions(trace, "effective", constraint=constraint).values
        assert torch.allclose(
            found, whence.effective_attention(trace, constraint=constraint).values.mean(1), atol=1e-12
        )
    slow = torch.stack([torch.stack([_effective(la, h) for h in range(len(la.heads))]).mean(0) for la in trace.of()])
    assert torch.allclose(whence.contributions(trace, "effective", constraint="output").values, slow, atol=1e-8)
