"""The zoo builds: a representative dozen here; `python -m conformance` builds it all."""

import pytest
import torch

from conformance.families import SEQ2SEQ, families, variants
from conformance.inputs import SOURCE_LENGTH, TARGET_LENGTH, TEXT_LENGTH
from conformance.shrink import kept_layers, layer_count
from conformance.zoo import CannotBuild, build, find

DOZEN = [
    "bert",  # post-norm encoder
    "albert",  # shared layers, factorised embedding
    "deberta-v2",  # disentangled attention, not on the attention interface
    "gpt2",  # pre-norm decoder, fused Conv1D projections
    "gpt_neox",  # parallel residual
    "gemma2",  # sandwich norms, sliding window, zero-centred gains
    "gpt_oss",  # attention sinks
    "deepseek_v3",  # latent attention, keys wider than values
    "jamba",  # attention between state-space layers
    "mamba",  # no attention at all
    "t5",  # encoder-decoder with relative biases
    "whisper",  # speech in, text out
    "vit",  # pixels in
]


@pytest.fixture(scope="module")
def specimens():
    return {name: build(name) for name in DOZEN}


@pytest.mark.parametrize("name", DOZEN)
def test_runs_finite_and_in_eval_mode_in_float32(specimens, name):
    specimen = specimens[name]
    assert torch.isfinite(specimen.run()).all()
    assert not specimen.model.training
    assert all(p.dtype == torch.float32 for p in specimen.model.parameters())


@pytest.mark.parametrize("name", DOZEN)
def test_the_same_seed_gives_the_same_specimen_and_another_seed_another(specimens, name):
    again, other = build(name), build(name, seed=1)
    assert torch.equal(specimens[name].run(), again.run())
    assert not torch.equal(specimens[name].run(), other.run())


@pytest.mark.parametrize("name", DOZEN)
def test_no_parameter_sits_at_a_symmetric_value(specimens, name):
    for label, parameter in specimens[name].model.named_parameters():
        assert torch.isfinite(parameter).all(), label
        assert not (parameter == 0).all(), label
        assert not (parameter == 1).all(), label
        assert parameter.numel() == 1 or parameter.std() > 0, label


def test_building_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    build("bert")
    assert torch.equal(before, torch.get_rng_state())


def test_inputs_have_the_promised_lengths(specimens):
    assert specimens["bert"].inputs["input_ids"].shape == (1, TEXT_LENGTH)
    assert specimens["t5"].inputs["input_ids"].shape == (1, SOURCE_LENGTH)
    assert specimens["t5"].inputs["decoder_input_ids"].shape == (1, TARGET_LENGTH)
    assert set(specimens["whisper"].inputs) == {"input_features", "decoder_input_ids"}
    assert set(specimens["vit"].inputs) == {"pixel_values"}


def test_shrinking_keeps_what_the_family_is_known_for(specimens):
    window = specimens["gemma2"].model.config
    assert set(window.layer_types) == {"sliding_attention", "full_attention"}
    assert window.sliding_window < TEXT_LENGTH
    latent = specimens["deepseek_v3"].model.config
    assert latent.qk_nope_head_dim + latent.qk_rope_head_dim != latent.v_head_dim


def test_every_family_is_listed_once_with_a_head_or_a_reason():
    names = [family.name for family in families()]
    assert len(names) == len(set(names))
    assert sum(family.skip is None for family in families()) >= 170
    assert find("bart").head == SEQ2SEQ
    assert "bart:causal" in {family.name for family in variants()}


def test_a_skipped_family_says_why():
    with pytest.raises(CannotBuild, match="listed as gemma3_text"):
        build("gemma3")


def test_an_unknown_family_is_named_in_the_error():
    with pytest.raises(KeyError, match="brt"):
        find("brt")


def test_kept_layers_show_each_combination_once():
    lists = {"attention": list("ssfssf"), "mlp": list("dmmmmm")}
    assert kept_layers(lists, 6) == [0, 1, 2]
    assert kept_layers({"attention": list("aaaa")}, 4) == [0, 1]


def test_layer_count_reads_the_usual_names():
    assert layer_count(build("gpt2").model.config) == 2
