"""Adapters: a linear one is part of the matrix that it adapts, so every measure equals the merged model's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import whence
from conformance.zoo import build
from whence.errors import WiringError
from whence.model.load import Model
from whence.reading.wiring.proof import prove

peft = pytest.importorskip("peft")

EVERY = {
    "bert": ["query", "key", "value", "dense"],
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
}
KINDS = {
    "lora": lambda targets: peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False),
    "dora": lambda targets: peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, use_dora=True),
    "ia3": lambda targets: peft.IA3Config(
        target_modules=targets, feedforward_modules=[t for t in targets if t in ("o_proj", "down_proj", "dense")],
        init_ia3_weights=False,
    ),
}  # fmt: skip


def measures(model, inputs):
    trace = whence.trace(model, inputs)
    found = {name: whence.contributions(trace, name) for name in ("alti", "norms", "rollout", "value-zeroing")}
    numbers = {name: mixed.values for name, mixed in found.items()}
    numbers["alti rolled out"] = found["alti"].rollout().values
    numbers["decompx"] = whence.contributions(trace, "decompx").values
    numbers["attribution"] = whence.hidden_token_attribution(trace, mode="exact").values
    numbers["null share"] = whence.identifiability(trace).values
    return numbers


def both(family, adapted):
    inputs = build(family).inputs
    merged = copy.deepcopy(adapted).merge_and_unload()
    return measures(Model(adapted.eval(), name="adapted"), inputs), measures(
        Model(merged.eval(), name="merged"), inputs
    )


def same(one, other):
    for name, values in one.items():
        assert float((values - other[name]).nan_to_num().abs().max()) < 1e-4, name


@pytest.mark.parametrize(("family", "kind"), [("bert", "lora"), ("llama", "lora"), ("llama", "dora"), ("gpt2", "lora")])
def test_a_linear_adapter_is_read_as_the_merged_model(family, kind):
    torch.manual_seed(0)
    adapted = peft.get_peft_model(build(family).model, KINDS[kind](EVERY[family]))
    proof = prove(adapted.eval(), build(family).inputs)
    assert all(proof.holds.values()), [site.reason_b or site.reason_c for site in proof.sites]
    assert {site.wiring.kind for site in proof.sites} == {"post-norm" if family == "bert" else "pre-norm"}
    same(*both(family, adapted))


@pytest.mark.parametrize(
    "targets", [["k_proj"], ["v_proj", "o_proj"], ["lm_head", "down_proj"], ["embed_tokens", "q_proj"]]
)
def test_an_adapted_decoder_keeps_no_cache(targets):
    """PEFT's forward does not name use_cache, and a cache would stand between the values and their linear map."""
    torch.manual_seed(0)
    model = build("llama").model
    model.config.use_cache = True
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=targets == ["embed_tokens", "q_proj"])
    adapted = peft.get_peft_model(model, config)
    for name, weight in adapted.named_parameters():
        if "lora" in name:
            weight.data.add_(0.1 * torch.randn_like(weight))
    same(*both("llama", adapted))


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", ["k_proj", "v_proj", "o_proj", "down_proj"]),
        ("llama", ["v_proj", "down_proj"]),
        ("bert", ["key", "value"]),
    ],
)
def test_learned_factors_are_part_of_the_projections(family, targets):
    torch.manual_seed(0)
    adapted = peft.get_peft_model(build(family).model, KINDS["ia3"](targets))
    for name, parameter in adapted.named_parameters():
        if "ia3" in name:
            parameter.data.uniform_(0.5, 1.5)
    assert all(prove(adapted.eval(), build(family).inputs).holds.values())
    same(*both(family, adapted))


def test_several_adapters_at_once_are_one_matrix():
    torch.manual_seed(0)
    adapted = peft.get_peft_model(build("llama").model, KINDS["lora"](["o_proj", "v_proj"]), adapter_name="a")
    adapted.add_adapter("b", KINDS["lora"](["o_proj"]))
    adapted.base_model.set_adapter(["a", "b"])
    proof = prove(adapted.eval(), build("llama").inputs)
    assert all(proof.holds.values())
    module = adapted.base_model.model.model.layers[0].self_attn.o_proj
    expected = module.base_layer.weight + sum(module.get_delta_weight(name) for name in ("a", "b"))
    torch.testing.assert_close(
        proof.sites[0].projection.weight.flatten(0, 1).T, expected.detach(), atol=1e-6, rtol=1e-5
    )


