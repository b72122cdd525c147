"""Reading decoders whose values are turned with their keys: every measure with the row's own rotation, or a refusal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import whence
from tests.identifiable.decoder_oracle import layer_rows, rms
from tests.identifiable.test_decoder import ALL, draw, make
from whence.errors import WiringError


def parts_of(model: Any, ids: torch.Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of every layer T_ij (query, key, d), the residual on the diagonal, and the state after attention; by loops."""
    w = {k: p.detach().double().numpy() for k, p in model.state_dict().items()}
    config = model.config
    x, found = w["model.embed_tokens.weight"][ids.numpy()], []
    for number in range(config.num_hidden_layers):
        at = f"model.layers.{number}."
        rows = layer_rows(model, number, rms(x, w[at + "attention_norm.weight"], config.rms_norm_eps))
        n, d = x.shape
        parts = np.zeros((n, n, d))
        out = w[at + "attention.output.weight"].T
        for h, head in enumerate(rows):
            piece = out[h * config.value_size : (h + 1) * config.value_size]
            for i, row in enumerate(head):
                for j in range(i + 1):
                    parts[i, j] += row.weights[j] * (row.t[j] @ piece)
        parts[np.arange(n), np.arange(n)] += x
        bias = w[at + "attention.output.bias"] if config.attention_bias else np.zeros(d)
        x = parts.sum(1) + bias
        found.append((parts, x))
        y = rms(x, w[at + "feed_forward_norm.weight"], config.rms_norm_eps)
        y = torch.nn.functional.gelu(torch.tensor(y @ w[at + "up.weight"].T + w[at + "up.bias"])).numpy()
        x = x + y @ w[at + "down.weight"].T + w[at + "down.bias"]
    return found


@pytest.mark.parametrize("name", ["rope-tied", "rope-partial-tied", "rope-gqa-norms-sink", "rope-rotary-values-free"])
def test_alti_and_norms_equal_loops_over_tokens(name: str) -> None:
    model, ids = make(**ALL[name]), draw(11)[0]
    trace = whence.trace(model, ids)
    alti = whence.contributions(trace, "alti").values
    norms = whence.contributions(trace, "norms").values
    for layer, (parts, state) in enumerate(parts_of(model, ids)):
        assert np.abs(trace[layer].after_attention.numpy() - state).max() < 1e-10
        closeness = np.abs(state).sum(-1)[:, None] - np.abs(state[:, None] - parts).sum(-1)
        closeness = np.maximum(closeness, 0)
        lengths = np.linalg.norm(parts, axis=-1)
        for ours, expected in ((alti, closeness), (norms, lengths)):
            expected = expected / expected.sum(-1, keepdims=True)
            assert np.abs(ours[layer].double().numpy() - expected).max() < 1e-6


def test_alti_without_the_rotation_would_be_another_number() -> None:
    """The check can fail: with the rows' maps left out the parts no longer give the model's own state."""
    trace = whence.trace(make(), draw(11)[0])
    layer = trace[1]
    still = torch.eye(16, dtype=torch.float64).expand(11, 16, 16)
    wrong = replace(layer, _projection=replace(layer.row_projection, rows=still))
    with pytest.raises(WiringError, match="miss the model's own state"):
        whence.contributions(replace(trace, stacks={"decoder": replace(trace.of(), layers=(layer, wrong))}), "alti")


def test_logit_contributions_add_up_to_the_logit() -> None:
    trace = whence.trace(make(dtype=torch.float32), draw(15)[0])
    found = whence.contributions(trace, "alti-logit")
    assert found.values.shape[:2] == (2, 2)  # it refuses parts that do not add up to the model's own logit


