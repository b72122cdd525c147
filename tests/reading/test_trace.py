"""A trace against the plainest way to get the same numbers: the model's own eager outputs and module outputs."""

from __future__ import annotations

import pytest
import torch

import whence
from conformance.zoo import build
from tests.versions import older_than_locked
from whence.errors import InputError, WiringError
from whence.model.load import Model
from whence.reading.trace import Trace
from whence.reading.tracing import trace
from whence.results.tensor_file import load_tensors, save_tensors

FAMILIES = ["bert", "gpt2", "llama", "gemma2", "t5", "bart", "deberta-v2", "gptj", "gpt_oss"]


def plain(specimen):
    """Attentions and hidden states as transformers itself gives them, under eager attention."""
    model = specimen.model
    if model.config._attn_implementation != "eager":
        model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(**specimen.inputs, output_attentions=True, output_hidden_states=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_what_the_model_itself_reports(family):
    specimen = build(family)
    theirs = plain(specimen)
    found = trace(Model(specimen.model), specimen.inputs)
    if len(found.stacks) > 1:
        expected = {
            "encoder": theirs.encoder_attentions,
            "decoder": theirs.decoder_attentions,
            "cross": theirs.cross_attentions,
        }
    else:
        expected = {next(iter(found.stacks)): theirs.attentions}
    for name, attentions in expected.items():
        stack = found.of(name)
        assert len(stack) == len(attentions)
        for layer, attention in zip(stack, attentions, strict=True):
            torch.testing.assert_close(layer.attention, attention[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "gptj", "deberta-v2", "gemma2"])
def test_hidden_states_are_the_models_own(family):
    specimen = build(family)
    theirs = plain(specimen).hidden_states
    states = trace(Model(specimen.model), specimen.inputs).states
    assert len(states) == len(theirs)
    for ours, expected in list(zip(states, theirs, strict=True))[:-1]:  # the last of theirs may be after the final norm
        torch.testing.assert_close(ours, expected[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["bert", "llama", "gemma2", "olmo2", "granite", "bart", "gpt2", "minimax"])
def test_the_parts_of_a_layer_add_up_to_its_state(family):
    """Written straight from the definition, in float64, head by head."""
    specimen = build(family)
    found = trace(Model(specimen.model), specimen.inputs)
    for stack in found.stacks.values():
        for layer in stack:
            attention, values = layer.attention.double(), layer.values.double()
            block = torch.zeros_like(layer.block_input.double())
            for h in range(len(layer.heads)):
                block += attention[h] @ values[h] @ layer.projection.weight[h].double()
            if layer.projection.bias is not None:
                block += layer.projection.bias.double()
            if layer.wiring.branch_norm is not None:
                block = layer.wiring.branch_norm(block)
            for scale, apply in ((layer.wiring.branch_scale, "branch"), (layer.wiring.residual_scale, "residual")):
                if scale is not None:
                    factor = scale.double() if isinstance(scale, torch.Tensor) else scale
                    block, carried = (block * factor, 1.0) if apply == "branch" else (block, factor)
                    if apply == "residual":
                        break
            else:
                carried = 1.0
            state = layer.block_input.double() * carried + block
            if layer.wiring.norm is not None:
                centred = state - state.mean(-1, keepdim=True) if layer.wiring.norm.centred else state
                scale = (centred.square().mean(-1, keepdim=True) + layer.wiring.norm.eps).sqrt()
                state = centred / scale * layer.wiring.norm.gain.double()
                if layer.wiring.norm.bias is not None:
                    state = state + layer.wiring.norm.bias.double()
            torch.testing.assert_close(layer.after_attention.double(), state, atol=1e-5, rtol=1e-4)


def test_sinks_make_rows_sum_to_less_than_one():
    specimen = build("gpt_oss")
    rows = trace(Model(specimen.model), specimen.inputs).attention.sum(-1)
    assert (rows < 1).all()


def test_keys_and_queries_reproduce_the_attention_where_that_is_claimed():
    # T5 came to the attention interface, which hands over keys and queries, only after the lowest transformers.
    for family in ("bert", "llama") if older_than_locked("transformers") else ("bert", "llama", "t5"):
        specimen = build(family)
        for layer in trace(Model(specimen.model), specimen.inputs).of():
            assert layer.keys_proved
            scores = layer.queries.double() @ layer.keys.double().mT * layer.scale
            if layer.bias is not None:
                scores = scores + layer.bias.double()
            scores = scores.masked_fill(~layer.visible_mask, -torch.inf)
            torch.testing.assert_close(scores.softmax(-1), layer.attention.double(), atol=1e-5, rtol=1e-4)


def test_a_soft_cap_is_not_passed_off_as_plain_keys():
    specimen = build("gemma2")
    assert not any(layer.keys_proved for layer in trace(Model(specimen.model), specimen.inputs))


def test_a_sliding_window_is_visible_in_the_mask():
    specimen = build("mistral")
    layers = list(trace(Model(specimen.model), specimen.inputs))
    window = [layer for layer in layers if int(layer.visible_mask[-1].sum()) < layer.attention.shape[-1]]
    assert window
    for layer in layers:
        assert bool((layer.attention[:, ~layer.visible_mask] == 0).all())


TEXTS = [
    "Short.",
    "A much longer text is here, to be traced with some care and padded by others.",
    "A medium one here.",
]


@pytest.mark.parametrize("fixture", ["minilm", "smollm2"])
def test_a_batch_is_the_same_as_one_by_one(fixture, request):
    model = request.getfixturevalue(fixture)
    together = trace(model, TEXTS)
    for text, found in zip(TEXTS, together, strict=True):
        alone = trace(model, text)
        assert found.tokens == alone.tokens
        torch.testing.assert_close(found.attention, alone.attention, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found.states, alone.states, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(found.final_states, alone.final_states, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "bart", "deberta-v2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_is_removed(family, side):
    specimen = build(family)
    ids = specimen.inputs["input_ids"]
    short = ids[:, :5]
    pad = torch.full((1, ids.shape[1] - 5), int(specimen.model.config.pad_token_id or 0))
    padded = torch.cat([pad, short] if side == "left" else [short, pad], dim=1)
    mask = torch.cat([pad * 0, torch.ones_like(short)] if side == "left" else [torch.ones_like(short), pad * 0], dim=1)
    rest = {k: v for k, v in specimen.inputs.items() if k.startswith("decoder_")}
    batch = {"input_ids": torch.cat([ids, padded]), "attention_mask": torch.cat([torch.ones_like(ids), mask])}
    batch |= {k: v.repeat(2, 1) for k, v in rest.items()}
    model = Model(specimen.model)
    both = trace(model, batch)
    if side == "left":  # the model counts positions from the padding on, and so does the trace
        with torch.no_grad():
            plain = specimen.model(**batch).logits
        for found, expected, rows in zip(both, plain, batch["attention_mask"].bool(), strict=True):
            shown = expected if rest else expected[rows]
            torch.testing.assert_close(found.logits, shown, atol=1e-4, rtol=1e-4)
            assert found.attention.shape[-1] == int(rows.sum())
        return
    alone = [trace(model, {"input_ids": ids, **rest}), trace(model, {"input_ids": short, **rest})]
    for found, expected in zip(both, alone, strict=True):
        for name, stack in found.stacks.items():
            assert stack.attention.shape == expected.of(name).attention.shape
            torch.testing.assert_close(stack.attention, expected.of(name).attention, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(
                stack.states, expected.of(name).states, atol=1e-4, rtol=1e-3
            ) if name != "cross" else None


@pytest.mark.parametrize("family", ["bert", "llama", "bart"])
def test_a_saved_trace_comes_back_whole_and_without_its_model(family, tmp_path):
    specimen = build(family)
    found = trace(Model(specimen.model, name=family), specimen.inputs)
    path = found.save(tmp_path / "x.safetensors")
    again = Trace.load(path)
    for name, stack in found.stacks.items():
        other = again.of(name)
        assert other.tokens == stack.tokens
        for a, b in zip(stack, other, strict=True):
            for field in ("attention", "values", "keys", "queries", "outputs", "block_input", "after_attention"):
                assert torch.equal(getattr(a, field), getattr(b, field)), field
            assert torch.equal(a.projected, b.projected)
            assert (a.wiring.kind, a.causal, a.scale, a.heads) == (b.wiring.kind, b.causal, b.scale, b.heads)
            assert torch.equal(a.before_norm, b.before_norm)
            assert torch.equal(a.wiring.finish(a.before_norm), b.wiring.finish(b.before_norm))
    assert again.model is None
    saved, ours = again.provenance.to_dict(), found.provenance.to_dict()
    assert saved == ours
    assert saved["weights"] is not None
    with pytest.raises(InputError, match="has none: give it with model="):
        whence.substitute(again, [])
    again_run = whence.substitute(again, [], model=Model(specimen.model))
    torch.testing.assert_close(again_run.final_states, found.final_states)


def test_a_trace_refuses_a_model_with_other_weights(tmp_path):
    specimen, other = build("bert"), build("bert", seed=1)
    path = trace(Model(specimen.model), specimen.inputs).save(tmp_path / "x.safetensors")
    with pytest.raises(InputError, match="has other weights"):
        whence.substitute(Trace.load(path), [], model=Model(other.model))


def test_keep_holds_only_what_is_asked_and_says_what_is_missing():
    specimen = build("bert")
    found = trace(Model(specimen.model), specimen.inputs, keep=("attention", "values"))
    assert found[0].attention.shape[-1] == 12
    assert torch.allclose(found[0].outputs, found[0].attention @ found[0].values, atol=1e-6)
    for name in ("queries", "keys"):
        with pytest.raises(InputError, match=f"keep including '{name}'"):
            getattr(found[0], name)
    with pytest.raises(InputError, match="keep including 'states'"):
        found[0].block_input  # noqa: B018
    with pytest.raises(InputError, match=r"keep=\['wrong'\]"):
        trace(Model(specimen.model), specimen.inputs, keep=["wrong"])


def test_selecting_layers_and_heads_keeps_the_models_numbers():
    specimen = build("llama")
    found = trace(Model(specimen.model), specimen.inputs)
    part = found.select(layers=[1], heads=[3, 0])
    assert part[1].heads == (3, 0)
    for i, h in enumerate((3, 0)):
        for name in ("attention", "values", "keys", "queries", "outputs"):
            assert torch.equal(getattr(part[1], name)[i], getattr(found[1], name)[h]), name
        assert torch.equal(part[1].projection.weight[i], found[1].projection.weight[h])
    with pytest.raises(InputError, match="no layer 0 in the decoder; it has layers 1"):
        part[0]
    with pytest.raises(InputError, match="no head 9"):
        found.select(heads=[9])


def test_moving_a_trace_moves_every_tensor():
    specimen = build("bert")
    found = trace(Model(specimen.model), specimen.inputs).to(torch.float64)
    layer = found[0]
    tensors = [layer.attention, layer.values, layer.block_input, layer.projection.weight, layer.wiring.norm.weight]
    assert {t.dtype for t in tensors} == {torch.float64}


def test_a_wiring_that_was_not_proved_is_refused_with_its_reason():
    specimen = build("qwen3_next")
    layer = trace(Model(specimen.model), specimen.inputs)[0]
    assert layer.attention is not None
    with pytest.raises(WiringError, match="gate or a scale"):
        layer.projection  # noqa: B018
    with pytest.raises(WiringError):
        layer.block_input  # noqa: B018


def test_encoder_decoder_states_and_stacks():
    specimen = build("bart")
    found = trace(Model(specimen.model), specimen.inputs)
    assert set(found.stacks) == {"encoder", "decoder", "cross"}
    cross = found.of("cross")
    assert cross.attention.shape[-2:] == (7, 11)
    assert len(cross.tokens) == 7
    assert len(cross.key_tokens) == 11
    with pytest.raises(InputError, match="attention='both' is not in this trace; it has: encoder, decoder, cross"):
        found.of("both")


def test_an_encoder_decoder_without_a_target_reads_what_it_writes_itself():
    specimen = build("bart")
    found = trace(Model(specimen.model), {"input_ids": specimen.inputs["input_ids"]})
    written = specimen.model.generate(specimen.inputs["input_ids"], do_sample=False, num_beams=1, max_new_tokens=32)
    assert found.inputs["decoder_input_ids"].tolist() == written.tolist()


def test_images_have_patches_for_tokens():
    specimen = build("vit")
    tokens = trace(Model(specimen.model), specimen.inputs).tokens
    assert tokens[0] == "[CLS]"
    assert tokens[1] == "patch 0,0"


@pytest.mark.parametrize("family", ["vit", "bert", "llama", "bart"])
def test_states_alone_are_the_same_states(family):
    specimen = build(family)
    whole = trace(Model(specimen.model), specimen.inputs)
    part = trace(Model(specimen.model), specimen.inputs, keep=("states",))
    for name in whole.stacks.keys() - {"cross"}:
        assert torch.equal(part.of(name).states, whole.of(name).states)
        assert part.of(name).tokens == whole.of(name).tokens


def test_a_model_in_half_precision_traces():
    specimen = build("llama")
    found = trace(Model(specimen.model.to(torch.bfloat16)), specimen.inputs)
    assert found.attention.dtype == torch.bfloat16


def test_a_classifier_gives_its_logits(shared_models):
    model = whence.load(shared_models / "bert-tiny-sst2")
    good, bad = trace(model, ["A wonderful, moving film.", "A dull and stupid film."])
    assert good.logits.shape == (2,)
    assert good.logits.argmax() == 1
    assert bad.logits.argmax() == 0


def test_states_of_a_model_that_counts_tokens_first() -> None:
    """XLNet has its states as (token, sequence, d): as many sequences as tokens must not turn them round."""
    model = whence.Model(build("xlnet").model)
    ids = torch.randint(5, 60, (4, 4), generator=torch.Generator().manual_seed(0))
    together = whence.trace(model, {"input_ids": ids})
    assert isinstance(together, list)
    for row, one in enumerate(together):
        alone = whence.trace(model, {"input_ids": ids[row : row + 1]})
        alone = alone if isinstance(alone, Trace) else alone[0]
        for ours, theirs in zip(one.of(), alone.of(), strict=True):
            assert torch.allclose(ours.block_input, theirs.block_input, atol=1e-5)
            assert torch.allclose(ours.after_attention, theirs.after_attention, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "gemma2", "granite"])
def test_a_trace_saved_before_layers_had_a_wiring_object_is_read(family, tmp_path):
    specimen = build(family)
    found = trace(Model(specimen.model, name=family), specimen.inputs)
    tensors, header = load_tensors(found.save(tmp_path / "new.safetensors"), "trace")
    for name, stack in header["stacks"].items():
        for layer in stack["layers"]:
            wiring, at = layer["wiring"], f"{name}.{layer['index']}"
            layer["wiring"] = wiring["kind"]
            for part in ("norm", "branch_norm", "branch_scale", "residual_scale"):
                layer[part] = wiring[part]
                for key in [k for k in tensors if k.startswith(f"{at}.wiring.{part}")]:
                    tensors[key.replace(".wiring.", ".")] = tensors.pop(key)
                if isinstance(layer[part], dict) and "tensor" in layer[part]:
                    layer[part] = {"tensor": f"{at}.{part}"}
            for part in ("norm", "branch_norm", "second_norm"):
                if layer[part] is not None:
                    kept = {key: layer[part][key] for key in ("eps", "centred", "offset")}
                    layer[part] = {"norm": f"{at}.{part}", **kept}
            layer["_projection"] = {"projection": f"{at}._projection"}
    about = {**{key: value for key, value in header.items() if key != "tensors"}, "format": 2}
    again = Trace.load(save_tensors(tmp_path / "old.safetensors", "trace", tensors, about))
    for ours, theirs in zip(again.of(), found.of(), strict=True):
        assert ours.wiring.kind == theirs.wiring.kind
        torch.testing.assert_close(ours.wiring.finish(ours.before_norm), theirs.after_attention, atol=1e-5, rtol=1e-4)


def test_a_trace_whose_layers_differ_in_length_is_saved_and_read(tmp_path):
    """A model that pools its tokens on the way has no tokens that fit every layer."""
    specimen = build("canine")
    found = trace(Model(specimen.model, name="canine"), specimen.inputs)
    assert len({layer.shape for layer in found.of()}) > 1
    again = Trace.load(found.save(tmp_path / "t"))
    for ours, theirs in zip(again.of(), found.of(), strict=True):
        assert torch.equal(ours.attention, theirs.attention)


def test_next_token_logits_are_kept_only_where_they_are_asked_for():
    specimen = build("llama")
    model = Model(specimen.model)
    whole, part = trace(model, specimen.inputs), trace(model, specimen.inputs, keep=("attention", "values", "states"))
    asked = trace(model, specimen.inputs, keep=("states", "logits"))
    assert part.logits is None
    assert torch.equal(part.final_states, whole.final_states)
    assert torch.allclose(asked.logits, whole.logits, atol=1e-5)
    for method in ("alti-logit", "input-x-gradient"):
        with pytest.raises(InputError, match="keep including 'logits'"):
            whence.attribute(model, part, method)
