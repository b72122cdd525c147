"""Scores of pairs (DeBERTa): which token pairs are told apart, and that the folding they lead to is the model's."""

from __future__ import annotations

import math

import pytest
import torch

import whence
from tests.mixing.mixing_oracle import backward
from whence.mixing.jacobian.pairs import separating
from whence.reading.trace import Trace


@pytest.mark.parametrize("shared", [False, True])
def test_positions_in_queries_and_keys(shared: bool) -> None:
    """DeBERTa's scores: q·k, q·(position of the key) and k·(position of the query)."""
    from transformers import DebertaV2Config, DebertaV2Model

    torch.manual_seed(0)
    config = DebertaV2Config(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40,
        relative_attention=True, position_buckets=4, pos_att_type=["p2c", "c2p"], position_biased_input=False,
        share_att_key=shared, norm_rel_ebd="layer_norm", max_position_embeddings=32,
    )  # fmt: skip
    model = DebertaV2Model(config).double().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    ids = torch.randint(1, 50, (1, 9))
    trace = whence.trace(whence.Model(model), {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert isinstance(trace, Trace)
    mixed = whence.hidden_token_attribution(trace, "exact")
    assert "folded" in mixed.provenance.settings["way"]
    slow = backward(trace, [0, 4, 8])
    assert torch.allclose(mixed.extra["squared"].sqrt()[:, [0, 4, 8]], slow, atol=1e-9 * float(slow.max()), rtol=0)


@pytest.mark.parametrize("seed", [0, 1])
def test_attention_wholly_on_a_few_tokens(seed: int) -> None:
    """Then nothing in a row stands still when they move: such pairs have to be tried one by one."""
    from transformers import DebertaV2Config, DebertaV2Model

    torch.manual_seed(seed)
    config = DebertaV2Config(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        relative_attention=True, position_buckets=4, pos_att_type=["p2c", "c2p"], position_biased_input=False,
        share_att_key=True, norm_rel_ebd="layer_norm", max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    model = DebertaV2Model(config).double().eval()
    ids = torch.arange(3, 17)[None]
    with torch.no_grad():
        own = model.encoder.layer[0].attention.self
        own.query_proj.weight *= 2000
        own.query_proj.bias *= 2000
        x = model.embeddings(ids)[0]
        between = torch.nn.functional.normalize(x[10] - x[11], dim=0)
        own.key_proj.weight -= (own.key_proj.weight @ between)[:, None] * between  # two tokens share a key
    trace = whence.trace(whence.Model(model), {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert isinstance(trace, Trace)
    mixed = whence.hidden_token_attribution(trace, "exact")
    assert "folded" in mixed.provenance.settings["way"]
    rows = [4, 6, 8]
    slow = backward(trace, rows)
    assert torch.allclose(mixed.values[:, rows], slow / slow.sum(-1, keepdim=True), atol=1e-9, rtol=0)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 32, 64, 130])
def test_every_two_tokens_are_told_apart(n: int) -> None:
    member = separating(n)
    apart = (member[:, None] & ~member[:, :, None]).any(0)  # [j, m]: a set with m and without j
    assert bool((apart | torch.eye(n, dtype=torch.bool)).all())
    assert len(member) <= max(2, 2 * math.ceil(math.log2(n + 1)))
