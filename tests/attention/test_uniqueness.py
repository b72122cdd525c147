"""`whence.uniqueness`: the right answer for every kind of model, from what it computes and not from its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import whence
from tests.identifiable.test_decoder import make
from tests.identifiable.test_decoder_reading import deepseek
from whence.cli import main
from whence.core.attention.score_law import score_law
from whence.errors import WhenceError

torch.set_num_threads(1)
SIZES: dict[str, Any] = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE: dict[str, Any] = SIZES | {"intermediate_size": 32}
GQA: dict[str, Any] = WIDE | {"num_key_value_heads": 2, "head_dim": 8}
MLA: dict[str, Any] = WIDE | {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 24, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 2,
}  # fmt: skip
GPT: dict[str, Any] = {"vocab_size": 120, "n_layer": 2, "n_head": 4}
FREE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertModel", "BertConfig", WIDE),
    "llama": ("LlamaForCausalLM", "LlamaConfig", WIDE | {"num_key_value_heads": 2}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT | {"n_embd": 32}),
    "bloom": ("BloomForCausalLM", "BloomConfig", GPT | {"hidden_size": 32}),
    "mpt": ("MptForCausalLM", "MptConfig", {"vocab_size": 120, "d_model": 32, "n_layers": 2, "n_heads": 4}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {
        "vocab_size": 120, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GQA | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GQA | {"query_pre_attn_scalar": 8}),
    "gemma4": ("Gemma4ForCausalLM", "Gemma4TextConfig", GQA | {
        "global_head_dim": 8, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 120, "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GQA),
    "mla-large-keys": ("DeepseekV3ForCausalLM", "DeepseekV3Config", MLA | {
        "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 8}),
}  # fmt: skip


def random(model: str, config: str, fields: dict[str, Any]) -> Any:
    """A random model with weights large enough that its attention is not flat."""
    torch.manual_seed(0)
    built = getattr(transformers, model)(getattr(transformers, config)(**fields)).eval()
    for parameter in built.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 1.2 * parameter.shape[-1] ** -0.5)
    return built


@pytest.mark.parametrize("name", FREE)
def test_separate_keys_have_a_second_row_that_the_model_does_not_notice(name: str) -> None:
    found = whence.uniqueness(random(*FREE[name]), starts=16)
    assert found.answer == "not unique, here is a second row"
    assert all(head.theorem == "none" for head in found.heads)
    second = found.second
    assert second is not None
    assert second.total_variation > 0.01
    assert second.residual < 1e-9
    assert second.outputs_change is not None
    assert second.control is not None
    assert second.outputs_change < 1e-6 < 1e-3 < second.control * 10
    row, other = (torch.tensor(r, dtype=torch.float64) for r in (second.row, second.alternative))
    assert float(other.min()) >= 0
    assert float(other.sum()) == pytest.approx(1.0)
    assert 0.5 * float((row - other).abs().sum()) == pytest.approx(second.total_variation)
    if name != "gemma2":  # with a soft cap scores are not linear in the query, and that is the reason given
        assert min(head.residual or 0.0 for head in found.heads) > 0.1
    assert (found.softcap == 5.0) == (name == "gemma2")


@pytest.mark.parametrize(("name", "word"), [("bloom", "bias"), ("t5", "bias"), ("llama", "RoPE"), ("gpt2", "none")])
def test_the_position_scheme_is_named(name: str, word: str) -> None:
    assert word in whence.uniqueness(random(*FREE[name]), search=0).positions


@pytest.mark.parametrize(
    "types", [["sliding_attention"] * 2, ["compressed_sparse_attention", "heavily_compressed_attention"]]
)
def test_deepseek_v4_is_unique_by_theorem_a(types: list[str]) -> None:
    found = whence.uniqueness(deepseek(layer_types=types))
    assert found.answer == "unique at every length by Theorem A"
    assert found.sinks
    assert found.up_to == 16  # heads of 16; the sink, whose value is 0, takes one away
    assert max(head.residual or 0.0 for head in found.heads) < 1e-7
    assert found.entries == (types[0] != "sliding_attention")


def test_deepseek_v4_would_not_be_with_values_that_are_not_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: the same model with keys turned and values left as they are."""
    model = deepseek()
    module = __import__("transformers.models.deepseek_v4.modeling_deepseek_v4", fromlist=["x"])
    own = module.eager_attention_forward
    turned = module.apply_rotary_pos_emb
    kept: dict[int, torch.Tensor] = {}

    def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = turned(x, cos, sin, **kwargs)
        kept[id(out)] = x
        return out

    def plain(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return own(module, query, key, kept.get(id(value), value), mask, **kwargs)

    monkeypatch.setattr(module, "apply_rotary_pos_emb", rotary)
    monkeypatch.setattr(module, "eager_attention_forward", plain)
    plain.__module__ = own.__module__
    with pytest.raises(WhenceError):  # what the recorder sees is not what the model mixes: the proof refuses it
        whence.uniqueness(model)


def test_a_converted_bert_is_unique_by_theorem_a_and_an_unconverted_layer_spoils_it() -> None:
    model = random(*FREE["bert"])
    mixing = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1)) * 0.6
    for layer, matrix in zip(model.encoder.layer, mixing, strict=True):
        at = layer.attention.self
        with torch.no_grad():
            at.value.bias.normal_()
            at.key.weight.copy_(
                torch.einsum("hvk,hvd->hkd", matrix, at.value.weight.unflatten(0, (4, 8))).flatten(0, 1)
            )
            at.key.bias.copy_(torch.einsum("hvk,hv->hk", matrix, at.value.bias.unflatten(0, (4, 8))).flatten())
    assert whence.uniqueness(model).answer == "unique at every length by Theorem A"
    with torch.no_grad():
        model.encoder.layer[1].attention.self.key.weight[3, 5] += 0.5
    spoiled = whence.uniqueness(model, search=0)
    assert "Theorem A" not in spoiled.answer
    assert [h.head for h in spoiled.heads if h.theorem == "none"] == [0]


