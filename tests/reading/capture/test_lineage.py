"""Which call is encoder, decoder or cross is read from the pass that is traced, not from the one that was proved."""

from __future__ import annotations

import pytest
import torch
import transformers

import whence
from conformance.zoo import build
from whence.errors import ModelError, WiringError
from whence.model.load import Model
from whence.reading.capture.lineage import Lineage
from whence.reading.capture.recorder import Call


def given(source, target, seed=3):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(5, 60, (1, n), generator=generator)  # noqa: E731
    return {"input_ids": draw(source), "decoder_input_ids": draw(target)}


@pytest.mark.parametrize("family", ["bart", "t5", "fsmt", "t5gemma"])
def test_each_stack_holds_the_attention_that_the_model_itself_returns_under_its_name(family):
    """Proved on a source of 12 and a target of 7 tokens, then read with others: of one length, with the longer target."""
    module = build(family).model
    module.set_attn_implementation("eager")
    model = Model(module, name=family)
    whence.trace(model, given(12, 7))
    for source, target in [(9, 9), (5, 11), (14, 3), (2, 6), (6, 1)]:
        inputs = given(source, target)
        traced = whence.trace(model, inputs)
        with torch.no_grad():
            plain = module(**inputs, output_attentions=True, use_cache=False)
        for name in ("encoder", "decoder", "cross"):
            returned = getattr(plain, f"{name}_attentions")
            assert len(returned) == len(traced.of(name))
            for layer, theirs in zip(traced.of(name), returned, strict=True):
                torch.testing.assert_close(layer.attention, theirs[0], atol=1e-5, rtol=1e-4)


def test_a_mask_is_no_stream():
    """A mask that hides something reaches every state where one that hides nothing was left out."""
    model = Model(build("t5").model, name="t5")
    whence.trace(model, given(12, 7))
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 1]])
    masked = whence.trace(model, {**given(9, 9), "attention_mask": mask})
    masked = masked if isinstance(masked, whence.Trace) else masked[0]
    assert [len(masked.of(name)) for name in ("encoder", "decoder", "cross")] == [2, 2, 2]


class Swapped(torch.nn.Module):
    """A decoder's attention that on longer texts reads the encoder where it read the decoder, and the other way round."""

    def __init__(self, inner, states):
        super().__init__()
        self.inner, self.states = inner, states

    def forward(self, hidden_states, key_value_states=None, attention_mask=None, **options):
        if hidden_states.shape[1] > 12:
            key_value_states = self.states[-1] if key_value_states is None else None
        return self.inner(hidden_states, key_value_states=key_value_states, attention_mask=None, **options)


def swapping():
    module, states = build("bart").model, []
    module.model.encoder.register_forward_hook(lambda _m, _a, out: states.append(out.last_hidden_state))
    for layer in module.model.decoder.layers:
        layer.self_attn = Swapped(layer.self_attn, states)
        layer.encoder_attn = Swapped(layer.encoder_attn, states)
    return Model(module, name="swapping")


def streamed(*given):
    return whence.identifiability(whence.stream(*given), attention="decoder")


@pytest.mark.parametrize("read", [whence.trace, streamed])
def test_calls_that_read_another_stream_on_this_text_are_refused(read):
    """Source and target of one length, the same projections and norms: (a) to (c) hold, and every name would be wrong."""
    model = swapping()
    traced = whence.trace(model, given(12, 9))
    assert [len(traced.of(name)) for name in ("encoder", "decoder", "cross")] == [2, 2, 2]
    with pytest.raises(ModelError, match=r"on this text, attention call 2 .* another stream.*was decoder layer 0"):
        read(model, given(16, 16))
    assert torch.equal(whence.trace(model, given(12, 9)).of("cross")[0].attention, traced.of("cross")[0].attention)


def two_towers(kind, text):
    """A text and an image side by side, of one length or not."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    words = {**sizes, "vocab_size": 64, "max_position_embeddings": 32}
    image = {**sizes, "image_size": 16, "patch_size": 8}
    config = getattr(transformers, f"{kind}Config")(text_config=words, vision_config=image)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    return model, {"input_ids": given(text, 1)["input_ids"], "pixel_values": torch.randn(1, 3, 16, 16)}


@pytest.mark.parametrize(("kind", "text"), [("CLIP", 5), ("CLIP", 9), ("Siglip", 9)])
def test_two_towers_are_not_one_stack(kind, text):
    """Layers of the image would be followed by layers of the text, and with one length, named by its tokens."""
    model, inputs = two_towers(kind, text)
    with pytest.raises(
        ModelError, match=r"streams that do not follow each other: call .*text_model.* call .*vision_model"
    ):
        whence.trace(Model(model, name=kind), inputs)
    alone = whence.trace(Model(model.text_model, name="text"), {"input_ids": inputs["input_ids"]})
    assert len(alone.layers) == 2


def test_a_body_that_runs_twice_is_not_twice_as_deep():
    module = build("bert").model
    once = type(module)

    class Twice(once):
        def forward(self, **inputs):
            self.bert(**inputs)
            return super().forward(**inputs)

    inputs = build("bert").inputs
    rolled = whence.contributions(whence.trace(Model(module, name="once"), inputs), "alti").rollout().values
    assert len(rolled) == 2
    module.__class__ = Twice
    found = whence.trace(Model(module, name="twice"), inputs)
    with pytest.raises(WiringError, match=r"do not follow each other: call 2 \(bert.encoder.layer.0"):
        whence.contributions(found, "alti").rollout()


@pytest.mark.parametrize("family", ["diffllama", "lilt"])
def test_attention_beside_attention_is_not_followed(family):
    specimen = build(family)
    found = whence.trace(Model(specimen.model, name=family), specimen.inputs)
    if family == "diffllama" and len(found.layers) == specimen.model.config.num_hidden_layers:
        pytest.skip("this transformers computes both attentions of a layer in one call")
    with pytest.raises(WiringError, match="do not follow each other"):
        whence.contributions(found, "rollout").rollout()


def call(query, key, value, output):
    return Call(query, key, value, output, output, None, None, node=output)


def test_lineages_follow_in_place_writes_lists_and_views():
    source, target = torch.randn(1, 4, 8), torch.randn(1, 4, 8)
    with Lineage({"input": source, "decoder_input": target}) as lineage:
        states = torch.zeros(1, 4, 8)
        assert lineage.of(states) == 0
        states[:, 1:] = target[:, :-1]
        states += 1
        queries, keys = states.view(1, 4, 2, 4).transpose(1, 2), torch.cat([source, source], dim=1)
        output = queries.clone()
        assert lineage.role(call(queries, queries, queries, output)).elsewhere is False
        assert lineage.role(call(output, keys, keys, output.clone())).elsewhere is True
        both = torch.stack([output, output + source.view_as(output)])
        assert lineage.role(call(output, both, both, both.clone())).elsewhere is False
        assert lineage.role(call(None, None, keys, output + 1)).elsewhere is True
    assert lineage.of(torch.empty(3)) == 0
