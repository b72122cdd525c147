"""Conversion: the closed form solves its problem, the tied model is the folded model, and unfit models are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertForSequenceClassification, BertModel

import whence
from whence.errors import InputError, ModelError
from whence.identifiable.conversion import closed_form, distillation, fidelity, windows
from whence.identifiable.conversion.convert import tie_keys
from whence.identifiable.conversion.probes import Probe, accuracy
from whence.identifiable.conversion.refusal import refuse_unfit
from whence.identifiable.conversion.tied_key import TiedKey, fold, projections, tie
from whence.identifiable.training.vocabulary import train_tokenizer

WORDS = ("river", "stone", "light", "under", "seven", "green", "walks", "often", "paper", "night", "cloud", "house")
TEXTS = [" ".join(WORDS[(i * k + j) % 12] for j in range(3 + i % 9)) for i in range(60) for k in (1, 5)]


@pytest.fixture(scope="module")
def bert() -> whence.Model:
    """A tiny BERT with random weights that are not small, and a tokenizer of its own."""
    tokenizer = train_tokenizer(TEXTS, 60, 48)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=32,
        max_position_embeddings=48,
    )  # fmt: skip
    model = BertModel(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 1.3 * parameter.shape[-1] ** -0.5)
    return whence.Model(model, tokenizer, name="tiny")


# -- closed form -------------------------------------------------------------------------------------------------------


def logit_error(texts: list[Any], mixing: torch.Tensor) -> float:
    """Σ ‖Q (centred K − V M)ᵀ‖² / n², from the definition."""
    total = 0.0
    for query, key, value in texts:
        gap = key - value @ mixing
        gap = gap - gap.mean(-2, keepdim=True)
        total += float((query @ gap.mT).square().sum() / (query.shape[-2] * key.shape[-2]))
    return total


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), d_k=st.integers(1, 4), d_v=st.integers(1, 4))
def test_no_other_matrix_fits_the_logits_better(seed: int, d_k: int, d_v: int) -> None:
    torch.manual_seed(seed)
    texts = [tuple(torch.randn(1, n, d, dtype=torch.float64) for d in (d_k, d_k, d_v)) for n in (5, 9, 14)]
    problem = closed_form.LogitLeastSquares(1, d_v, d_k)
    for text in texts:
        problem.add(*text)
    best = problem.solve(ridge=0.0)
    least = logit_error(texts, best)
    for _ in range(20):
        assert logit_error(texts, best + 0.01 * torch.randn_like(best)) >= least - 1e-12


def test_keys_that_are_tied_already_are_found_again() -> None:
    torch.manual_seed(0)
    mixing = torch.randn(2, 5, 4, dtype=torch.float64)
    calls = []
    for n in (7, 12, 20):
        q, v = torch.randn(2, n, 4, dtype=torch.float64), torch.randn(2, n, 5, dtype=torch.float64)
        calls.append([(q, v @ mixing + torch.randn(4), v)])  # a constant in the keys is not seen by softmax
    assert torch.allclose(closed_form.fit(calls)[0], mixing, atol=1e-4)


# -- tied key ----------------------------------------------------------------------------------------------------------


def test_a_tied_key_is_values_times_m_and_folds_into_a_linear_layer() -> None:
    torch.manual_seed(0)
    for bias in (True, False):
        holder = torch.nn.Module()
        holder.query, holder.key, holder.value = (torch.nn.Linear(6, 8, bias=bias) for _ in range(3))
        places = projections(holder, 2)
        key = tie(places, [torch.randn(2, 4, 4)])[0]
        x = torch.randn(3, 6)
        by_hand = torch.cat([holder.value(x)[:, h * 4 : h * 4 + 4] @ key.mixing[h] for h in range(2)], -1)
        assert torch.allclose(holder.key(x), by_hand, atol=1e-6)
        assert sum(isinstance(m, TiedKey) for m in holder.modules()) == 1
        assert {name for name, _ in holder.named_parameters() if "key" in name} == {"key.mixing"}
        fold(places)
        assert isinstance(holder.key, torch.nn.Linear)
        assert torch.allclose(holder.key(x), by_hand, atol=1e-6)


def test_fused_and_grouped_projections_are_refused() -> None:
    with pytest.raises(ModelError, match="query/key/value"):
        projections(torch.nn.Linear(4, 4), 2)
    holder = torch.nn.Module()
    holder.q_proj, holder.k_proj, holder.v_proj = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
    with pytest.raises(ModelError, match="one value head for every query head"):
        projections(holder, 2)


# -- texts of all lengths ----------------------------------------------------------------------------------------------


def test_windows_reach_every_length_up_to_the_maximum_even_from_short_texts(bert: whence.Model) -> None:
    corpus = windows.tokenise(bert.tokenizer, TEXTS, 48)
    assert (corpus.before, corpus.after) == ((2,), (3,))
    lengths = set()
    for i in range(300):
        made = windows.batch(corpus, 64, 0, i)
        assert made["input_ids"].shape == made["attention_mask"].shape
        assert made["input_ids"].shape[1] <= 48
        lengths |= set(made["attention_mask"].sum(1).tolist())
    assert lengths >= {10, 18, 25, 32, 40, 46}
    again = windows.batches(corpus, 64, 0)
    next(again)
    assert torch.equal(next(again)["input_ids"], windows.batch(corpus, 64, 0, 1)["input_ids"])


def test_windows_refuse_what_is_no_text(bert: whence.Model) -> None:
    with pytest.raises(InputError, match="no texts"):
        windows.tokenise(bert.tokenizer, [], 48)
    with pytest.raises(InputError, match="text 1 is '  '"):
        windows.tokenise(bert.tokenizer, ["a", "  "], 48)


# -- distillation ------------------------------------------------------------------------------------------------------


def test_the_loss_is_0_for_the_same_states_and_does_not_see_padding() -> None:
    torch.manual_seed(0)
    one = tuple(torch.randn(2, 5, 4) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert float(distillation.loss_of(one, one, mask)) == pytest.approx(0, abs=1e-6)
    other = tuple(t.clone() for t in one)
    for t in other:
        t[0, 3:] = 99
    assert float(distillation.loss_of(one, other, mask)) == pytest.approx(0, abs=1e-6)
    for t in other:
        t[0, 0] += 1
    assert float(distillation.loss_of(one, other, mask)) > 0.05


def tied_copy(bert: whence.Model) -> torch.nn.Module:
    student = copy.deepcopy(bert.model)
    places = projections(student, 3)
    torch.manual_seed(1)
    tie(places, [torch.randn(3, 8, 8) * 0.3 for _ in places])
    return student


def test_a_distillation_that_was_stopped_ends_with_the_same_weights(bert: whence.Model, tmp_path: Path) -> None:
    corpus = windows.tokenise(bert.tokenizer, TEXTS, 48)
    schedule = distillation.Schedule(12, 1e-3, 64)
    whole = tied_copy(bert)
    distillation.distil(whole, bert.model, corpus, schedule)
    stopped, place = tied_copy(bert), tmp_path / "checkpoint"

    def stop(_what: str, step: float, _steps: float) -> None:
        if step == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distillation.distil(stopped, bert.model, corpus, schedule, checkpoint=place, every=4, progress=stop)
    resumed = tied_copy(bert)
    seen: list[int] = []
    history = distillation.distil(
        resumed, bert.model, corpus, schedule, checkpoint=place, progress=lambda what, step, steps: seen.append(step)
    )
    assert seen == [9, 10, 11, 12]
    assert len(history.losses) == 12
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(InputError, match=r"differs in setting steps \(12 there, 13 here\)"):
        distillation.distil(resumed, bert.model, corpus, distillation.Schedule(13, 1e-3, 64), checkpoint=place)


def test_a_loss_that_is_no_number_stops_it_and_names_the_step(bert: whence.Model) -> None:
    student = tied_copy(bert)
    with torch.no_grad():
        next(student.parameters()).fill_(float("nan"))
    with pytest.raises(ModelError, match="nan at step 0"):
        distillation.distil(
            student, bert.model, windows.tokenise(bert.tokenizer, TEXTS, 48), distillation.Schedule(2, 1e-3, 64)
        )


# -- fidelity ----------------------------------------------------------------------------------------------------------


def test_a_model_is_entirely_faithful_to_itself(bert: whence.Model) -> None:
    corpus = windows.tokenise(bert.tokenizer, TEXTS, 48)
    made = fidelity.groups(corpus, (16, 32), 20)
    assert all(len(piece) == 14 for piece in made["16"])
    for line in fidelity.compare(bert.model, bert.model, corpus, made):
        assert line.state_cosine == pytest.approx(1, abs=1e-6)
        assert line.embedding_cosine == pytest.approx(1, abs=1e-6)
        assert line.neighbours_kept == 1
        assert line.attention_kl == pytest.approx(0, abs=1e-9)


def test_the_divergence_is_of_all_the_texts_it_names(bert: whence.Model) -> None:
    """Not of the first few: the mean over every text, each by itself."""
    corpus = windows.tokenise(bert.tokenizer, TEXTS, 48)
    pieces = fidelity.groups(corpus, (16,), 40)["16"]
    other = copy.deepcopy(bert.model)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if "query" in name:
                weight.mul_(3)
    (line,) = fidelity.compare(bert.model, other, corpus, {"16": pieces})
    each = []
    for piece in pieces:
        inputs = corpus.batch([piece])
        pairs = []
        for model in (bert.model, other):
            model.set_attn_implementation("eager")
            with torch.no_grad():
                pairs.append(torch.stack(model(**inputs, output_attentions=True).attentions).double())
            model.set_attn_implementation("sdpa")
        each.append(float((pairs[0] * (pairs[0] / pairs[1]).log()).sum(-1).mean()))
    assert line.texts == len(pieces) == 40
    assert line.attention_kl == pytest.approx(sum(each) / 40, rel=1e-4)
    assert abs(sum(each[:16]) / 16 - sum(each) / 40) > 1e-3 * line.attention_kl  # the first few are not all


def test_final_states_do_not_depend_on_the_batch(bert: whence.Model) -> None:
    corpus = windows.tokenise(bert.tokenizer, TEXTS, 48)
    pieces = [list(text) for text in corpus.texts[:9]]
    one, many = fidelity.final_states(bert.model, corpus, pieces, 1), fidelity.final_states(bert.model, corpus, pieces)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one, many, strict=True))


def test_the_probe_solves_what_is_linear_and_is_at_chance_on_noise() -> None:
    torch.manual_seed(0)
    x, direction = torch.randn(400, 10), torch.randn(10)
    y = (x @ direction > 0).long()
    assert accuracy(x[:300], y[:300], x[300:], y[300:]) > 0.95
    noise = torch.randint(0, 2, (400,))
    assert 0.3 < accuracy(x[:300], noise[:300], x[300:], noise[300:]) < 0.7
    with pytest.raises(InputError, match="two classes"):
        Probe("p", [("a", "1")], [("b", "1")])
    with pytest.raises(InputError, match="not in training"):
        Probe("p", [("a", "1"), ("b", "2")], [("b", "3")])


# -- the whole ---------------------------------------------------------------------------------------------------------


def test_converted_distilled_folded_and_saved(bert: whence.Model, tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in bert.model.state_dict().items()}
    labelled = [(text, str(len(text.split()) > 6)) for text in TEXTS]
    made = tie_keys(
        bert, TEXTS, 60, tokens=256, learning_rate=3e-3, lengths=(32,), texts_per_length=12,
        probes=[Probe("length", labelled[:80], labelled[80:])],
    )  # fmt: skip
    assert all(torch.equal(before[name], value) for name, value in bert.model.state_dict().items())
    assert made.tied_residual < 1e-5
    losses = made.history.losses
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert made.after.at("as they are").state_cosine > made.before.at("as they are").state_cosine
    assert made.after.at(32).texts > 0
    assert set(made.after.probes) == {"length"}
    assert made.statement.from_head == "every length"
    assert made.statement.from_block == "every length"
    made.save(tmp_path)
    assert {"config.json", "model.safetensors", "fidelity.json", "README.md"} <= {p.name for p in tmp_path.iterdir()}
    again = BertModel.from_pretrained(tmp_path)  # plain BERT weights, no code of ours
    assert again.config.whence["keys"] == "tied"
    ids = torch.tensor([[2, 7, 9, 11, 3]])
    assert torch.equal(again.eval()(ids).last_hidden_state, made.model.model(ids).last_hidden_state)
    assert whence.doctor(again).trusted
    assert "Theorem 1" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_a_conversion_can_be_gone_on_from(bert: whence.Model) -> None:
    options: dict[str, Any] = {"tokens": 128, "lengths": (), "held_out": TEXTS[:8]}
    first = tie_keys(bert, TEXTS, 10, **options)
    second = tie_keys(bert, TEXTS, 0, start=first.model, **options)
    assert second.before.lengths[0].state_cosine == pytest.approx(first.after.lengths[0].state_cosine, abs=1e-5)
    assert second.tied_residual < 1e-5
    with pytest.raises(ModelError, match="no function of its values"):
        tie_keys(bert, TEXTS, 0, start=bert, **options)
    with pytest.raises(InputError, match="no conversion of"):
        tie_keys(bert, TEXTS, 0, start=torch.nn.Linear(2, 2), **options)


def test_the_head_of_a_classifier_stays_and_no_text_is_both_fitted_to_and_measured(bert: whence.Model) -> None:
    torch.manual_seed(0)
    classifier = BertForSequenceClassification(bert.model.config).eval()  # type: ignore[arg-type]
    model = whence.Model(classifier, bert.tokenizer, name="classifier")
    made = tie_keys(model, TEXTS, 2, tokens=64, held_out=TEXTS[:5], lengths=())
    assert made.settings["texts"] == len(set(TEXTS) - set(TEXTS[:5])) or made.settings["texts"] < len(TEXTS)
    assert torch.equal(made.model.model.classifier.weight, classifier.classifier.weight)
    assert torch.equal(made.model.model.get_input_embeddings().weight, classifier.get_input_embeddings().weight)


def test_unfit_models_are_refused_with_the_reason() -> None:
    from conformance.zoo import build, find

    with pytest.raises(ModelError, match=r"RoPE.*What would be needed"):
        refuse_unfit(whence.Model(build(find("gpt_neox")).model))
    with pytest.raises(ModelError, match=r"RoPE.*another model"):
        refuse_unfit(whence.Model(build(find("llama")).model))
    with pytest.raises(ModelError, match="decoder"):
        refuse_unfit(whence.Model(build(find("gpt2")).model))
    with pytest.raises(ModelError, match="encoder–decoder"):
        refuse_unfit(whence.Model(build(find("bart")).model))
    with pytest.raises(ModelError, match="no transformers configuration"):
        refuse_unfit(whence.Model(torch.nn.Linear(2, 2), name="linear"))


def test_bad_settings_are_refused(bert: whence.Model) -> None:
    with pytest.raises(InputError, match="steps=-1"):
        tie_keys(bert, TEXTS, -1)
    with pytest.raises(InputError, match="positions for 48"):
        tie_keys(bert, TEXTS, 1, max_length=64)
    with pytest.raises(InputError, match="tokenizer"):
        tie_keys(whence.Model(bert.model), TEXTS, 1)
    with pytest.raises(InputError, match="1 text was given"):
        tie_keys(bert, TEXTS[:1], 1)
    with pytest.raises(InputError, match="in held_out"):
        tie_keys(bert, TEXTS[:2], 1, held_out=TEXTS[:2])


def test_the_embedded_encoder_is_tied_at_its_full_length(minilm: whence.Model) -> None:
    texts = [f"The {a} {b} by the {c}." for a in WORDS[:4] for b in ("slept", "stood") for c in WORDS[4:8]]
    made = tie_keys(minilm, texts, 0, lengths=())
    assert made.tied_residual < 1e-4
    assert made.statement.max_length == 512
    assert made.statement.from_block == "every length"
