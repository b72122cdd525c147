"""Models as people load and wrap them: read right, or refused with the truth."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conformance.zoo import build
from whence.errors import InputError, ModelError
from whence.mixing.contributions import contributions
from whence.mixing.hidden_token_attribution import hidden_token_attribution
from whence.model.load import Model, load
from whence.model.memory import fingerprint
from whence.reading.rerun.substitution import ZeroValues, substitute
from whence.reading.trace import Trace
from whence.reading.tracing import trace


def alike(found, expected):
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.attention, expected.attention, atol=1e-5, rtol=1e-4)
    ours, theirs = (contributions(t, "alti").values for t in (found, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload", "mixed"])
def test_offloaded_weights(family, way, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    specimen = build(family)
    expected = trace(Model(specimen.model), specimen.inputs)
    model = specimen.model
    if way == "cpu_offload":
        accelerate.cpu_offload(model, execution_device="cpu")
    elif way == "disk_offload":
        accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    else:
        parts = {name: "cpu" for name, _ in model.named_children()}
        parts[next(iter(parts))] = "disk"
        model = accelerate.dispatch_model(model, parts, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    assert any(p.is_meta for p in model.parameters())
    alike(trace(Model(model), specimen.inputs), expected)
    assert any(p.is_meta for p in model.parameters())


def test_compiled_models_are_read_as_the_module_inside():
    specimen = build("bert")
    expected = trace(Model(specimen.model), specimen.inputs)
    compiled = torch.compile(specimen.model, backend="eager")
    alike(trace(compiled, specimen.inputs), expected)
    alike(trace(load(compiled), specimen.inputs), expected)
    specimen.model.compile(backend="eager")
    inside = specimen.model._compiled_call_impl
    alike(trace(specimen.model, specimen.inputs), expected)
    assert specimen.model._compiled_call_impl is inside


def test_gradient_checkpointing_and_training_mode():
    specimen = build("llama")
    expected = trace(Model(specimen.model), specimen.inputs)
    specimen.model.gradient_checkpointing_enable()
    specimen.model.train()
    alike(trace(Model(specimen.model), specimen.inputs), expected)
    assert specimen.model.is_gradient_checkpointing
    assert specimen.model.training


def test_foreign_hooks_are_part_of_the_model():
    specimen = build("llama")
    before = trace(Model(specimen.model), specimen.inputs)
    handle = specimen.model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda _m, _a, out: out * 2)
    hooked = trace(Model(specimen.model), specimen.inputs)
    with torch.no_grad():
        torch.testing.assert_close(hooked.logits, specimen.model(**specimen.inputs).logits[0], atol=1e-4, rtol=1e-4)
    assert torch.allclose(hooked[0].values, before[0].values * 2)
    with pytest.raises(InputError, match="has changed since"):
        substitute(before, ZeroValues(0, [1]))
    handle.remove()
    alike(trace(Model(specimen.model), specimen.inputs), before)


@pytest.mark.parametrize("first", [True, False])
def test_torch_transformer_encoder(first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    states = torch.randn(1, 9, 16)
    found = trace(Model(model), {"src": states})
    assert found.attention.shape == (2, 4, 9, 9)
    with torch.no_grad():
        inner = model.layers[0].norm1(states) if first else states
        _, weights = model.layers[0].self_attn(inner, inner, inner, need_weights=True, average_attn_weights=False)
    torch.testing.assert_close(found[0].attention, weights[0], atol=1e-5, rtol=1e-4)


def test_wavlm_is_read():
    """torch's own attention function, with a gated position bias; every head by hand in float64."""
    transformers = pytest.importorskip("transformers")
    config = transformers.WavLMConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        conv_dim=(16, 16),
        conv_kernel=(10, 3),
        conv_stride=(5, 2),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        num_buckets=20,
    )
    torch.manual_seed(0)
    model = transformers.WavLMModel(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    found = trace(Model(model), {"input_values": torch.randn(1, 400)})
    part = model.encoder.layers[0].attention.double()
    states = found[0].block_input.detach().double()
    n = len(states)
    with torch.no_grad():
        heads = states.view(n, 4, 8).transpose(0, 1)
        gates = torch.sigmoid(part.gru_rel_pos_linear(heads).view(4, n, 2, 4).sum(-1))
        gate = gates[..., 0] * (gates[..., 1] * part.gru_rel_pos_const[0, :, 0] - 1) + 2
        q, k = (p(states).view(n, 4, 8).transpose(0, 1) for p in (part.q_proj, part.k_proj))
        scores = q @ k.mT / 8**0.5 + gate[..., None] * part.compute_bias(n, n)
    torch.testing.assert_close(found[0].attention.double(), scores.softmax(-1), atol=1e-5, rtol=1e-4)
    assert [layer.wiring.kind for layer in found] == ["post-norm"] * 2
    assert found.mixes is None


def test_squeezebert_is_refused_with_the_true_reason():
    """Its projections are convolutions over [batch, channel, position]; attention is read, what needs them is refused."""
    specimen = build("squeezebert")
    found = trace(Model(specimen.model), specimen.inputs)
    assert torch.allclose(found.attention.sum(-1), torch.ones(()), atol=1e-5)
    with pytest.raises(ModelError, match=r"conv1d, whose output .* does not have one row for each position"):
        contributions(found, "alti")


# -- changes after the trace ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("through_data", [False, True])
def test_a_trace_does_not_change_with_the_model(through_data):
    specimen = build("bert")
    found = trace(Model(specimen.model), specimen.inputs)
    before = contributions(found, "alti").values.clone()
    weight = specimen.model.bert.encoder.layer[0].attention.output.dense.weight
    mark = fingerprint(specimen.model)
    with torch.no_grad():
        (weight.data if through_data else weight).mul_(3)
    assert fingerprint(specimen.model) != mark
    assert torch.equal(contributions(found, "alti").values, before)
    with pytest.raises(InputError, match="has changed since"):
        substitute(found, ZeroValues(0, [1]))
    again = trace(Model(specimen.model), specimen.inputs)
    assert not torch.allclose(contributions(again, "alti").values, before, atol=1e-2)


@pytest.mark.parametrize("how", ["class", "forward"])
def test_a_class_put_in_place_of_another_is_noticed(how, monkeypatch):
    """Libraries of kernels swap classes, or the forward of a class, of models that have been read already."""
    specimen = build("llama")
    before = trace(Model(specimen.model), specimen.inputs)
    assert before.mixes is None
    mlp = specimen.model.model.layers[1].mlp
    owner, own = type(mlp), type(mlp).forward

    def mixing(self, x):
        return own(self, x) + 0.1 * own(self, x).roll(1, dims=1)

    if how == "class":
        mlp.__class__ = type("Fast", (owner,), {"forward": mixing})
    else:
        monkeypatch.setattr(owner, "forward", mixing)
    assert "mlp" in trace(Model(specimen.model), specimen.inputs).mixes
    with pytest.raises(InputError, match="has changed since"):
        substitute(before, ZeroValues(0, [1]))


def test_a_change_of_settings_is_noticed():
    specimen = build("bert")
    mark = fingerprint(specimen.model)
    assert fingerprint(specimen.model) == mark
    specimen.model.bert.encoder.layer[0].output.LayerNorm.eps = 0.5
    changed = fingerprint(specimen.model)
    assert changed != mark
    specimen.model.bert.encoder.layer[0].train()
    assert fingerprint(specimen.model) != changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_entry_counts_and_so_does_its_place(dtype):
    """One entry anywhere, two entries that change places, two rows that do: all through .data."""
    specimen = build("bert")
    model = specimen.model.to(dtype)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        mark = fingerprint(model)
        flat = parameter.data.view(-1)
        at = int(torch.randint(flat.numel(), (), generator=generator))
        flat[at] += 0.25
        assert fingerprint(model) != mark, name
        flat[at] -= 0.25
        mark = fingerprint(model)
        other = (at + 1) % flat.numel()
        if flat[at] != flat[other]:
            flat[[at, other]] = flat[[other, at]]
            assert fingerprint(model) != mark, name
        if parameter.dim() == 2 and parameter.shape[0] > 3:
            mark = fingerprint(model)
            parameter.data[[0, 2]] = parameter.data[[2, 0]]
            assert fingerprint(model) != mark, name


def test_adapters_are_part_of_the_fingerprint():
    peft = pytest.importorskip("peft")
    specimen = build("llama")
    config = peft.LoraConfig(target_modules=["q_proj", "o_proj"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(specimen.model, config)
    model.add_adapter("second", config)
    model.eval()
    marks = [fingerprint(model)]
    assert fingerprint(model) == marks[0]
    model.set_adapter("second")
    marks.append(fingerprint(model))
    model.base_model.disable_adapter_layers()
    marks.append(fingerprint(model))
    model.base_model.enable_adapter_layers()
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["second"] *= 2
    marks.append(fingerprint(model))
    model.merge_adapter()
    marks.append(fingerprint(model))
    assert len(set(marks)) == 5
    found = trace(Model(model), specimen.inputs)
    model.unmerge_adapter()
    with pytest.raises(InputError, match="has changed since"):
        substitute(found, ZeroValues(0, [1]))


@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload"])
def test_changes_of_offloaded_weights_are_noticed(way, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = build("bert").model
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if way == "cpu_offload":
        accelerate.cpu_offload(model, execution_device="cpu", state_dict=state)
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    mark = fingerprint(model)
    assert fingerprint(model) == mark
    name = "bert.encoder.layer.0.attention.output.dense.weight"
    if way == "cpu_offload":
        state[name][0, 0] += 1
    else:
        accelerate.utils.offload.offload_weight(state[name] * 2, name, str(tmp_path))
    assert fingerprint(model) != mark


# -- whose weights a saved trace names -----------------------------------------------------------------------------


def test_a_saved_trace_names_the_weights_that_were_traced(tmp_path):
    specimen = build("bert")
    model = Model(specimen.model)
    expected = model.weights_hash
    found = trace(Model(specimen.model), specimen.inputs)
    first = found.save(tmp_path / "first.safetensors")
    specimen.model.bert.encoder.layer[0].attention.output.dense.weight.data[0, 1] += 1
    assert model.weights_hash != expected
    assert Trace.load(first).provenance.weights == expected
    again = found.save(tmp_path / "again.safetensors")  # the hash was taken before the change
    assert Trace.load(again).provenance.weights == expected


def test_a_trace_saved_after_a_change_does_not_claim_the_new_weights(tmp_path):
    specimen = build("bert")
    model = Model(specimen.model)
    found = trace(model, specimen.inputs)
    alti = contributions(found, "alti")
    specimen.model.bert.encoder.layer[0].attention.output.dense.weight.data[0, 1] += 1
    assert alti.provenance.weights_hash is None
    loaded = Trace.load(found.save(tmp_path / "late.safetensors"))
    assert loaded.provenance.weights is None
    assert loaded.provenance.changed
    for one in (found, loaded):
        with pytest.raises(InputError, match="chang"):
            substitute(one, ZeroValues(0, [1]), model=model)


def test_another_model_given_for_a_live_trace_is_refused():
    specimen, other = build("bert"), build("bert", seed=3)
    found = trace(Model(specimen.model), specimen.inputs)
    with pytest.raises(InputError, match="other weights"):
        substitute(found, ZeroValues(0, [1]), model=Model(other.model))


# -- found by trying -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["mlp", "layer"])
def test_a_part_that_was_compiled_is_read_as_the_module_inside(part):
    specimen = build("llama")
    expected = trace(Model(build("llama").model), specimen.inputs)
    layers = specimen.model.model.layers
    if part == "mlp":
        layers[0].mlp = torch.compile(layers[0].mlp, backend="eager")
    else:
        layers[0] = torch.compile(layers[0], backend="eager")
    compiled = layers[0].mlp if part == "mlp" else layers[0]
    forward = compiled.forward
    shares = contributions(trace(Model(specimen.model), specimen.inputs), "alti").values
    assert torch.equal(shares, contributions(expected, "alti").values)
    assert compiled.forward is forward


def test_learned_prefixes_are_refused_and_not_called_another_stream():
    peft = pytest.importorskip("peft")
    specimen = build("llama")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(specimen.model, config).eval()
    with pytest.raises(ModelError, match="sees 3 keys besides those of the tokens themselves") as refusal:
        trace(model, specimen.inputs)
    assert "no attention, or" not in str(refusal.value)


def test_one_embedded_token_does_not_make_a_decoder_an_encoder():
    model = build("llama").model
    vectors = model.get_input_embeddings()(torch.tensor([[7]])).detach()
    assert list(trace(Model(model), {"inputs_embeds": vectors}).stacks) == ["decoder"]


def test_derivatives_in_inference_mode_are_refused_in_words():
    specimen = build("bert")
    with torch.inference_mode():
        traced = trace(Model(specimen.model), specimen.inputs)
        with pytest.raises(InputError, match=r"torch.inference_mode\(\)"):
            hidden_token_attribution(traced, "exact")