def test_small_keys_are_generically_unique() -> None:
    fields = MLA | {"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 16}
    found = whence.uniqueness(random("DeepseekV3ForCausalLM", "DeepseekV3Config", fields))
    assert found.answer == "generically unique (small keys)"
    assert {head.theorem for head in found.heads} == {"Theorem B"}


@pytest.mark.parametrize(
    ("fields", "theorem"),
    [
        ({"sink": "fixed", "keys": "tied", "shared_norm": True}, "Theorem A"),
        ({"position_embedding_type": "alibi"}, "Theorem A"),
        ({"keys": "free", "rotate_values": True}, "none"),
        ({"keys": "free", "softcap": 3.0}, "none"),
        ({"keys": "free", "key_size": 8}, "Theorem B"),
    ],
)
def test_it_agrees_with_the_statement_of_whences_own_decoder(fields: dict[str, Any], theorem: str) -> None:
    model = make(dtype=torch.float32, **fields)
    found = whence.uniqueness(model, search=0)
    assert {head.theorem for head in found.heads} == {theorem}
    statement = model.identifiability_statement()
    assert (statement.theorem or "none") == theorem
    assert found.up_to == statement.simplex_from_head


def test_a_bias_that_depends_on_the_query_is_seen() -> None:
    fields = WIDE | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_position_embeddings": 128}
    found = whence.uniqueness(random("DebertaV2Model", "DebertaV2Config", fields))
    assert found.answer == "unique up to 9 tokens"
    assert "left over" in str(found)


def test_a_text_that_is_too_short_proves_nothing() -> None:
    found = whence.uniqueness(make(dtype=torch.float32), torch.arange(10, 20), search=0)
    assert "Theorem A" not in found.answer
    assert "too short" in str(found)


def test_the_score_law_finds_a_moving_sink_and_a_wrong_product() -> None:
    torch.manual_seed(0)
    products = torch.randn(2, 8, 8, dtype=torch.float64), torch.randn(2, 8, 8, dtype=torch.float64)
    bias, fixed = torch.randn(2, 8, 8, dtype=torch.float64), torch.randn(2, 1, 1, dtype=torch.float64)

    def rows(sinks: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, Any]:
        full = [
            torch.cat([0.7 * p + bias, s.expand(2, 8, 1)], -1).softmax(-1) for p, s in zip(products, sinks, strict=True)
        ]
        return tuple(f[..., :-1] for f in full), tuple(f[..., -1] for f in full)

    weights, sinks = rows((fixed, fixed))
    law = score_law(weights, products, sinks=sinks)
    assert law.scale == pytest.approx(0.7)
    assert law.residual < 1e-10
    assert law.sink is not None
    assert law.sink < 1e-10
    moving = score_law(*(lambda w, s: (w, products, None, s))(*rows((fixed, fixed + 0.5))))
    assert moving.sink == pytest.approx(0.5)
    assert score_law(weights, (products[0].flip(-1), products[1])).residual > 0.1


def test_the_doctor_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from whence.identifiable.training.vocabulary import train_byte_tokenizer

    tokenizer = train_byte_tokenizer(["a fine day for a walk by the sea"] * 4, vocab_size=280)
    make(dtype=torch.float32, vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert main(["doctor", str(tmp_path), "-q"]) == 0
    assert "unique at every length by Theorem A" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path), "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["uniqueness"]["answer"] == "unique at every length by Theorem A"
