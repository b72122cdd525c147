"""`whence.faithfulness` end to end: extreme verdicts, failures by name, resuming, shards, bad input."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import whence
from tests.faithful.faithful_models import WEIGHTS, WORDS
from whence.errors import InputError
from whence.faithful.result import Faithfulness
from whence.model.load import Model

DRAW = random.Random(0)
TEXTS = [" ".join(DRAW.choices(WORDS, k=DRAW.randint(3, 7))) for _ in range(36)]


def sign(text: str) -> float:
    """+1 where the additive model says positive, −1 where it says negative."""
    return 1.0 if sum(WEIGHTS[w] for w in text.split()) >= 0 else -1.0


def perfect(_model: Model, text: str) -> list[float]:
    return [sign(text) * WEIGHTS[w] for w in text.split()]


def reversed_scores(_model: Model, text: str) -> list[float]:
    return [-s for s in perfect(_model, text)]


def constant(_model: Model, text: str) -> list[float]:
    return [1.0] * len(text.split())


METHODS = [perfect, reversed_scores, constant]


@pytest.fixture(scope="module")
def extreme(additive: Model, tmp_path_factory: pytest.TempPathFactory) -> Faithfulness:
    """A run that is saved, text by text, whose outputs are the same to the last bit whatever else is run."""
    path = tmp_path_factory.mktemp("extreme") / "run.jsonl"
    return whence.faithfulness(additive, TEXTS, METHODS, operators=("drop", "mask"), save=path)


def test_a_perfect_explanation_gets_the_extreme_verdict(extreme: Faithfulness) -> None:
    table = extreme.table().set_index(["method", "operator"])
    # The mask token's weight is 0, so that masking and dropping are the same to this model.
    for operator in ("drop", "mask"):
        assert table.loc[("perfect", operator), "naopc"] == pytest.approx(1.0)
        assert table.loc[("reversed_scores", operator), "naopc"] == pytest.approx(0.0)
        assert table.loc[("random", operator), "delta"] == pytest.approx(0.0, abs=1e-12)
        assert table.loc[("perfect", operator), "wins"] > 0.95
        assert table.loc[("reversed_scores", operator), "wins"] < 0.05
    said = "\n".join(extreme.verdict())
    assert "Better than a random order on 36 texts, under drop and mask: perfect." in said
    assert "Not separated from a random order: constant." in said
    assert "Worse than a random order: reversed_scores." in said
    assert "constant gives every unit the same score" in said


def test_values_are_those_of_the_formula(extreme: Faithfulness) -> None:
    """Δ of the best order of an additive output: Σ w_(i) (N − i)/(N − 1), minus the same for the reverse."""
    frame = extreme.per_text()
    for number, text in enumerate(TEXTS):
        w = sorted((sign(text) * WEIGHTS[t] for t in text.split()), reverse=True)
        n = len(w)
        forward = sum(x * (n - i) / (n - 1) for i, x in enumerate(w, 1))
        reverse = sum(x * (n - i) / (n - 1) for i, x in enumerate(w[::-1], 1))
        row = frame[(frame.number == number) & (frame.method == "perfect") & (frame.operator == "drop")].iloc[0]
        assert row["delta"] == pytest.approx(forward - reverse, abs=1e-9)
        assert row["comp_area"] == pytest.approx(forward, abs=1e-9)


def test_a_constant_score_is_random_in_expectation(additive: Model) -> None:
    means = [
        whence.faithfulness(additive, TEXTS, [perfect, constant], operators="drop", random=1, ceiling="none", seed=s)
        .values("delta", "drop")
        .mean(0)
        for s in range(16)
    ]
    average, spread = np.mean(means, 0)[1], np.std(means, 0)[1]
    assert abs(average) < 3 * spread / 4
    assert np.mean(means, 0)[0] > 10 * abs(average)


def test_order_and_shards_change_nothing(additive: Model, extreme: Faithfulness, tmp_path: Path) -> None:
    backwards = whence.faithfulness(additive, TEXTS[::-1], METHODS, save=tmp_path / "backwards")
    assert backwards.records[::-1] == extreme.records
    shards = [
        whence.faithfulness(additive, part, METHODS, save=tmp_path / f"shard {len(part)}")
        for part in (TEXTS[:13], TEXTS[13:])
    ]
    assert Faithfulness.joined(shards).records == extreme.records
    assert Faithfulness.joined(shards).verdict() == extreme.verdict()
    other = whence.faithfulness(additive, TEXTS[:2], METHODS, seed=1)
    with pytest.raises(InputError, match="differ"):
        Faithfulness.joined([shards[0], other])


def test_texts_that_share_batches_change_nothing_but_rounding(additive: Model, extreme: Faithfulness) -> None:
    together = whence.faithfulness(additive, TEXTS, METHODS)
    assert together.verdict() == extreme.verdict()
    for one, alone in zip(together.records, extreme.records, strict=True):
        assert (one.key, one.scores, one.units) == (alone.key, alone.scores, alone.units)
        for operator, by_method in alone.curves.items():
            for method, curve in by_method.items():
                assert one.curves[operator][method].forward == pytest.approx(curve.forward, abs=1e-12)
                assert one.curves[operator][method].reverse == pytest.approx(curve.reverse, abs=1e-12)


def test_save_and_load(extreme: Faithfulness, tmp_path: Path) -> None:
    loaded = Faithfulness.load(extreme.save(tmp_path / "run.jsonl"))
    assert loaded.records == extreme.records
    assert loaded.table().equals(extreme.table())
    (tmp_path / "other.jsonl").write_text('{"kind": "else"}\n')
    with pytest.raises(InputError, match="damaged"):
        Faithfulness.load(tmp_path / "other.jsonl")
    with pytest.raises(InputError, match="no file"):
        Faithfulness.load(tmp_path / "nothing.jsonl")


def _until_killed(path: str, model: Model) -> None:
    def die(_what: str, done: float, _total: float) -> None:
        if done == 7:
            os.kill(os.getpid(), 9)

    whence.faithfulness(model, TEXTS, METHODS, save=path, progress=die)


def test_a_killed_run_goes_on(additive: Model, extreme: Faithfulness, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    process = multiprocessing.get_context("fork").Process(target=_until_killed, args=(str(path), additive))
    process.start()
    process.join()
    assert process.exitcode == -9
    assert len(path.read_text().splitlines()) == 1 + 7
    with path.open("ab") as file:
        file.write(b'{"key": "cut off')
    asked: list[str] = []

    def counting(model: Model, text: str) -> list[float]:
        asked.append(text)
        return perfect(model, text)

    counting.__name__ = "perfect"
    resumed = whence.faithfulness(additive, TEXTS, [counting, *METHODS[1:]], save=path)
    assert resumed.records == extreme.records
    assert asked == TEXTS[7:]
    assert Faithfulness.load(path).records == extreme.records


def test_another_run_is_refused_with_the_difference(additive: Model, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    whence.faithfulness(additive, TEXTS[:2], METHODS, save=path, random=2)
    before = path.read_bytes()
    with pytest.raises(InputError, match="seed"):
        whence.faithfulness(additive, TEXTS[:2], METHODS, save=path, random=2, seed=5)
    with pytest.raises(InputError, match="exists"):
        whence.faithfulness(additive, TEXTS[:2], METHODS, save=path, random=2, resume=False)
    assert path.read_bytes() == before


def test_other_texts_scores_and_answers_are_another_run(additive: Model, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    good = [perfect(additive, t) for t in TEXTS[:3]]
    whence.faithfulness(additive, TEXTS[:3], {"mine": good}, save=path)
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"differs in texts \(SHA-256 [0-9a-f]{12} there"):
        whence.faithfulness(additive, TEXTS[1:4], {"mine": good}, save=path)
    with pytest.raises(InputError, match=r"differs in questions \(SHA-256"):
        whence.faithfulness(additive, TEXTS[:3], {"mine": [[-s for s in one] for one in good]}, save=path)
    with pytest.raises(InputError, match=r"differs in questions \(SHA-256"):
        whence.faithfulness(additive, TEXTS[:3], {"mine": good}, save=path, target=[1, 0, 1])
    assert path.read_bytes() == before


def test_a_file_cut_anywhere_is_refused(additive: Model, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    whole = whence.faithfulness(additive, TEXTS[:3], METHODS, save=path, random=2)
    data = path.read_bytes()
    assert whole.save(tmp_path / "again.jsonl").read_bytes() == data
    ends = [at for at, byte in enumerate(data) if byte == 10]
    for at in (0, 1, *ends, *(end + 1 for end in ends[:-1]), *range(7, len(data), 997)):
        path.write_bytes(data[:at])
        with pytest.raises(InputError, match=r"damaged|not whole|holds no run"):
            Faithfulness.load(path)
    path.write_bytes(data + data[ends[0] + 1 : ends[1] + 1])
    with pytest.raises(InputError, match="added to"):
        Faithfulness.load(path)
    path.write_bytes(data[: ends[2] + 5])
    assert Faithfulness.load(path, unfinished=True).records == whole.records[:2]
    assert whence.faithfulness(additive, TEXTS[:3], METHODS, save=path, random=2).records == whole.records
    assert path.read_bytes() == data


def test_a_finished_run_says_so_and_does_nothing(additive: Model, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    texts = [*TEXTS[:3], TEXTS[0]]
    first = whence.faithfulness(additive, texts, METHODS, save=path, random=2)
    before, said = path.read_bytes(), list[str]()

    def never(_what: str, _done: float, _total: float) -> None:
        raise AssertionError("a finished run did something")

    again = whence.faithfulness(additive, texts, METHODS, save=path, random=2, say=said.append, progress=never)
    assert said == [f"The run in {str(path)!r} is finished: nothing was done."]
    assert again.records == first.records
    assert path.read_bytes() == before


def test_a_method_that_fails_is_named_and_its_text_leaves_every_pair(additive: Model) -> None:
    def sometimes(model: Model, text: str) -> list[float]:
        if text == TEXTS[3]:
            raise ValueError("no idea")
        return perfect(model, text)

    def never(_model: Model, _text: str) -> list[float]:
        raise RuntimeError("always")

    found = whence.faithfulness(additive, TEXTS, [perfect, sometimes, never])
    assert 3 not in found.paired
    assert len(found.paired) == len(TEXTS) - 1
    assert found.failures["sometimes"] == [(3, "ValueError: no idea")]
    assert found.methods == ("perfect", "sometimes")
    said = "\n".join(found.verdict())
    assert "sometimes failed on 1 of 36 texts" in said
    assert "never failed on 36 of 36 texts (it is left out)" in said
    assert "Not separated from" not in said.split("Among")[0]


def test_few_texts_give_no_ranking(additive: Model) -> None:
    found = whence.faithfulness(additive, TEXTS[:5], METHODS)
    assert "too few" in " ".join(found.verdict())
    assert "beats" not in " ".join(found.verdict())
    one = whence.faithfulness(additive, TEXTS[0], METHODS)
    assert len(one.records) == 1
    assert "1 text: too few" in " ".join(one.verdict())


def test_a_text_of_one_unit_is_counted_and_not_scored(additive: Model) -> None:
    found = whence.faithfulness(additive, ["good", *TEXTS[:3]], METHODS)
    assert found.paired == (1, 2, 3)
    assert "1 of 4 texts have fewer than two units" in " ".join(found.verdict())
    with pytest.raises(InputError, match="no text was explained"):
        whence.faithfulness(additive, "good", METHODS).table()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": "banana"}, "'banana' is no class of additive; there are: negative \\(0\\), positive \\(1\\)"),
        ({"target": 7}, "7 is no class"),
        ({"target": "gold"}, "needs labels"),
        ({"target": ["positive"]}, "1 entries for 2 texts"),
        ({"target": "positive", "foil": "positive"}, "both 'positive'"),
        ({"units": "letter"}, "'word' or 'token'"),
        ({"operators": ("burn",)}, "burn"),
        ({"operators": ()}, "choose among"),
        ({"ceiling": "sky"}, "sky"),
        ({"random": -1}, "random=-1"),
        ({"random": 1.5}, r"random=1\.5"),
        ({"methods": []}, "no method"),
        ({"methods": {"mine": [[1.0]]}}, "scores for 1 texts"),
        ({"methods": [perfect, perfect]}, "came twice"),
        ({"methods": {"random": perfect}}, "'random' is taken"),
        ({"methods": "altie"}, "altie"),
        ({"rationales": [[1]]}, "1 entries for 2 texts"),
        ({"rationales": [[1, 0], [0] * 3]}, "the rationale of text 0 has 2 marks"),
        ({"rationales": [[(0, 999)], [0] * 3]}, r"text 0 marks characters \[0, 999\]"),
    ],
)
def test_bad_input_is_refused(additive: Model, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        whence.faithfulness(additive, TEXTS[:2], **{"methods": METHODS, **options})


def test_no_texts_and_wrong_scores(additive: Model) -> None:
    with pytest.raises(InputError, match="no texts"):
        whence.faithfulness(additive, [], METHODS)
    with pytest.raises(InputError, match="texts=None"):
        whence.faithfulness(additive, None, METHODS)
    with pytest.raises(InputError, match="text 1: the text '' is empty"):
        whence.faithfulness(additive, [TEXTS[0], ""], METHODS)
    broken = whence.faithfulness(additive, TEXTS[:2], {"mine": [[1.0], [2.0]]})
    assert broken.verdict()[-1] == "No method explained any text: there is nothing to compare."
    found = whence.faithfulness(additive, TEXTS[:2], [perfect, lambda _model, _text: [1.0, 2.0]])
    assert "scores of shape (2,)" in found.failures["<lambda>"][0][1]


def test_tokens_and_words_named_targets_and_json(additive: Model) -> None:
    found = whence.faithfulness(additive, TEXTS[:3], METHODS, target="negative", units="token")
    assert {r.target for r in found.records} == {"negative"}
    assert json.loads(json.dumps(found.to_dict()))["settings"]["units"] == "token"
    # Against "negative" the perfect explanation of "positive" is upside down.
    positive = whence.faithfulness(additive, TEXTS[:3], METHODS, target="positive", units="token")
    deltas = [f.values("delta", "drop")[:, 0] for f in (found, positive)]
    assert np.allclose(deltas[0], -deltas[1])


def test_curves_differences_and_plot(extreme: Faithfulness) -> None:
    curves = extreme.curves()
    start = curves[curves["share"] == 0.0]["output"]
    assert start.max() - start.min() < 1e-12  # every curve starts at the whole text
    against = extreme.differences("perfect").set_index(["method", "operator"])
    assert against.loc[("random", "drop"), "high"] < 0
    assert against.loc[("random", "drop"), "holm"] < 0.05
    with pytest.raises(InputError, match="not among"):
        extreme.differences("nobody")
    axes = extreme.plot(methods=["perfect", "random"])
    assert len(axes.lines) == 4
    assert "Faithfulness" in extreme._repr_html_()


def test_a_data_set_and_an_encoding_are_taken_as_they_are(classifier: Model) -> None:
    datasets = pytest.importorskip("datasets")
    texts = ["the film was good", "the film was very dull"]
    settings: dict[str, Any] = {"methods": "occlusion", "random": 0, "ceiling": "none", "units": "token"}
    expected = whence.faithfulness(classifier, texts, **settings)
    data = datasets.Dataset.from_dict({"text": texts, "label": [1, 0]})
    assert whence.faithfulness(classifier, data, **settings).table().equals(expected.table())
    assert len(whence.faithfulness(classifier, data, target="gold", **settings).records) == 2
    encoded = classifier.tokenizer(texts, padding=True, return_tensors="pt")
    assert whence.faithfulness(classifier, encoded, **settings).table().equals(expected.table())


def test_an_encoder_decoder_loses_source_tokens_and_its_target_is_forced(translator: Model) -> None:
    """Against a plain loop over the model: the source without its first k words, what was written as it is."""
    source, written = "the film was good and very fine", "the film"
    found = whence.faithfulness(
        translator, [(source, written)], ["alti", "occlusion", "last-attention"], "good", ceiling="none", random=1
    )
    record = found.records[0]
    assert record.units == tuple(source.split())
    assert "scores what was written" in record.failures["last-attention"]
    forced = torch.tensor([[0, *translator.tokenizer(written).input_ids[:-1]]])  # begun, and not ended
    target = translator.tokenizer.convert_tokens_to_ids("good")
    for method, scores in record.scores.items():
        order = np.argsort(-np.array(scores), kind="stable")
        for k in range(len(order)):
            left = [w for i, w in enumerate(source.split()) if i not in order[:k]]
            ids = translator.tokenizer(" ".join(left), return_tensors="pt").input_ids
            with torch.no_grad():
                logits = translator.model(input_ids=ids, decoder_input_ids=forced).logits[0, -1].double()
            assert record.curves["drop"][method].forward[k] == pytest.approx(
                float(logits.softmax(-1)[target]), abs=1e-6
            )
