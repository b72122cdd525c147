"""Models in half precision: each measure against float64 on the tensors as the model has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import whence
from whence import trace
from whence.model.load import Model

N, HEADS, D_V = 26, 4, 8


def tiny(kind: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    common = {
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "initializer_range": 0.2, "attn_implementation": "eager",
    }  # fmt: skip
    model = BertModel(BertConfig(**common)) if kind == "bert" else LlamaForCausalLM(LlamaConfig(**common))
    ids = torch.randint(5, 50, (1, N), generator=torch.Generator().manual_seed(1))
    ids[0, 9] = ids[0, 3]  # a repeated token: equal values in the decoder's first layer
    return trace(Model(model.to(dtype).eval()), {"input_ids": ids})


@pytest.fixture(scope="module", params=[(k, d) for k in ("bert", "llama") for d in (torch.bfloat16, torch.float16)])
def read(request: pytest.FixtureRequest) -> Any:
    return tiny(*request.param)


def pieces(layer: Any, h: int, q: int) -> tuple[Tensor, Tensor, Tensor]:
    """The row, its values through the output matrix's row space, and what it sees; float64."""
    seen = torch.ones(N, dtype=torch.bool) if layer.visible is None else layer.visible[q]
    return layer.attention[h, q].double()[seen], layer.values[h].double()[seen], seen


def basis(values: Tensor, simplex: bool) -> Tensor:
    tolerance = torch.linalg.matrix_norm(values, ord=2) * max(values.shape) * torch.finfo(torch.float32).eps
    u, s, _ = torch.linalg.svd(values - values.mean(0) if simplex else values, full_matrices=False)
    u = u[:, s > tolerance]
    return torch.cat([u, torch.full((len(values), 1), len(values) ** -0.5).double()], 1) if simplex else u


def test_identifiability(read: Any) -> None:
    found = whence.identifiability(read)
    assert (found.extra["simplex_null_dimension"] > 0).any()
    for i, layer in enumerate(read):
        for h in range(HEADS):
            for q in range(N):
                a, v, seen = pieces(layer, h, q)
                plain, simplex = basis(v, False), basis(v, True)
                effective = plain @ (plain.T @ a)
                at = (i, h, q)
                assert int(found.extra["rank"][at]) == plain.shape[1]
                assert int(found.extra["simplex_rank"][at]) == simplex.shape[1]
                assert float(found.values[at]) == pytest.approx(float((a - effective).abs().sum() / a.sum()), abs=1e-4)
                if len(a) > 2:
                    r = float(np.corrcoef(a.numpy(), effective.numpy())[0, 1])
                    assert float(found.extra["r"][at]) == pytest.approx(r, abs=1e-4)
                lever = found.extra["leverage"][i, h]
                lever = lever[q if len(lever) > 1 else 0]
                assert torch.allclose(lever[seen].double(), simplex.square().sum(1), atol=1e-4)


@pytest.mark.parametrize("constraint", ["output", "simplex"])
def test_effective_attention(read: Any, constraint: Any) -> None:
    found = whence.effective_attention(read, constraint=constraint)
    assert found.values.dtype == torch.float32
    for i, layer in enumerate(read):
        for h in range(HEADS):
            for q in range(N):
                a, v, seen = pieces(layer, h, q)
                q_basis = basis(v, constraint == "simplex")
                wanted = q_basis @ (q_basis.T @ a)
                assert torch.allclose(found.values[i, h, q][seen].double(), wanted, atol=1e-4)


def test_intervals_and_their_proofs(read: Any) -> None:
    layer = read[1]
    for h, q in ((0, N - 1), (3, N - 4)):
        row = whence.certify(read, 1, h, q, top=2)
        a, v, _ = pieces(layer, h, q)
        a = a / a.sum()
        assert row.dimension == len(a) - basis(v, True).shape[1] > 0
        matrix, right = np.vstack([v.numpy().T, np.ones(len(a))]), np.append(a.numpy() @ v.numpy(), 1.0)
        for k, j in enumerate(row.keys.tolist()):
            cost = np.eye(len(a))[j]
            for end, sign in ((row.lower, 1.0), (row.upper, -1.0)):
                best = sign * linprog(sign * cost, A_eq=matrix, b_eq=right).fun
                assert float(end[k]) == pytest.approx(best, abs=1e-6)
        assert row.check()


def test_other_rows_change_nothing_but_rounding(read: Any) -> None:
    other = whence.witness(read, 1, 2, N - 1)
    assert other.exists
    checked = other.verify()
    assert checked.same
    assert checked.control_head_output > 4 * checked.head_output
    a, v, _ = pieces(read[1], 2, N - 1)
    moved = (other.alternative - other.row)[-len(a) :] @ v
    assert float(moved.norm() / (a @ v).norm()) < 1e-6


def test_the_layers_view(read: Any) -> None:
    for i, layer in enumerate(read):
        joint = whence.layer_statement(read, i).joint
        weight = layer.projection.weight.double().reshape(HEADS * D_V, -1)
        s = torch.linalg.svdvals(weight)
        assert joint.condition == pytest.approx(float(s[0] / s[-1]), rel=1e-6)
        # The block determines the heads, so what is free is what is free in each of them.
        alone = whence.identifiability(read).extra["simplex_null_dimension"][i, :, -1].sum()
        assert joint.determines_heads
        assert joint.null_dimension == int(alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_output_matrix_with_small_singular_values_has_full_rank(dtype: torch.dtype) -> None:
    from whence.reading.wiring.projection import Projection

    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(n, n, generator=generator).double())[0] for n in (32, 384))
    weight = (u * torch.logspace(0, -4.4, 32).double()) @ v[:32]
    assert Projection(weight.to(dtype)[None], None).full_rank
    assert not Projection(torch.cat([weight[:31], weight[:1]]).to(dtype)[None], None).full_rank
