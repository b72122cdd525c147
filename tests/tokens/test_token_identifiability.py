"""The whole measure, on tiny random models: against brute force, against chance, and against itself."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.tokens.conftest import sentences
from whence.errors import InputError
from whence.model.load import Model
from whence.reading.tracing import trace
from whence.tokens.corpus import corpus
from whence.tokens.result import NOT_COUNTED, TokenIdentifiability
from whence.tokens.split import split
from whence.tokens.token_identifiability import token_identifiability
from whence.tokens.training import Training

QUICK = Training(epochs=4)


def measure(model: Any, texts: Any, **options: Any) -> TokenIdentifiability:
    options.setdefault("training", QUICK)
    options.setdefault("bootstrap", 50)
    return token_identifiability(model, texts, **options)


@pytest.fixture(scope="module")
def whole(tiny: Any) -> TokenIdentifiability:
    """Every map, part and distance of a tiny BERT, once."""
    maps = ("naive", "linear", "mlp", "ridge", "procrustes")
    return measure(tiny("bert"), sentences(60), maps=maps)


def brute_force(model: Model, texts: list[str], layer: int, distance: str, target: int = 0) -> float:
    """The naive rate, token by token: a hit is any j whose embedding equals the wanted one."""
    read = corpus(model, texts)
    hits = total = 0
    for k in split(read.sequences).test:
        states = trace(model, *read.sequences[k], keep=("states",)).states.double()
        x, e = states[0], states[layer]
        for i in range(len(x)):
            if not 0 <= i + target < len(x):
                continue
            found = []
            for j in range(len(x)):
                if distance == "cosine":
                    found.append(float(1 - e[i] @ x[j] / (e[i].norm() * x[j].norm())))
                else:
                    found.append(float((e[i] - x[j]).norm()))
            best = min(range(len(x)), key=lambda j: found[j])
            hits += bool((x[best] - x[i + target]).norm() <= 1e-6 * x[best].norm())
            total += 1
    return hits / total


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
def test_equals_brute_force(tiny: Any, corpus40: list[str], family: str) -> None:
    targets = (0, 1) if family == "llama" else (0,)
    found = measure(tiny(family), corpus40, maps=("naive",), parts=("whole",), targets=targets)
    for target in targets:
        for distance in found.distances:
            expected = [brute_force(tiny(family), corpus40, layer, distance, target) for layer in found.layers]
            assert found.rate("naive", distance, target=target).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "bart"])
def test_at_the_embeddings_every_token_is_itself(tiny: Any, corpus40: list[str], family: str) -> None:
    found = measure(tiny(family), corpus40, layers=[0], maps=("naive", "ridge", "procrustes"), targets=(0,))
    for name in found.maps:
        for distance in found.distances:
            assert found.rate(name, distance).item() == 1.0
            assert found.interval(name, distance)[0].item() == 1.0
    assert found.rate("naive", "l2", part="direction").item() == 1.0


def test_ties_are_counted_and_reported(tiny: Any) -> None:
    """Rotary positions leave repeated tokens with equal embeddings; absolute ones do not."""
    texts = [text + " " + text.split()[0] for text in sentences(30, repeat=False)]
    rotary = measure(tiny("llama"), texts, layers=[0], maps=("naive",), targets=(0,))
    assert rotary.rate("naive", "l2").item() == 1.0
    lengths = {
        k: int(n) for k, n in zip(rotary.extra["sentence"].tolist(), rotary.extra["length"].tolist(), strict=True)
    }
    tokens = sum(lengths.values())
    assert rotary.report["ties"] == pytest.approx(2 * len(lengths) / tokens)
    assert rotary.chance == pytest.approx(len(lengths) / tokens)
    more = sum((n - 2) / n + 2 * 2 / n for n in lengths.values()) / tokens
    assert rotary.report["chance_with_ties"] == pytest.approx(more)
    assert measure(tiny("bert"), texts, layers=[0], maps=("naive",)).report["ties"] == 0


def test_shuffled_labels_fall_to_chance(tiny: Any) -> None:
    maps = ("naive", "linear", "mlp", "ridge")
    texts = sentences(150, repeat=False, low=6)
    found = measure(tiny("bert"), texts, maps=maps, parts=("whole",), shuffle_labels=True, layers=[0, 2])
    spread = (found.chance / found.report["test"]) ** 0.5
    assert (found.values - found.chance).abs().max() < 5 * spread
    # The control that every result carries, and the real thing beside it.
    honest = measure(tiny("bert"), texts, maps=maps, parts=("whole",), layers=[0, 2])
    assert (honest.extra["control"] - honest.chance).abs().max() < 5 * spread
    assert honest.rate("ridge")[0] == 1.0


def test_the_test_sentences_cannot_leak(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spoiling every test state changes no map: what is fitted comes from the other sentences only."""
    from whence.tokens import token_identifiability as module

    texts = sentences(40)
    kept: list[dict[Any, Any]] = []
    before = module.Measurement.run

    def run(self: Any) -> None:
        if kept:
            for layer in range(len(self.data.store)):
                self.data.store[layer][self.data.rows["test"]] = 1e3
        before(self)
        kept.append(dict(self.fitted))

    monkeypatch.setattr(module.Measurement, "run", run)
    for _ in range(2):
        measure(tiny("bert"), texts, maps=("linear", "mlp", "ridge", "procrustes"), layers=[1], parts=("whole",))
    x = torch.randn(5, 64)
    assert kept[0].keys() == kept[1].keys()
    for key, g in kept[0].items():
        assert torch.equal(g(x), kept[1][key](x))