def test_batches_saved_traces_and_selected_heads_keep_the_rotation(tmp_path: Path) -> None:
    model = make(dtype=torch.float32)
    texts = [draw(n, seed=n)[0] for n in (9, 14)]
    together = [whence.trace(model, text) for text in texts]
    padded = whence.trace(
        model,
        {
            "input_ids": torch.stack([torch.nn.functional.pad(texts[0], (0, 5)), texts[1]]),
            "attention_mask": torch.tensor([[1] * 9 + [0] * 5, [1] * 14]),
        },
    )
    for one, other in zip(together, padded, strict=True):
        assert one[1].row_projection.rows.shape == other[1].row_projection.rows.shape
        assert torch.allclose(one[1].row_projection.rows, other[1].row_projection.rows, atol=1e-6)
        ours, theirs = (whence.contributions(t, "alti").values for t in (one, other))
        assert torch.allclose(ours, theirs, atol=1e-5)
    together[0].save(tmp_path / "trace")
    again = whence.Trace.load(tmp_path / "trace")
    assert torch.equal(again[0].row_projection.rows, together[0][0].row_projection.rows)
    assert together[0][0].select([1]).row_projection.rows is together[0][0].row_projection.rows


def test_measures_that_do_not_follow_the_rotation_refuse() -> None:
    trace = whence.trace(make(dtype=torch.float32), draw(9)[0])
    with pytest.raises(WiringError, match="turned row by row"):
        _ = trace[0].transformed_values
    with pytest.raises(WiringError, match="rotated"):
        whence.contributions(trace, "decompx")


@pytest.mark.parametrize(("sink", "dimension"), [("none", 60 - 17), ("fixed", 61 - 17)])
def test_certificates_use_the_values_that_are_mixed(sink: str, dimension: int) -> None:
    """Heads of 16 over 60 tokens: dim = n − rank([u, 1]), with a sink n + 1 − rank([[u; 0], 1])."""
    trace = whence.trace(make(sink=sink), draw(60)[0])
    row = whence.certify(trace, layer=1, head=0, query=59)
    assert row.dimension == dimension
    assert row.check()


# -- DeepSeek-V4, as transformers has it -------------------------------------------------------------------------------


def deepseek(**fields: Any) -> Any:
    """A random DeepSeek-V4 of two layers with sliding attention."""
    transformers = pytest.importorskip("transformers", minversion="5.22")
    base: dict[str, Any] = {
        "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
        "qk_rope_head_dim": 8, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 16, "moe_intermediate_size": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "hc_mult": 2, "sliding_window": 64,
        "layer_types": ["sliding_attention"] * 2, "mlp_layer_types": ["moe"] * 2, "index_topk": 4,
        "index_n_heads": 2, "index_head_dim": 8, "num_hash_layers": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**(base | fields))).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
        elif not bool(parameter.any()):
            torch.nn.init.normal_(parameter)
    return model


def test_deepseek_v4_is_read_with_projection_keys_sink_and_inverse_rotation() -> None:
    model = deepseek()
    proof = whence.doctor(model).proof
    for site in proof.sites:
        assert site.reason_b is None
        assert site.error_b is not None
        assert site.error_b < 1e-5
        assert site.keys_error is not None
        assert site.keys_error < 1e-5
        assert site.error_e is not None  # pushed head outputs move the block's output as the projection says
        assert site.error_e < 1e-4
    trace = whence.trace(model, torch.arange(3, 23))
    layer = trace[1]
    assert layer.sink is not None
    assert torch.allclose(layer.attention_and_sink.sum(-1), torch.ones(4, 20), atol=1e-5)
    # L_i turns the last 8 of 16 numbers back by the position i, with the frequencies of the model's own rotary module.
    cos, sin = model.model.rotary_emb(torch.zeros(1, 20, 32), torch.arange(20)[None], layer_type="main")
    rows = layer.row_projection.rows
    assert rows is not None
    expected = torch.eye(16).repeat(20, 1, 1)
    for p in range(4):
        a, b = 8 + 2 * p, 9 + 2 * p
        expected[:, a, a] = expected[:, b, b] = cos[0, :, p]
        expected[:, a, b], expected[:, b, a] = -sin[0, :, p], sin[0, :, p]
    assert torch.allclose(rows, expected, atol=1e-5)
    assert torch.allclose(layer.values, layer.keys)