def test_adapters_of_experts_and_routers_are_read():
    """PEFT puts these on the weights for the time of a pass, which is a write only by torch's count of versions."""
    torch.manual_seed(0)
    specimen = build("mixtral")
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(specimen.model, config).eval()
    before = {name: weight.detach().clone() for name, weight in adapted.named_parameters()}
    merged = copy.deepcopy(adapted).merge_and_unload().eval()
    one, two = (whence.trace(Model(m, name="experts"), specimen.inputs) for m in (adapted, merged))
    for name in ("alti", "value-zeroing"):
        ours, theirs = (whence.contributions(found, name).values for found in (one, two))
        assert float((ours - theirs).abs().max()) < 1e-4
    assert all(torch.equal(weight, before[name]) for name, weight in adapted.named_parameters())


class Bottleneck(nn.Module):
    """x + up(relu(down(x))): a nonlinear adapter."""

    def __init__(self, width):
        super().__init__()
        self.down, self.up = nn.Linear(width, 4), nn.Linear(4, width)

    def forward(self, x):
        return x + self.up(self.down(x).relu())


def test_a_bottleneck_after_the_projection_is_refused_with_the_reason():
    """It was once taken for a parallel branch, with the token's own part defined as the rest."""
    torch.manual_seed(0)
    specimen = build("llama")
    attention = specimen.model.model.layers[0].self_attn
    attention.o_proj = nn.Sequential(attention.o_proj, Bottleneck(attention.o_proj.out_features))
    proof = prove(specimen.model, specimen.inputs)
    assert proof.sites[0].wiring is None
    assert "changed by something that reads it" in proof.sites[0].reason_c
    assert proof.sites[1].reason_c is None
    trace = whence.trace(Model(specimen.model, name="adapted"), specimen.inputs)
    with pytest.raises(WiringError, match="changed by something that reads it"):
        whence.contributions(trace, "alti")


def test_a_bottleneck_beside_the_projection_is_refused_with_the_reason():
    torch.manual_seed(0)
    specimen = build("llama")
    attention = specimen.model.model.layers[0].self_attn
    projection = attention.o_proj

    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.projection, self.inside = projection, nn.Linear(projection.in_features, 4)
            self.outside = nn.Linear(4, projection.out_features)

        def forward(self, x):
            return self.projection(x) + self.outside(self.inside(x).relu())

    attention.o_proj = Beside()
    proof = prove(specimen.model, specimen.inputs)
    assert proof.sites[0].projection is None
    assert "not linear (an adapter)" in proof.sites[0].reason_b
    trace = whence.trace(Model(specimen.model, name="adapted"), specimen.inputs)
    with pytest.raises(WiringError, match="not linear"):
        whence.contributions(trace, "norms")


def test_two_projections_side_by_side_are_one_matrix_and_one_after_the_other_is_refused():
    torch.manual_seed(0)
    specimen = build("llama")
    first, second = (layer.self_attn for layer in specimen.model.model.layers[:2])
    width, size = first.o_proj.out_features, first.o_proj.in_features

    class Twice(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.other = inner, nn.Linear(size, width)

        def forward(self, x):
            return self.inner(x) + self.other(x)

    inner = first.o_proj
    first.o_proj = Twice(inner)
    second.o_proj = nn.Sequential(second.o_proj, nn.Linear(width, width))
    proof = prove(specimen.model, specimen.inputs)
    expected = (inner.weight + first.o_proj.other.weight).detach()
    torch.testing.assert_close(proof.sites[0].projection.weight.flatten(0, 1).T, expected)
    assert proof.sites[0].wiring.kind == "pre-norm"
    assert "linear" in proof.sites[1].reason_c
