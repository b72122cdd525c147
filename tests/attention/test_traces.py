"""Attention measures on real traces, against a per-row float64 SVD written straight from the definition."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertModel

import whence
from conformance.zoo import build
from whence.attention.key_constraint import key_constraint
from whence.errors import InputError, WiringError
from whence.model.load import Model
from whence.reading.tracing import trace

REPEATED = "the cat saw the cat and the dog saw the dog and the cat saw the dog saw the cat " * 2


def oracle(layer, h, q, constraint="output"):
    """A⊥ of one row: project it on the column space of T = V W over the keys it sees, by SVD, in float64."""
    seen = layer.visible_mask if layer.visible_mask.dim() == 2 else layer.visible_mask[h]
    keys = seen[q].nonzero().squeeze(-1)
    t = (layer.values[h] @ layer.projection.weight[h]).double()[keys]
    if constraint == "simplex":
        t = torch.cat([t / t.abs().max(), torch.ones(len(keys), 1, dtype=torch.float64)], dim=1)
    u, s, _ = torch.linalg.svd(t, full_matrices=False)
    # T is a float32 product: what is below its rounding is no direction of its own.
    u = u[:, s > s[0] * max(t.shape) * torch.finfo(torch.float32).eps]
    row = torch.zeros(layer.attention.shape[-1], dtype=torch.float64)
    row[keys] = u @ (u.T @ layer.attention[h, q].double()[keys])
    return row, u.shape[1]


@pytest.fixture(scope="module")
def traces(minilm, smollm2, long_text):
    bart = build("bart")
    return {
        "minilm": (trace(minilm, long_text + " " + long_text), None),
        "smollm2": (
            trace(smollm2, REPEATED + long_text + " " + REPEATED, keep=("attention", "values", "outputs")),
            None,
        ),
        "cross": (trace(Model(bart.model), bart.inputs), "cross"),
        "decoder": (trace(Model(bart.model), bart.inputs), "decoder"),
    }


@pytest.mark.parametrize("name", ["minilm", "smollm2", "cross", "decoder"])
@pytest.mark.parametrize("constraint", ["output", "simplex"])
def test_effective_attention_is_the_projection(traces, name, constraint):
    found, stack = traces[name]
    effective = whence.effective_attention(found, constraint=constraint, attention=stack).values
    layers = found.of(stack).layers
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        i = int(torch.randint(len(layers), (1,), generator=generator))
        h = int(torch.randint(len(layers[i].heads), (1,), generator=generator))
        q = int(torch.randint(layers[i].attention.shape[1], (1,), generator=generator))
        expected, _ = oracle(layers[i], h, q, constraint)
        torch.testing.assert_close(effective[i, h, q].double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["minilm", "smollm2", "cross"])
def test_effective_attention_gives_the_same_head_output(traces, name):
    found, stack = traces[name]
    effective = whence.effective_attention(found, attention=stack)
    for i, layer in enumerate(found.of(stack)):
        same = effective.values[i].double() @ layer.values.double()
        error = (same - layer.outputs.double()).abs().max() / layer.outputs.abs().max()
        assert error < 1e-5


def test_simplex_rows_keep_their_sum(traces):
    found, _ = traces["minilm"]
    rows = whence.effective_attention(found, constraint="simplex").values.sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["minilm", "smollm2", "cross"])
def test_ranks_are_those_of_the_oracle(traces, name):
    found, stack = traces[name]
    measured = whence.identifiability(found, attention=stack).extra
    generator = torch.Generator().manual_seed(1)
    layers = found.of(stack).layers
    for _ in range(10):
        i = int(torch.randint(len(layers), (1,), generator=generator))
        h = int(torch.randint(len(layers[i].heads), (1,), generator=generator))
        q = int(torch.randint(layers[i].attention.shape[1], (1,), generator=generator))
        _, rank = oracle(layers[i], h, q)
        assert int(measured["rank"][i, h, q]) == rank
        assert int(measured["null_dimension"][i, h, q]) == int(measured["length"][i, h, q]) - rank


def test_repeated_tokens_without_positions_have_one_value_each_in_the_first_layer(smollm2):
    found = trace(smollm2, REPEATED)
    measured = whence.identifiability(found).extra
    ids = found.tokens.ids
    distinct = [len(set(ids[: q + 1])) for q in range(len(ids))]
    assert measured["rank"][0, 0].tolist() == distinct
    assert not measured["null_share"].isnan().any()


def test_r_null_share_and_types_follow_their_definitions(traces):
    found, _ = traces["minilm"]
    measured = whence.identifiability(found)
    effective = whence.effective_attention(found).values.double()
    raw = found.attention.double()
    expected = (raw - effective).abs().sum(-1) / raw.sum(-1)
    torch.testing.assert_close(measured.values, expected, atol=1e-5, rtol=1e-5)
    for i, h in ((0, 0), (3, 7)):
        pair = torch.stack([raw[i, h].flatten(), effective[i, h].flatten()])
        assert float(measured.extra["head_r"][i, h]) == pytest.approx(float(torch.corrcoef(pair)[0, 1]), abs=1e-5)
        row = torch.corrcoef(torch.stack([raw[i, h, 5], effective[i, h, 5]]))[0, 1]
        assert float(measured.extra["r"][i, h, 5]) == pytest.approx(float(row), abs=1e-4)
    frame = measured.by_token_type()
    cls = frame[(frame.layer == 2) & (frame["type"] == "[CLS]")].iloc[0]
    assert cls.raw == pytest.approx(float(raw[2, :, :, 0].mean()), abs=1e-6)
    assert cls.effective == pytest.approx(float(effective[2, :, :, 0].mean()), abs=1e-5)
    assert frame.groupby("layer")["raw"].sum().round(4).eq(1).all()


def test_leverage_is_the_projectors_diagonal(traces):
    found, _ = traces["minilm"]
    lever = whence.identifiability(found).extra["leverage"]
    values = found[2].values[4].double()
    basis = torch.linalg.qr(torch.cat([values, torch.ones(len(values), 1, dtype=torch.float64)], 1)).Q
    torch.testing.assert_close(lever[2, 4, 0].double(), (basis**2).sum(1), atol=1e-5, rtol=0)


def test_the_frame_has_a_line_per_row(traces):
    found, _ = traces["minilm"]
    frame = whence.identifiability(found, condition=True).to_frame()
    assert len(frame) == 6 * 12 * len(found.tokens)
    assert {"length", "rank", "null_dimension", "simplex_null_dimension", "condition", "null_share", "r"} <= set(
        frame.columns
    )


def test_batching_changes_nothing(minilm, long_text):
    alone = whence.effective_attention(trace(minilm, long_text)).values
    together = trace(minilm, ["Short.", long_text, long_text + " " + long_text])
    torch.testing.assert_close(whence.effective_attention(together[1]).values, alone, atol=1e-4, rtol=0)


def test_a_projection_of_lower_rank_hides_what_it_does_not_pass_on():
    specimen = build("bert")
    dense = specimen.model.bert.encoder.layer[0].attention.output.dense
    with torch.no_grad():  # the first head's slice passes on 3 of its 16 dimensions
        left, s, right = torch.linalg.svd(dense.weight[:, :16], full_matrices=False)
        s[3:] = 0
        dense.weight[:, :16] = left * s @ right
    found = trace(Model(specimen.model), specimen.inputs)
    measured = whence.identifiability(found).extra["rank"][0]
    assert measured[0].tolist() == [3] * 12
    assert measured[1].tolist() == [12] * 12


# -- certificates and witnesses ------------------------------------------------------------------------------------


def test_intervals_agree_with_scipy_and_hold_the_truth(traces):
    from scipy.optimize import linprog

    found, _ = traces["minilm"]
    row = whence.certify(found, 3, 7, 4, top=3)
    assert row.check()
    layer = found[3]
    a = layer.attention[7, 4].double()
    a = a / a.sum()
    values = layer.values[7].double()
    equal = torch.cat([values.T, torch.ones(1, len(a), dtype=torch.float64)]).numpy()
    target = torch.cat([a @ values, torch.ones(1, dtype=torch.float64)]).numpy()
    for k, key in enumerate(row.keys.tolist()):
        for sign, ours in ((1, float(row.lower[k])), (-1, float(row.upper[k]))):
            cost = torch.zeros(len(a)).double()
            cost[key] = sign
            theirs = sign * linprog(cost.numpy(), A_eq=equal, b_eq=target, bounds=(0, 1), method="highs").fun
            assert ours == pytest.approx(theirs, abs=1e-7)
        assert float(row.lower[k]) - 1e-9 <= float(a[key]) <= float(row.upper[k]) + 1e-9
    assert all(s.startswith("Layer 3 head 7 puts") for s in row.sentences())


def test_a_tolerance_widens_the_intervals(minilm):
    found = trace(minilm, "The bank raised its rates again.")
    exact, loose = (whence.certify(found, 1, 2, "bank", tolerance=t) for t in (0.0, 0.01))
    assert exact.dimension == 0
    assert bool((loose.upper - loose.lower > 1e-4).any())
    assert loose.check()


@pytest.mark.parametrize("name", ["minilm", "smollm2"])
def test_a_witness_is_a_row_that_the_model_cannot_tell(traces, name):
    found, stack = traces[name]
    query = len(found.tokens) - 2
    other = whence.witness(found, 1, 3, query, attention=stack)
    layer = found[1]
    assert other.exists
    assert float(other.alternative.min()) >= 0
    assert float(other.alternative.sum()) == pytest.approx(float(layer.attention[3, query].double().sum()), abs=1e-6)
    assert bool((other.alternative[~layer.visible_mask[query]] == 0).all())
    moved = 0.5 * float((other.alternative - layer.attention[3, query].double()).abs().sum())
    assert moved == pytest.approx(other.total_variation, abs=1e-5)
    seen = other.verify()
    assert seen.head_output <= 1e-6
    assert seen.final_states <= 1e-6
    assert seen.control_final_states > 100 * seen.final_states
    assert "of the attention was moved" in seen.sentence()


def test_a_witness_of_a_unique_row_says_so(minilm):
    other = whence.witness(trace(minilm, "The bank."), 0, 0, 1)
    assert not other.exists
    assert other.statement == "this row is the only one with this head output"


def test_a_doppelganger_changes_every_head_and_no_output(minilm, long_text):
    found = trace(minilm, long_text)
    twin = whence.doppelganger(found, rounds=1, sample=6)
    assert not twin.stopped
    assert bool(twin.extra["searched"].all())
    original = found.attention.double()
    assert bool((twin.values >= 0).all())
    torch.testing.assert_close(twin.values.sum(-1), original.sum(-1), atol=1e-6, rtol=0)
    moved = 0.5 * (twin.values - original).abs().sum(-1)
    torch.testing.assert_close(moved, twin.extra["total_variation"], atol=1e-5, rtol=0)
    assert twin.total_variation > 0.01
    seen = twin.verify()
    assert seen.final_states < 1e-5
    assert seen.control_final_states > 1000 * seen.final_states
    assert list(twin.by_layer().layer) == list(range(6))


# -- the key constraint --------------------------------------------------------------------------------------------


def test_key_constrained_rows_come_from_some_query(minilm, long_text):
    found = trace(minilm, long_text + " " + long_text)
    other = whence.witness(found, 2, 3, 5, key_constrained=True, starts=48)
    if not other.exists:
        assert "none found in 48 starts" in other.statement
        return
    layer = found[2]
    change = other.alternative.clamp(min=1e-300).log() - layer.attention[3, 5].double().log()
    basis = torch.cat([layer.keys[3].double(), torch.ones(len(change), 1, dtype=torch.float64)], 1)
    fitted = basis @ torch.linalg.lstsq(basis, change[:, None]).solution
    torch.testing.assert_close(fitted[:, 0], change, atol=1e-5, rtol=1e-5)
    assert other.residual < 1e-9


def test_tied_keys_are_unique_by_theorem():
    specimen = build("bert")
    for layer in specimen.model.bert.encoder.layer:
        attention = layer.attention.self
        with torch.no_grad():  # every head's keys are its values times a matrix
            for h in range(4):
                rows = slice(16 * h, 16 * h + 16)
                mixing = torch.randn(16, 16, generator=torch.Generator().manual_seed(h)) / 4
                attention.key.weight[rows] = mixing @ attention.value.weight[rows]
                attention.key.bias[rows] = mixing @ attention.value.bias[rows]
    ids = torch.randint(5, 110, (1, 40), generator=torch.Generator().manual_seed(0))
    found = trace(Model(specimen.model), {"input_ids": ids})
    assert bool(key_constraint(found[0])["tied"].all())
    other = whence.witness(found, 0, 1, 3, key_constrained=True)
    assert not other.exists
    assert "unique" in other.statement
    assert "Theorem 1" in other.statement


def test_local_dimension_and_bound_are_reported(minilm, long_text):
    measured = whence.identifiability(trace(minilm, long_text), keys=True).extra
    assert measured["reachable_dimension"].shape == measured["rank"].shape
    assert int(measured["reachable_dimension"].min()) >= -1
    assert bool(((measured["near_tied_bound"] >= 0) & (measured["near_tied_bound"] <= 1)).all())
    assert not bool(measured["tied"].any())


def test_keys_that_were_not_proved_are_refused():
    specimen = build("gemma2")
    found = trace(Model(specimen.model), specimen.inputs)
    with pytest.raises(WiringError, match="soft cap"):
        whence.identifiability(found, keys=True)


def test_the_joint_statement(minilm):
    statement = whence.layer_statement(trace(minilm, "The bank raised its rates."), 2)
    assert statement.joint.determines_heads
    assert statement.joint.null_dimension == 0
    assert "determines every head's output" in statement.sentence()


def test_small_singular_values_of_a_real_size_of_output_matrix_count():
    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "num_attention_heads": 12, "num_hidden_layers": 1, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=60, **sizes)).eval()
    weight = model.encoder.layer[0].attention.output.dense.weight
    with torch.no_grad():  # σ_min / σ_max = 3e-5, as in trained models; max(shape) · eps of float32 is 4.6e-5
        u, _, v = torch.linalg.svd(weight.double())
        weight.copy_((u * torch.logspace(0, -4.523, 384, dtype=torch.float64)) @ v)
    joint = whence.layer_statement(trace(Model(model), {"input_ids": torch.arange(5, 25)[None]}), 0).joint
    assert (joint.rank, joint.determines_heads) == (384, True)
    assert joint.condition == pytest.approx(10**4.523, rel=1e-2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((9, 0, 0), "no layer 9 in the encoder; it has layers 0 … 5"),
        ((0, 40, 0), "no head 40; it has heads 0 … 11"),
        ((0, 0, 99), "query 99 is out of range"),
        ((0, 0, "walrus"), "'walrus' is no token here"),
        ((0, 0, "the"), "stands at"),
    ],
)
def test_a_row_that_is_not_there_is_refused(minilm, arguments, message):
    found = trace(minilm, "the bank saw the river")
    for measure in (whence.certify, whence.witness):
        with pytest.raises(InputError, match=message):
            measure(found, *arguments)


def test_effective_attention_takes_tensors_by_position_and_by_name():
    a, v = torch.softmax(torch.randn(2, 5, 5), -1), torch.randn(2, 5, 3)
    by_position = whence.effective_attention(a, v)
    assert torch.equal(by_position, whence.effective_attention(attention=a, values=v))
    with pytest.raises(InputError, match="takes a trace, or attention and values"):
        whence.effective_attention(a)


def test_identifiability_of_several_texts_is_that_of_each_by_itself(minilm):
    """Texts of one length go together, in a short and in a long group (more tokens than a head has dimensions)."""
    texts = [
        "The bank raised its rates.",
        "The river took the fence.",
        "It rained.",
        "so it was said again " * 9,
        "as it was said before " * 9,
    ]
    traces = whence.trace(minilm, texts)
    for one, own in zip(whence.identifiability(traces), traces, strict=True):
        alone = whence.identifiability(own)
        assert one.tokens == alone.tokens
        for name in alone.extra:
            torch.testing.assert_close(one.extra[name], alone.extra[name], atol=1e-6, rtol=1e-5, equal_nan=True)
