"""The six checks: they hold for a representative dozen and for real weights, and they fail when something is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conformance.sweep import judge
from conformance.zoo import build, find
from tests.versions import older_than_locked
from whence.errors import ModelError
from whence.model.load import load
from whence.reading.capture.attach import FUNCTION_MODE, INTERFACE
from whence.reading.wiring.doctor import doctor
from whence.reading.wiring.proof import prove

READ = {
    "bert": (INTERFACE, "post-norm"),
    "albert": (INTERFACE, "post-norm"),
    "distilbert": (INTERFACE, "post-norm"),
    "gpt2": (INTERFACE, "pre-norm"),
    "llama": (INTERFACE, "pre-norm"),
    "gemma2": (INTERFACE, "sandwich"),
    "gpt_neox": (INTERFACE, "parallel"),
    "gptj": (FUNCTION_MODE, "parallel"),
    "deberta-v2": (FUNCTION_MODE, "post-norm"),
    "bloom": (FUNCTION_MODE, "pre-norm"),
    "xlnet": (FUNCTION_MODE, "post-norm"),
    "gpt_oss": (INTERFACE, "pre-norm"),
    "deepseek_v3": (INTERFACE, "pre-norm"),
    "granite": (INTERFACE, "pre-norm"),
    "t5": (INTERFACE, "pre-norm"),
    "bart": (INTERFACE, "post-norm"),
    "marian": (INTERFACE, "post-norm"),
    "whisper": (INTERFACE, "pre-norm"),
    "vit": (INTERFACE, "pre-norm"),
    "beit": (INTERFACE, "pre-norm"),
    "clip_vision_model": (INTERFACE, "pre-norm"),
    "deit": (INTERFACE, "pre-norm"),
}


@pytest.mark.parametrize("family", READ)
def test_a_representative_family_is_proved_and_rebuilt_on_a_second_input(family):
    way, wiring = READ[family]
    verdict = judge(find(family))
    assert verdict.proof is not None, verdict.reason
    if not older_than_locked("transformers"):  # families moved to the attention interface one after the other
        assert verdict.proof.capture == way
    assert all(verdict.holds.values()), verdict.reason
    assert verdict.kinds == wiring
    assert verdict.rebuilt is not None
    assert verdict.rebuilt < 1e-4


@pytest.mark.parametrize("family", ["mamba", "rwkv", "fnet"])
def test_a_model_without_attention_is_refused_and_told_so(family):
    specimen = build(family)
    with pytest.raises(ModelError, match="no attention"):
        prove(specimen.model, specimen.inputs)


def test_a_gate_before_the_projection_is_named_as_the_reason():
    verdict = judge(find("qwen3_next"))
    assert verdict.holds["a"]
    assert verdict.holds["d"]
    assert not verdict.holds["b"]
    assert "multiplied by something (a gate or a scale)" in verdict.reason


def test_cross_attention_and_the_two_stacks_are_told_apart():
    specimen = build("bart")
    proof = prove(specimen.model, specimen.inputs)
    assert [(s.stack, s.layer) for s in proof.sites] == [
        ("encoder", 0), ("encoder", 1), ("decoder", 0), ("cross", 0), ("decoder", 1), ("cross", 1),
    ]  # fmt: skip
    assert all(s.causal == (s.stack == "decoder") for s in proof.sites)


def test_layers_that_share_one_module_are_numbered_by_their_calls():
    specimen = build("albert")
    proof = prove(specimen.model, specimen.inputs)
    assert [s.layer for s in proof.sites] == list(range(len(proof.sites)))
    assert len({s.module for s in proof.sites}) == 1


def test_grouped_heads_keep_their_groups():
    specimen = build("llama")
    site = prove(specimen.model, specimen.inputs).sites[0]
    assert site.heads > site.groups


def test_real_weights_are_proved(minilm, smollm2):
    for model in (minilm, smollm2):
        report = doctor(model)
        assert report.trusted
        assert all(report.proof.holds.values())
        assert report.proof.error_d < 1e-4


@pytest.mark.parametrize("name", ["stories15M", "stories260K", "bert-tiny-sst2", "rxnmapper-albert"])
def test_real_models_beside_the_project_are_proved(shared_models, name):
    report = doctor(load(shared_models / name))
    assert all(report.proof.holds.values()), report.reasons


def test_a_second_mapping_of_the_head_outputs_breaks_b_and_is_reported():
    """A projection that also reads something else is not Σ heads · W + b: (b) must fail, not be fitted."""
    specimen = build("bert")
    dense = specimen.model.bert.encoder.layer[0].attention.output.dense

    class Skewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = dense.weight, dense.bias

        def forward(self, x):
            return nn.functional.linear(x + 0.1 * x.roll(1, dims=1), self.weight, self.bias)

    specimen.model.bert.encoder.layer[0].attention.output.dense = Skewed()
    proof = prove(specimen.model, specimen.inputs)
    assert not proof.holds["b"]
    assert proof.sites[0].reason_b is not None
    assert proof.sites[1].reason_b is None


def test_a_state_that_is_carried_on_by_nothing_known_breaks_c():
    specimen = build("bert")
    norm = specimen.model.bert.encoder.layer[1].attention.output.LayerNorm

    class Gated(nn.Module):
        def forward(self, x):
            return norm(x) * x.sigmoid()

    specimen.model.bert.encoder.layer[1].attention.output.LayerNorm = Gated()
    proof = prove(specimen.model, specimen.inputs)
    assert proof.sites[0].reason_c is None
    assert proof.sites[1].wiring is None
    assert "sigmoid" in proof.sites[1].reason_c
    assert proof.holds["b"]


def test_a_final_norm_after_a_last_block_of_attention_alone_is_no_post_norm():
    verdict = judge(find("nemotron_h"))
    assert verdict.kinds == "pre-norm"


def test_a_model_that_is_never_twice_the_same_is_refused_with_that_reason():
    specimen = build("bert")
    layer = specimen.model.bert.encoder.layer[0].output

    class Noisy(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args):
            out = self.inner(*args)
            return out + torch.randn_like(out)

    specimen.model.bert.encoder.layer[0].output = Noisy(layer)
    with pytest.raises(ModelError, match="not deterministic"):
        prove(specimen.model, specimen.inputs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(bad):
    specimen = build("bert")
    with torch.no_grad():
        specimen.model.bert.encoder.layer[1].attention.self.key.weight[0, 3] = bad
    with pytest.raises(ModelError, match=r"layer\.1\.attention\.self\.key\.weight.*1 value that is NaN or infinite"):
        prove(specimen.model, specimen.inputs)


def test_half_precision_is_proved_within_its_own_tolerance():
    specimen = build("llama")
    proof = prove(specimen.model.to(torch.bfloat16), specimen.inputs)
    assert all(proof.holds.values())
    assert proof.tolerance > 1e-3


def test_double_precision_is_proved():
    specimen = build("bert")
    proof = prove(specimen.model.to(torch.float64), specimen.inputs)
    assert all(proof.holds.values())
    assert max(s.error_b for s in proof.sites) < 1e-12
