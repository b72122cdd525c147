"""Encoders that mix full and windowed layers: every measure past the window, and the report."""

from __future__ import annotations

import torch
from transformers import ModernBertConfig, ModernBertModel

import whence
from whence import trace
from whence.model.load import Model


def test_layers_that_see_everything_beside_windowed_ones() -> None:
    torch.manual_seed(0)
    config = ModernBertConfig(
        vocab_size=60, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        local_attention=8, global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    ids = torch.randint(5, 60, (1, 20), generator=torch.Generator().manual_seed(1))
    read = trace(Model(ModernBertModel(config).eval()), {"input_ids": ids})
    masks = [layer.visible for layer in read]
    assert any(m is None or bool(m.all()) for m in masks)
    assert any(m is not None and not bool(m.all()) for m in masks)
    found = whence.identifiability(read)
    lever, rank = found.extra["leverage"], found.extra["simplex_rank"]
    assert tuple(lever.shape) == (3, 2, 20, 20)
    assert torch.allclose(lever.sum(-1).double(), rank.double(), atol=1e-4)
    for i, layer in enumerate(read):
        for q in range(20):
            seen = torch.ones(20, dtype=torch.bool) if layer.visible is None else layer.visible[q]
            v = layer.values[0].double()[seen]
            ones = torch.ones(len(v), 1, dtype=torch.float64)
            s = torch.linalg.svdvals(torch.cat([v / v.abs().max(), ones], 1))
            assert int(rank[i, 0, q]) == int((s > s[0] * 20 * 1.2e-7).sum())
    assert "<html" in whence.report(read, budget=1.0).to_html()
