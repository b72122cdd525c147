"""Proof by intervention: a model broken in just one way fails just that check, and the reason is the true one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import whence
from conformance.zoo import build
from whence.errors import ModelError, WiringError
from whence.model.load import Model
from whence.reading.wiring.doctor import doctor
from whence.reading.wiring.proof import prove


def tiny_llama(**settings):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, **settings,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def ids(n=12, seed=1):
    return {"input_ids": torch.randint(5, 64, (1, n), generator=torch.Generator().manual_seed(seed))}


def eager_attention_forward(module, query, key, value, attention_mask, scaling=None, **_):
    """An eager function that goes on with something else than weights · values."""
    scores = query @ key.transpose(-1, -2) * scaling
    weights = (scores + attention_mask[..., : key.shape[-2]]).softmax(-1)
    return module.bend(weights @ value).transpose(1, 2), weights


class Attention(nn.Module):
    """A Llama attention without positions, dispatched through transformers' interface."""

    def __init__(self, inner, bend):
        super().__init__()
        self.bend = bend
        self.config, self.inner, self.layer_idx = inner.config, inner, inner.layer_idx
        self.scaling, self.is_causal, self.training = inner.scaling, True, False

    def forward(self, hidden_states, attention_mask=None, **_):
        shape = (*hidden_states.shape[:-1], -1, self.inner.head_dim)
        query, key, value = (
            projection(hidden_states).view(shape).transpose(1, 2)
            for projection in (self.inner.q_proj, self.inner.k_proj, self.inner.v_proj)
        )
        key, value = (t.repeat_interleave(2, dim=1) for t in (key, value))
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = function(self, query, key, value, attention_mask, scaling=self.scaling)
        return self.inner.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights


def test_a_head_output_that_is_not_attention_times_values_fails_a():
    model = tiny_llama(attn_implementation="eager")
    for layer in model.model.layers:
        layer.self_attn = Attention(layer.self_attn, torch.tanh)
    proof = prove(model, ids())
    assert "attention · values misses the head output" in proof.tried[0]  # the interface is refused for it
    assert not proof.holds["b"]  # and the other way in sees what comes between
    assert "they go into: tanh" in proof.sites[0].reason_b


def test_a_factor_on_the_head_outputs_is_part_of_the_projection():
    model = tiny_llama(attn_implementation="eager")
    for layer in model.model.layers:
        layer.self_attn = Attention(layer.self_attn, lambda x: 1.1 * x)
    proof = prove(model, ids())
    assert all(proof.holds.values())
    expected = 1.1 * model.model.layers[0].self_attn.inner.o_proj.weight.detach()
    torch.testing.assert_close(proof.sites[0].projection.weight.flatten(0, 1).T, expected)


def test_a_projection_that_also_reads_its_neighbour_fails_b():
    model = tiny_llama()
    projection = model.model.layers[0].self_attn.o_proj

    class Skewed(nn.Module):
        def forward(self, x):
            return projection(x + 0.1 * x.roll(1, dims=1))

    model.model.layers[0].self_attn.o_proj = Skewed()
    proof = prove(model, ids())
    assert not proof.holds["b"]
    assert proof.sites[0].reason_b is not None
    assert proof.sites[1].reason_b is None


def test_a_state_that_is_bent_after_the_residual_fails_c():
    specimen = build("bert")
    norm = specimen.model.bert.encoder.layer[1].attention.output.LayerNorm

    class Gated(nn.Module):
        def forward(self, x):
            return norm(x) * x.sigmoid()

    specimen.model.bert.encoder.layer[1].attention.output.LayerNorm = Gated()
    proof = prove(specimen.model, specimen.inputs)
    assert proof.holds["b"]
    assert proof.holds["e"]  # the projection is pushed and seen at its own output
    assert not proof.holds["c"]
    assert "sigmoid" in proof.sites[1].reason_c


def test_a_model_that_computes_otherwise_when_it_is_watched_fails_d():
    model = tiny_llama(attn_implementation="sdpa")
    inner = model.model.layers[0].mlp

    class Shy(nn.Module):
        def forward(self, x):
            return inner(x) * (1.2 if torch._C._len_torch_function_stack() else 1.0)

    model.model.layers[0].mlp = Shy()
    with pytest.raises(ModelError, match="outputs with the recorder differ by"):
        prove(model, ids())