def test_a_duplicate_is_measured_once_and_said(tiny: Any) -> None:
    texts = sentences(30)
    found = measure(tiny("bert"), [*texts, *texts[:7], ""], maps=("naive",), layers=[2])
    alone = measure(tiny("bert"), texts, maps=("naive",), layers=[2])
    assert torch.equal(found.values, alone.values)
    assert any("7 duplicate" in line and "1 empty" in line for line in found.remarks())


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_the_batch_size_changes_nothing(tiny: Any, corpus40: list[str], family: str) -> None:
    maps = ("naive", "linear", "mlp", "ridge", "procrustes")
    one, many = (
        measure(tiny(family), corpus40, maps=maps, parts=("whole",), targets=(0,), batch_size=b) for b in (1, 16)
    )
    tokens = one.report["test"]
    assert (one.values - many.values).abs().max() <= 2 / tokens  # float noise may turn a near-tie
    assert torch.equal(one.rate("naive", "l2"), many.rate("naive", "l2"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_changes_little(tiny: Any, corpus40: list[str], dtype: torch.dtype) -> None:
    model = tiny("bert")
    other = Model(copy.deepcopy(model.model).to(dtype), model.tokenizer)
    options: dict[str, Any] = {"maps": ("naive", "ridge"), "parts": ("whole",)}
    ours, theirs = (measure(m, corpus40, **options) for m in (model, other))
    allowed = 0 if dtype == torch.float64 else 0.1
    assert (ours.rate("naive", "l2") - theirs.rate("naive", "l2")).abs().max() <= allowed
    assert (ours.rate("ridge", "cosine") - theirs.rate("ridge", "cosine")).abs().max() <= allowed + 2 / ours.report[
        "test"
    ]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_maps_are_trained_where_gradients_are_off(tiny: Any, corpus40: list[str], mode: Any) -> None:
    options: dict[str, Any] = {"maps": ("linear", "mlp"), "parts": ("whole",), "layers": [2]}
    with mode():
        inside = measure(tiny("bert"), corpus40, **options)
    assert torch.equal(inside.values, measure(tiny("bert"), corpus40, **options).values)


def test_a_rerun_is_the_same_and_the_seed_matters(tiny: Any, corpus40: list[str]) -> None:
    one, two = (measure(tiny("bert"), corpus40, layers=[2]) for _ in range(2))
    assert torch.equal(one.values, two.values)
    assert all(torch.equal(one.extra[k].nan_to_num(), two.extra[k].nan_to_num()) for k in one.extra)
    other = measure(tiny("bert"), corpus40, layers=[2], seed=1)
    assert one.tokens.ids != other.tokens.ids


def test_disk_and_memory_give_the_same(tiny: Any, corpus40: list[str]) -> None:
    a, b = (measure(tiny("bert"), corpus40, layers=[1], parts=("whole",), memory=m) for m in (0, 1 << 30))
    assert a.report["states_on_disk"]
    assert not b.report["states_on_disk"]
    assert torch.equal(a.values, b.values)


def test_the_model_runs_once(tiny: Any, corpus40: list[str]) -> None:
    model = tiny("bert")
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    hook = model.model.base_model.register_forward_hook(count)
    measure(model, corpus40, maps=("naive",), layers=[0])  # proofs are made before counting
    calls = 0
    measure(model, corpus40, batch_size=8)
    hook.remove()
    assert calls == 5


def test_transfer(whole: TokenIdentifiability) -> None:
    for name in ("linear", "mlp", "ridge", "procrustes"):
        for distance in whole.distances:
            matrix = whole.transfer(name, distance)
            assert matrix.shape == (3, 3)
            assert torch.allclose(matrix.diagonal(), whole.rate(name, distance))
    with pytest.raises(InputError, match="no transfer matrix for map='naive'"):
        whole.transfer("naive")


def test_norm_tells_little_and_direction_nearly_all(whole: TokenIdentifiability) -> None:
    assert whole.rate("ridge", "cosine", part="direction")[0] == 1.0
    assert whole.rate("mlp", "cosine", part="norm").max() < 0.6
    assert whole.rate("procrustes", "cosine", part="norm").isnan().all()  # not defined, and not called diverged
    assert not whole.diverged


def test_decoders_are_asked_for_the_next_token_too(tiny: Any, corpus40: list[str]) -> None:
    found = measure(tiny("llama"), corpus40, maps=("naive", "ridge"), layers=[0, 2])
    assert found.targets == (0, 1)
    hits = found.extra["hits"][1, 0, 0, 0, 0]
    last = found.extra["position"] == found.extra["length"] - 1
    assert torch.equal(hits == NOT_COUNTED, last)  # the last token has no next one
    assert found.rate("naive", "l2", part="direction", target=1).isnan().all()  # asked of the token itself only


def test_vocabulary(tiny: Any, corpus40: list[str]) -> None:
    found = measure(tiny("llama"), corpus40, maps=("naive", "ridge"), pool="vocabulary", layers=[0, 2], targets=(0,))
    assert found.rate("naive", "l2")[0] == 1.0  # rotary positions: the embeddings are rows of the table
    assert found.chance == pytest.approx(1 / 120)
    assert 0 <= found.report["majority"] < 0.2
    assert "transfer" not in found.extra
    narrow = replace(tiny("albert"))
    table = narrow.model.get_input_embeddings().weight
    if table.shape[1] != 64:
        with pytest.raises(InputError, match=r"width .* naive"):
            measure(narrow, corpus40, maps=("naive",), pool="vocabulary")
        assert measure(narrow, corpus40, maps=("ridge",), pool="vocabulary", layers=[0]).rate("ridge").item() > 0.1


def test_an_encoder_decoder_has_two_stacks(tiny: Any, corpus40: list[str]) -> None:
    for stack, targets in (("encoder", (0,)), ("decoder", (0, 1))):
        found = measure(tiny("bart"), corpus40, maps=("naive",), attention=stack, parts=("whole",))
        assert found.targets == targets
        assert found.rate("naive", "l2")[0] == 1.0
    with pytest.raises(InputError, match="cross"):
        measure(tiny("bart"), corpus40, maps=("naive",), attention="cross")


def test_a_diverging_map_is_reported_and_not_counted(tiny: Any, corpus40: list[str]) -> None:
    found = measure(
        tiny("bert"), corpus40, layers=[2], parts=("whole",), training=Training(learning_rate=1e6), distances=("l2",)
    )
    assert {entry["map"] for entry in found.diverged} == {"linear", "mlp"}
    assert found.rate("linear", "l2").isnan().all()
    assert found.transfer("linear", "l2").isnan().all()
    assert not found.rate("naive", "l2").isnan().any()
    assert sum("Diverged and not counted" in line for line in found.remarks()) == 2
    assert found.to_frame()["diverged"].sum() == 2


def test_pairs(tiny: Any) -> None:
    texts = sentences(60)
    found = measure(tiny("bert"), list(zip(texts[::2], texts[1::2], strict=True)), maps=("naive",), layers=[0, 1])
    assert found.rate("naive", "cosine")[0] == 1.0
    assert found.tokens.raw.count("[SEP]") == 2 * found.report["test_sequences"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"maps": "linear"}, "give a list"),
        ({"maps": ()}, "give a list"),
        ({"maps": ("cubic",)}, "'cubic' is not known; choose among naive, linear"),
        ({"distances": ("manhattan",)}, "choose among cosine, l2"),
        ({"pool": "world"}, "choose among sentence, vocabulary"),
        ({"parts": ("half",)}, "choose among whole, direction, norm"),
        ({"targets": ()}, "whole numbers"),
        ({"targets": (50,)}, r"\+50 places away"),
        ({"layers": [9]}, "hidden states 0 … 2"),
        ({"bootstrap": 0}, "at least 1"),
        ({"shares": (1.0, 0.0, 0.0)}, "sum to 1"),
    ],
)
def test_bad_options(tiny: Any, corpus40: list[str], options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        measure(tiny("bert"), corpus40, **options)


def test_minilm(minilm_path: Any) -> None:
    """The real encoder: everything is there at the embeddings, and the last state has lost some of it."""
    import whence

    subjects, verbs = ("The nurse", "A tall man", "My old friend", "Nobody", "The bank"), ("saw", "left", "paid for")
    objects = ("the red house", "two boats on the river", "an expensive ticket", "what we wanted")
    texts = [f"{s} {v} {o}." for s in subjects for v in verbs for o in objects]
    found = whence.token_identifiability(whence.load(), texts, layers=[0, 1, 6], maps=("naive", "ridge"), bootstrap=50)
    assert found.rate("naive", "cosine")[0] == 1.0
    assert found.rate("naive", "cosine")[1] > 0.99
    assert found.rate("naive", "cosine")[2] < found.rate("naive", "cosine")[1]
