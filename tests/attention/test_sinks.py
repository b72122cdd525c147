"""Learned sinks (gpt_oss): a column of its own in every measure, against brute force on [[V; 0], 1]."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

import whence
from whence import trace
from whence.model.load import Model

HEADS, D_V = 4, 8


def tiny(n: int) -> Any:
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=50, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, head_dim=D_V, sliding_window=6, num_local_experts=2, num_experts_per_tok=1,
        initializer_range=0.12, attn_implementation="eager",
    )  # fmt: skip
    model = GptOssForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    ids = torch.randperm(50, generator=torch.Generator().manual_seed(1))[None, :n]
    return trace(Model(model), {"input_ids": ids})


@pytest.fixture(scope="module")
def read() -> Any:
    return tiny(18)


def pieces(layer: Any, h: int, q: int) -> tuple[Tensor, Tensor, Tensor]:
    """The row with its sink, the values with a zero row, and which of them are seen; float64."""
    seen = torch.cat([layer.visible[q] if layer.visible is not None else torch.ones(18).bool(), torch.ones(1).bool()])
    weights = layer.attention[h, q].double()
    row = torch.cat([weights, (1 - weights.sum())[None]])
    values = torch.cat([layer.values[h].double(), torch.zeros(1, D_V, dtype=torch.float64)])
    return row[seen], values[seen], seen


def basis(values: Tensor, simplex: bool) -> Tensor:
    matrix = torch.cat([values, torch.ones(len(values), 1).double()], 1) if simplex else values
    u, s, _ = torch.linalg.svd(matrix, full_matrices=False)
    return u[:, s > s[0] * max(matrix.shape) * 1.2e-7]


def test_every_measure_has_the_sink_as_its_last_column(read: Any) -> None:
    found = whence.identifiability(read)
    plain, simplex = (whence.effective_attention(read, constraint=c) for c in ("output", "simplex"))
    for result in (found, plain):
        assert result.key_tokens is not None
        assert result.key_tokens[-1] == "sink"
        assert len(result.key_tokens) == 19
    assert "sink" in found.token_types
    for i, layer in enumerate(read):
        assert layer.sink is not None
        assert float(layer.attention.sum(-1).min()) < 0.95
        for h in range(HEADS):
            for q in range(18):
                a, v, seen = pieces(layer, h, q)
                whole, inner = basis(v, False), basis(v, True)
                assert int(found.extra["length"][i, h, q]) == len(a)
                assert int(found.extra["rank"][i, h, q]) == whole.shape[1]
                assert int(found.extra["simplex_rank"][i, h, q]) == inner.shape[1]
                assert torch.allclose(plain.values[i, h, q][seen].double(), whole @ (whole.T @ a), atol=1e-5)
                assert torch.allclose(simplex.values[i, h, q][seen].double(), inner @ (inner.T @ a), atol=1e-5)
                lever = found.extra["leverage"][i, h, q]
                assert torch.allclose(lever[seen].double(), inner.square().sum(1), atol=1e-5)
                assert not lever[~seen].any()
                share = float((a - whole @ (whole.T @ a)).abs().sum() / a.sum())
                assert float(found.values[i, h, q]) == pytest.approx(share, abs=1e-5)


def test_one_key_more_than_value_dimensions_leaves_one_direction(read: Any) -> None:
    layer, query = next((i, q) for i, q in ((0, 8), (1, 8)) if read[i].visible[q].sum() == D_V + 1)
    row = whence.certify(read, layer, 1, query, top=None)
    assert row.dimension == 1  # n = d_v + 1: without the sink this row would be unique
    assert row.check()
    a, v, seen = pieces(read[layer], 1, query)
    places = seen.nonzero().squeeze(-1).tolist()
    matrix, right = np.vstack([v.numpy().T, np.ones(len(a))]), np.append(a.numpy() @ v.numpy(), 1.0)
    for k, key in enumerate(row.keys.tolist()):
        cost = np.eye(len(a))[places.index(key)]
        for end, sign in ((row.lower, 1.0), (row.upper, -1.0)):
            best = sign * linprog(sign * cost, A_eq=matrix, b_eq=right).fun
            assert float(end[k]) == pytest.approx(best, abs=1e-6)
    assert any("sink" in sentence for sentence in row.sentences())
    assert "sink" in list(row.to_frame()["token"])


def test_a_verified_alternative(read: Any) -> None:
    layer = next(i for i in (0, 1) if read[i].visible[-1].all())
    for query in (8, 17):
        other = whence.witness(read, layer, 1, query)
        assert other.exists
        assert other.total_variation > 1e-3
        assert abs(float(other.alternative.sum()) - 1) < 1e-6
        checked = other.verify()
        assert checked.same
        assert checked.control_head_output > 1e-4


def test_a_doppelganger_and_whole_heads(read: Any) -> None:
    other = whence.doppelganger(read, rounds=1, sample=2)
    assert other.values.shape[-1] == 19
    assert torch.allclose(other.values.sum(-1), torch.ones(2, HEADS, 18, dtype=torch.float64), atol=1e-6)
    assert other.total_variation > 0.01
    assert other.verify().same
    from whence.attention.certify import certify_whole_head

    head = certify_whole_head(read, 0, 2, rows=4)
    assert head.check()
    alternative = other.values[0, 2] / other.values[0, 2].sum(-1, keepdim=True)
    assert (alternative >= head.lower - 1e-5).all()
    assert (alternative <= head.upper + 1e-5).all()


def test_the_layers_view_counts_the_sink(read: Any) -> None:
    joint = whence.layer_statement(read, 1, 17).joint
    free = whence.identifiability(read).extra["simplex_null_dimension"][1, :, 17]
    if joint.determines_heads:
        assert joint.null_dimension == int(free.sum())


def test_the_report_is_written(read: Any) -> None:
    assert "sink" in whence.report(read, budget=1.0).to_html()