class Aside(nn.Module):
    """Something made from the head outputs where no operation of torch shows it."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(width, width))

    def forward(self, x):
        return torch.from_numpy(x.detach().numpy() @ self.weight.detach().numpy())


def test_a_second_path_from_the_head_outputs_that_no_graph_shows_fails_e():
    """The sum adds up, with the second path taken for a parallel branch: only pushing tells."""
    model = tiny_llama()
    projection = model.model.layers[1].self_attn.o_proj

    class Double(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.aside = projection.weight, Aside(32)

        def forward(self, x):
            return nn.functional.linear(x, self.weight) + self.aside(x)

    model.model.layers[1].self_attn.o_proj = Double()
    proof = prove(model, ids())
    assert proof.holds["a"]
    assert proof.holds["d"]
    assert not proof.holds["e"]
    assert proof.sites[0].reason_e is None
    assert "something else also reads them" in proof.sites[1].reason_e
    assert proof.sites[1].projection is None
    traced = whence.trace(Model(model, name="double"), ids())
    assert traced[1].wiring is None
    with pytest.raises(WiringError, match="pushing the head outputs"):
        whence.contributions(traced, "alti")


class Rolling(nn.Module):
    """A feed-forward layer that also reads the token before."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 0.1 * self.inner(x).roll(1, dims=1)


def test_a_feed_forward_layer_that_mixes_tokens_fails_f_and_is_named():
    model = tiny_llama()
    model.model.layers[1].mlp = Rolling(model.model.layers[1].mlp)
    proof = prove(model, ids())
    assert proof.holds == {"a": True, "b": True, "c": True, "d": True, "e": True, "f": False}
    assert "model.layers.1.mlp (Rolling)" in proof.mixes
    assert "layers.0" not in proof.mixes


@pytest.mark.parametrize(
    "family", ["bert", "llama", "gpt2", "mixtral", "gemma2", "gpt_neox", "opt", "t5", "deberta-v2"]
)
def test_nothing_moves_when_attention_is_held(family):
    specimen = build(family)
    proof = prove(specimen.model, specimen.inputs)
    assert proof.error_f == 0.0
    assert all(site.error_e < 1e-5 for site in proof.sites)


MIXED = {
    "jamba": "mamba", "lfm2": "conv", "falcon_h1": "mamba", "bamba": "mamba", "recurrent_gemma": "temporal_block",
    "minimax": "self_attn", "led": "encoder", "longt5": "encoder",
}  # fmt: skip


@pytest.mark.parametrize("family", MIXED)
def test_what_mixes_outside_attention_is_named_and_not_followed(family):
    specimen = build(family)
    model = Model(specimen.model, name=family)
    traced = whence.trace(model, specimen.inputs)
    assert MIXED[family] in traced.mixes
    stack = "decoder" if len(traced.stacks) > 1 else None
    layered = whence.contributions(traced, "alti", attention=stack)  # the attention block's own shares stay
    assert layered.values.shape[-1] == len(traced.of(stack).tokens)
    assert layered.provenance.settings["mixes"] == traced.mixes
    for follow in (
        layered.rollout,
        lambda: whence.contributions(traced, "rollout", attention=stack).rollout(),
        lambda: whence.contributions(traced, "flow", attention=stack),
        lambda: whence.contributions(traced, "decompx", attention=stack),
    ):
        with pytest.raises(WiringError, match="tokens mix outside the attention that was read"):
            follow()
    assert not doctor(model, specimen.inputs).proof.holds["f"]
    whence.identifiability(traced, attention=stack)


def test_a_convolution_beside_deberta_is_seen():
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    torch.manual_seed(0)
    config = DebertaV2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=64,
        conv_kernel_size=3, conv_act="gelu", relative_attention=True, pos_att_type=["c2p", "p2c"],
    )  # fmt: skip
    proof = prove(DebertaV2ForMaskedLM(config).eval(), ids())
    assert "deberta.encoder.conv (ConvLayer)" in proof.mixes


def test_following_is_refused_after_saving_and_loading(tmp_path):
    specimen = build("jamba")
    traced = whence.trace(Model(specimen.model, name="jamba"), specimen.inputs)
    again = type(traced).load(traced.save(tmp_path / "jamba.safetensors"))
    assert again.mixes == traced.mixes
    with pytest.raises(WiringError, match="mamba"):
        whence.contributions(again, "alti").rollout()


def test_a_text_of_one_token_does_not_make_a_decoder_an_encoder():
    model = Model(tiny_llama(), name="tiny")
    assert list(whence.trace(model, ids(1)).stacks) == ["decoder"]
    longer = whence.trace(model, ids(9))
    assert list(longer.stacks) == ["decoder"]
    assert all(layer.causal for layer in longer)


