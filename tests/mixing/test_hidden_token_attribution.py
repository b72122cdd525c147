"""Attribution by folded forward mode against a backward loop; probes against exact; the way it says it went."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import scipy.stats
import torch

import whence
from tests.mixing.mixing_oracle import backward
from whence.errors import InputError, WiringError
from whence.mixing import hidden_token_attribution as module
from whence.mixing.hidden_token_attribution import HiddenTokenAttribution
from whence.mixing.local_vs_global import correlation, divergence, ranks
from whence.reading.trace import Trace
from whence.reading.wiring.norms import Norm

Zoo = Callable[..., Trace]


@pytest.mark.parametrize(
    ("family", "way", "close"),
    [
        ("bert", "folded", 1e-10),
        ("gpt2", "folded", 1e-10),
        ("llama", "folded", 1e-7),  # its softmax works in float32 whatever the model's dtype
        ("gemma2", "folded", 1e-7),  # soft caps on the scores
        ("gptj", "folded", 1e-7),  # its scale is not shown, and inferred; rotary positions in float32
        ("mpnet", "folded", 1e-10),  # relative positions added to the scores; its scale is tried
        ("falcon", "folded", 1e-7),
        ("granite", "folded", 1e-7),  # the embeddings are handed to the rotary positions first
        ("bloom", "backward passes", 1e-7),  # its activation has a backward of its own and no forward mode
        ("xlnet", "folded", 1e-10),  # its states are (token, sequence, d)
        ("deberta-v2", "folded", 1e-10),  # its encoder gives out every state once more at the end
    ],
)
def test_equal_to_a_backward_loop(zoo: Zoo, family: str, way: str, close: float) -> None:
    trace = zoo(family, torch.float64)
    mixed = whence.hidden_token_attribution(trace, "exact")
    rows = [0, 5, 11]
    slow = backward(trace, rows)
    assert way in mixed.provenance.settings["way"]
    assert mixed.exact
    assert mixed.error is None
    assert torch.allclose(mixed.extra["squared"].sqrt()[:, rows], slow, atol=close * float(slow.max()), rtol=0)
    assert torch.allclose(mixed.values[:, rows], slow / slow.sum(-1, keepdim=True), atol=close, rtol=0)
    if trace.of().name == "decoder":
        assert bool((mixed.values.triu(1) == 0).all())


def test_pooled_states_are_refused(zoo: Zoo) -> None:
    with pytest.raises(WiringError, match="pooled on the way"):
        whence.hidden_token_attribution(zoo("funnel"), attention="encoder")


def test_a_row_of_minilm(minilm_path: Path) -> None:
    trace = whence.trace(whence.load("minilm", dtype=torch.float64), "rates")
    mixed = whence.hidden_token_attribution(trace, "exact")
    slow = backward(trace, rows=[1], layers=[5])
    assert "folded" in mixed.provenance.settings["way"]
    assert torch.allclose(mixed.values[[5]][:, [1]], slow / slow.sum(-1, keepdim=True), atol=1e-10, rtol=0)


def test_before_the_embedding_norm(zoo: Zoo) -> None:
    trace = zoo("bert", torch.float64)
    after, before = (whence.hidden_token_attribution(trace, "exact", embeddings=e) for e in ("after", "before"))
    assert before.provenance.settings["embedding_norm"] == "LayerNorm"
    assert (after.values - before.values).abs().max() > 1e-4
    # By hand: J N, with the first layer's J from the backward loop's own tangents.
    found = module._embedding_norm(trace, trace.model, trace.of())  # type: ignore[arg-type]
    assert found is not None
    norm, x = found
    jacobian = torch.func.vmap(torch.func.jacrev(norm))(x)
    eye = torch.eye(x.shape[1], dtype=torch.float64).expand(x.shape[0], -1, -1)
    assert torch.allclose(norm.tangent(x, eye), jacobian.transpose(1, 2), atol=1e-12)
    none = whence.hidden_token_attribution(zoo("gpt2"), "probes", embeddings="before")
    assert none.provenance.settings["embedding_norm"] is None


@pytest.mark.parametrize("centred", [True, False])
def test_the_derivative_of_a_norm(centred: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gain = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((3, 5), (5,)))
    norm = Norm(gain, None, 1e-5, centred)
    jacobian = torch.func.vmap(torch.func.jacrev(norm))(x)
    eye = torch.eye(5, dtype=torch.float64).expand(3, -1, -1)
    assert torch.allclose(norm.tangent(x, eye), jacobian.transpose(1, 2))


def test_probes_are_unbiased_and_their_errors_cover(zoo: Zoo) -> None:
    trace = zoo("bert", torch.float64)
    exact = whence.hidden_token_attribution(trace, "exact")
    runs = [whence.hidden_token_attribution(trace, "probes", 8, seed=seed) for seed in range(40)]
    squared = torch.stack([run.extra["squared"] for run in runs])
    z = (squared.mean(0) - exact.extra["squared"]) / (squared.std(0) / len(runs) ** 0.5)
    assert abs(float(z.mean())) < 1.0
    assert float(z.square().mean()) < 2.0
    spread = torch.stack([run.values for run in runs]).std(0)
    told = torch.stack([run.error for run in runs]).mean(0)
    assert 1.0 < float((told / spread).median()) < 1.4  # widened by Student's t, 1.21 for eight probes
    for probes in (4, 8, 16):
        many = runs if probes == 8 else [
            whence.hidden_token_attribution(trace, "probes", probes, seed=seed) for seed in range(40)
        ]  # fmt: skip
        covered = torch.stack([(run.values - exact.values).abs() <= 1.96 * run.error for run in many]).double()
        assert 0.925 < float(covered.mean()) < 0.985, probes


def test_a_seed_gives_the_same_probes_for_any_budget(zoo: Zoo) -> None:
    one, two = (whence.hidden_token_attribution(zoo("bert"), "probes", 6, seed=3, memory=m) for m in ("2GB", "20MB"))
    other = whence.hidden_token_attribution(zoo("bert"), "probes", 6, seed=4)
    assert torch.allclose(one.values, two.values, atol=1e-5)
    assert (one.values - other.values).abs().max() > 1e-4
    assert one.provenance.settings["probes"] == 6
    assert one.provenance.settings["seed"] == 3


def test_auto_says_what_it_did(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    assert whence.hidden_token_attribution(zoo("bert")).exact
    monkeypatch.setattr(module, "EXACT_LENGTH", 5)
    assert not whence.hidden_token_attribution(zoo("bert")).exact


def test_all_probes_are_exact(zoo: Zoo) -> None:
    mixed = whence.hidden_token_attribution(zoo("bert"), "probes", 10_000)
    assert mixed.exact
    assert torch.allclose(mixed.values, whence.hidden_token_attribution(zoo("bert"), "exact").values, atol=1e-6)


def test_padding_changes_nothing(minilm: whence.Model) -> None:
    texts = ["Rates rose.", "The bank raised its rates again this year."]
    for alone, batched in zip([whence.trace(minilm, t) for t in texts], whence.trace(minilm, texts), strict=True):
        ours, theirs = (whence.hidden_token_attribution(t, "probes", 3) for t in (alone, batched))
        assert torch.allclose(ours.values, theirs.values, atol=1e-5)


def test_saved_and_loaded(zoo: Zoo, tmp_path: Path) -> None:
    mixed = whence.hidden_token_attribution(zoo("bert"), "probes", 4)
    again = HiddenTokenAttribution.load(mixed.save(tmp_path / "hta.safetensors"))
    assert torch.equal(again.values, mixed.values)
    assert again.error is not None
    assert not again.exact


def test_what_cannot_be_asked(zoo: Zoo) -> None:
    trace = zoo("bert")
    for options, words in (
        ({"mode": "fast"}, "mode='fast' is not one of"),
        ({"norm": "ones"}, "norm='ones' is not one of 'frobenius'"),
        ({"of": "values"}, "of='values'"),
        ({"embeddings": "during"}, "embeddings='during'"),
        ({"mode": "probes", "probes": 1}, "at least 2"),
        ({"memory": "lots"}, "write it as '2GB'"),
    ):
        with pytest.raises(InputError, match=words):
            whence.hidden_token_attribution(trace, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="select afterwards"):
        whence.hidden_token_attribution(trace.select(layers=[1]))
    with pytest.raises(InputError, match="attention='encoder'"):
        whence.hidden_token_attribution(zoo("bart"), attention="decoder")
    assert whence.hidden_token_attribution(zoo("bart"), "probes", 2).provenance.settings["attention"] == "encoder"


def test_unproved_wiring_is_refused(zoo: Zoo) -> None:
    from dataclasses import replace

    trace = zoo("bert")
    broken = replace(trace.of(), layers=tuple(replace(la, wiring=None, reason="a gate") for la in trace.of()))
    with pytest.raises(WiringError, match="a gate"):
        module._stack(replace(trace, stacks={"encoder": broken}), None)


def test_local_against_global(zoo: Zoo) -> None:
    trace = zoo("llama")
    mixed = whence.hidden_token_attribution(trace, "exact", of="heads")
    both = whence.local_vs_global(trace, attribution=mixed)
    local = trace.attention.double()
    for layer, head, query in ((0, 1, 7), (1, 0, 11)):
        a, b = (x[layer, head, query, : query + 1].double().numpy() for x in (local, mixed.values))
        assert abs(float(both.values[layer, head, query]) - scipy.stats.pearsonr(a, b).statistic) < 1e-6
        assert abs(float(both.extra["spearman"][layer, head, query]) - scipy.stats.spearmanr(a, b).statistic) < 1e-6
        m = (a / a.sum() + b / b.sum()) / 2
        jsd = (scipy.stats.entropy(a, m) + scipy.stats.entropy(b, m)) / 2
        assert abs(float(both.extra["jsd"][layer, head, query]) - jsd) < 1e-6
    assert bool(both.values[:, :, :2].isnan().all())  # one or two visible tokens have no correlation
    assert list(both.by_head().columns) == ["layer", "head", "pearson", "spearman", "jsd"]
    assert len(both.by_layer()) == 2
    assert {"query_token", "pearson", "spearman", "jsd"} <= set(both.to_frame().columns)


def test_ranks_and_divergence_at_the_edges() -> None:
    x = torch.tensor([[0.2, 0.2, 0.5, 0.1]])
    seen = torch.ones(1, 4, dtype=torch.bool)
    assert ranks(x, seen).tolist() == [[1.5, 1.5, 3.0, 0.0]]
    assert bool(correlation(torch.full((1, 4), 0.25), x, seen).isnan().all())
    left, right = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert abs(float(divergence(left, right)) - 0.6931472) < 1e-6
    assert float(divergence(left, left)) == 0


def test_before_a_norm_that_is_not_the_last_step_is_refused(zoo: Zoo) -> None:
    """ALBERT's embeddings are normed, then mapped to another width."""
    with pytest.raises(InputError, match="through a norm and then through something else"):
        whence.hidden_token_attribution(zoo("albert"), embeddings="before")