def test_causality_is_read_from_each_text_and_not_from_the_proof():
    """A prefix language model: the mask of the text decides, even after a causal text was traced first."""
    model = Model(tiny_llama(), name="tiny")
    assert all(layer.causal for layer in whence.trace(model, ids(9)))
    everything = torch.zeros(1, 1, 9, 9)
    full = whence.trace(model, {**ids(9), "attention_mask": everything})
    for layer in full if isinstance(full, whence.Trace) else full[0]:
        assert float(layer.attention.triu(1).max()) > 0
        assert not layer.causal


def test_the_side_branch_of_a_parallel_block_is_picked_up_and_not_the_rest():
    specimen = build("gpt_neox")
    traced = whence.trace(Model(specimen.model, name="neox"), specimen.inputs)
    layer = traced[0]
    block = specimen.model.gpt_neox.layers[0]
    side = block.mlp(block.post_attention_layernorm(layer.block_input))
    torch.testing.assert_close(layer._side, side, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(layer.own + layer.branch, layer.after_attention, atol=1e-5, rtol=1e-4)


def test_a_pooled_stream_is_an_encoder_and_no_decoder_with_cross_attention():
    specimen = build("funnel")
    proof = prove(specimen.model, specimen.inputs)
    assert proof.stacks == ("encoder",)
    assert not proof.holds["f"]
    assert "pooled" in proof.mixes


def test_windows_of_an_image_are_not_shown_as_the_whole_image():
    from transformers import SwinConfig, SwinModel

    torch.manual_seed(0)
    config = SwinConfig(image_size=32, patch_size=4, window_size=4, embed_dim=16, depths=[2], num_heads=[2])
    pixels = {"pixel_values": torch.randn(1, 3, 32, 32)}
    with pytest.raises(ModelError, match="4 windows of each input"):
        prove(SwinModel(config).eval(), pixels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_rank_of_a_projection_does_not_hang_on_its_dtype(dtype):
    """A projection as trained ones are, σ_min/σ_max = 1e-4: of full rank, whatever the weights are stored in."""
    from whence.reading.wiring.projection import Projection

    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(2, n, 8, dtype=torch.float64))[0] for n in (8, 32))
    weight = (left * torch.logspace(0, -4, 8, dtype=torch.float64)) @ right.mT
    projection = Projection(weight.to(dtype), None)
    assert projection.full_rank
    assert 1e2 < projection.condition < 1.1e4
    flat = Projection(torch.cat([weight[:, :7], weight[:, :1]], dim=1).to(dtype), None)
    assert not flat.full_rank


class Late(nn.Module):
    """An output projection that adds something of the head outputs beyond 12 tokens, where no proof has looked."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) if x.shape[1] <= 12 else self.inner(1.01 * x)


def test_every_text_is_checked_and_not_the_first_alone():
    model = tiny_llama()
    model.model.layers[1].self_attn.o_proj = Late(model.model.layers[1].self_attn.o_proj)
    loaded = Model(model, name="late")
    whence.trace(loaded, ids(10))
    with pytest.raises(ModelError, match="on this text, decoder layer 1: pre-norm wiring does not give its state"):
        whence.trace(loaded, ids(20))


def hides(seen):
    """The additive 4-D mask of a boolean table [query, key]."""
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


N = 9
CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()
FULL = torch.ones(N, N, dtype=torch.bool)
PREFIX = CAUSAL | (torch.arange(N) < 4)
PACKED = torch.block_diag(torch.ones(N - 1, N - 1), torch.ones(1, 1)).bool()  # the last text is one token


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize(
    ("seen", "name"), [(CAUSAL, "decoder"), (PREFIX, "decoder"), (FULL, "encoder"), (PACKED, "encoder")]
)
def test_a_single_stack_is_named_by_the_mask_of_each_text(family, seen, name):
    """The proof was made on a plain text, and its name for the stack is no fact of this one."""
    specimen = build(family)
    model = Model(specimen.model, name=family)
    given = {"input_ids": specimen.inputs["input_ids"][:, :N]}
    plain = whence.trace(model, given)
    masked = whence.trace(model, {**given, "attention_mask": hides(seen)})
    masked = masked if isinstance(masked, whence.Trace) else masked[0]
    assert list(plain.stacks) == ["encoder" if family == "bert" else "decoder"]
    assert list(masked.stacks) == [masked.of().name] == [name]
    # Whatever runs the model again finds its calls under the name of the text.
    for method in ("alti", "value-zeroing", "decompx"):
        rows = whence.contributions(masked, method).values
        torch.testing.assert_close(rows.sum(-1), torch.ones(rows.shape[:-1]), atol=1e-4, rtol=0)
        assert float(rows[0].masked_fill(seen | torch.eye(N, dtype=torch.bool), 0).abs().max()) < 1e-6


def test_calls_that_change_places_between_texts_are_refused():
    """A model whose blocks run in another order on longer texts: their names and numbers would be another's."""
    model = tiny_llama()
    first, second = model.model.layers

    class Either(nn.Module):
        def __init__(self, short, long):
            super().__init__()
            self.short, self.long = short, long
            self.attention_type = short.attention_type if hasattr(short, "attention_type") else "full_attention"

        def forward(self, x, **options):
            return (self.short if x.shape[1] <= 12 else self.long)(x, **options)

    model.model.layers = nn.ModuleList([Either(first, second), Either(second, first)])
    loaded = Model(model, name="turned")
    whence.trace(loaded, ids(10))
    with pytest.raises(ModelError, match="on this text"):
        whence.trace(loaded, ids(20))


def tiny_t5():
    from transformers import T5Config, T5Model

    torch.manual_seed(0)
    config = T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64, decoder_start_token_id=0, pad_token_id=0
    )
    return T5Model(config).eval().half()


def test_bounds_against_overflow_are_read_while_none_is_met():
    """T5 in half precision clamps the state after attention. Where that changes nothing, the sum is the state."""
    model, target = tiny_t5(), {"decoder_input_ids": ids(7, seed=2)["input_ids"]}
    proof = prove(model, {**ids(), **target})
    assert all(proof.holds.values())
    loaded = Model(model, name="t5")
    traced = whence.trace(loaded, {**ids(), **target})
    for stack in traced.stacks.values():
        for layer in stack:
            weight = layer.projection.weight.double()
            total = layer.block_input.double() + torch.einsum("hqv,hvd->qd", layer.outputs.double(), weight)
            torch.testing.assert_close(layer.after_attention.double(), total, atol=2e-3, rtol=2e-3)
    # A word as large as the dtype can hold: the sum is out of bounds, and what is clamped is no sum.
    with torch.no_grad():
        model.shared.weight[63] = 65000.0
        for block in model.encoder.block:
            block.layer[0].SelfAttention.o.weight.mul_(300).abs_()
            block.layer[0].SelfAttention.v.weight.abs_()
    given = {**ids(), **target}
    given["input_ids"] = given["input_ids"].clamp(max=62)
    whence.trace(loaded, given)
    given["input_ids"][0, 5:] = 63
    assert bool(torch.isfinite(model(**given).last_hidden_state).all())
    with pytest.raises(ModelError, match="on this text, encoder layer 0: pre-norm wiring does not give its state"):
        whence.trace(loaded, given)


def conformer(kind):
    import transformers

    torch.manual_seed(0)
    common = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 32,
        "conv_depthwise_kernel_size": 5,
    }  # fmt: skip
    if kind == "Wav2Vec2Bert":
        config = transformers.Wav2Vec2BertConfig(**common, feature_projection_input_dim=20)
        return transformers.Wav2Vec2BertModel(config).eval(), {"input_features": torch.randn(1, 14, 20)}
    sound = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    config = transformers.Wav2Vec2ConformerConfig(
        **common, **sound, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4
    )
    return transformers.Wav2Vec2ConformerModel(config).eval(), {"input_values": torch.randn(1, 400)}


@pytest.mark.parametrize("kind", ["Wav2Vec2Conformer", "Wav2Vec2Bert"])
def test_a_conformer_is_not_followed_and_its_convolution_is_named(kind):
    """Between the feed-forward halves and the attention of each block, a convolution mixes neighbours."""
    module, inputs = conformer(kind)
    proof = prove(module, inputs)
    assert proof.holds == {"a": True, "b": True, "c": True, "d": True, "e": True, "f": False}
    assert "encoder.layers.0.conv_module" in proof.mixes
    traced = whence.trace(Model(module, name=kind), inputs)
    rows = traced[0].attention.sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows))
    assert whence.contributions(traced, "alti").values.shape[0] == 2  # each layer by itself
    with pytest.raises(WiringError, match="conv_module"):
        whence.contributions(traced, "alti").rollout()


def test_autocast_is_named_as_the_reason():
    built = build("llama")
    model = whence.Model(built.model.eval(), name="m")
    plain = whence.trace(model, built.inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ModelError, match="autocast is on"):
        whence.trace(model, built.inputs)
    assert torch.equal(whence.trace(model, built.inputs)[0].attention, plain[0].attention)
