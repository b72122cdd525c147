"""Every set once, equal to running the variants one by one; nothing else in a batch changes a value."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import whence
from tests.faithful.faithful_models import WEIGHTS
from whence.errors import InputError
from whence.faithful.engine import Engine, batches, full
from whence.faithful.question import TextQuestion, asking_position, prepared_text, units_of
from whence.model.load import Model
from whence.reading.tokenised import unknown_id

TEXT = "the film was not very good and the film was dull"


def question(
    model: Model, text: Any = TEXT, target: int = 1, foil: int | None = None, units: str = "word"
) -> TextQuestion:
    prepared = prepared_text(model, text)
    position = asking_position(model, prepared)
    return TextQuestion(prepared, units_of(prepared, units, position), position, target, foil)


def one_by_one(model: Model, asked: TextQuestion, operator: str, removed: int) -> float:
    """Slow and obvious: a list of ids, the model alone, softmax in float64."""
    gone = {i for u, places in enumerate(asked.units.positions) if removed >> u & 1 for i in places}
    ids = asked.prepared.inputs["input_ids"][0].tolist()
    types = asked.prepared.inputs["token_type_ids"][0].tolist()
    if operator == "drop":
        kept = [i for i in range(len(ids)) if i not in gone]
    else:
        kept = list(range(len(ids)))
        ids = [4 if i in gone else t for i, t in enumerate(ids)]
    with torch.no_grad():
        logits = model.model(
            input_ids=torch.tensor([[ids[i] for i in kept]]), token_type_ids=torch.tensor([[types[i] for i in kept]])
        ).logits[0]
    if logits.dim() == 2:
        logits = logits[kept.index(asked.position)]
    logits = logits.double()
    if asked.foil is not None:
        return float(logits[asked.target] - logits[asked.foil])
    return float(torch.softmax(logits, -1)[asked.target])


@pytest.mark.parametrize("operator", ["drop", "mask"])
@pytest.mark.parametrize("kind", ["classifier", "pair", "masked", "contrast"])
def test_equal_to_one_by_one(classifier: Model, masked: Model, operator: str, kind: str) -> None:
    model = classifier if kind in ("classifier", "pair") else masked
    text: Any = {"pair": ("the film was good", "the film was not dull")}.get(kind, TEXT)
    if model is masked:
        text = "the film was [MASK] and not very good"
    asked = question(model, text, foil=7 if kind == "contrast" else None, target=9 if model is masked else 1)
    draw = random.Random(0)
    sets = [0, full(len(asked.units)), *(draw.getrandbits(len(asked.units)) for _ in range(40))]
    found = Engine(model).outputs(asked, operator, sets)
    slow = [one_by_one(model, asked, operator, s) for s in sets]
    size = max(1.0, np.abs(slow).max())  # a contrast is a difference of logits, rounded at their size
    assert np.abs(found - slow).max() < 1e-6 * size
    assert len(set(np.round(found, 4))) > 10  # the model does react


def test_each_set_and_each_equal_input_runs_once(classifier: Model) -> None:
    asked = question(classifier, "a a b")
    engine = Engine(classifier)
    engine.values(asked, "drop", [0b001, 0b010, 0b001, 0])
    engine.values(asked, "drop", [0b010, 0])
    assert engine.asked == 6
    assert engine.runs == 2  # either "a" removed leaves the same ids
    assert engine.values(asked, "drop", [0b001])[0b001] == engine.values(asked, "drop", [0b010])[0b010]


def test_values_do_not_depend_on_batch_mates(classifier: Model) -> None:
    asked = question(classifier)
    sets = [random.Random(1).getrandbits(len(asked.units)) for _ in range(60)]
    together = Engine(classifier).outputs(asked, "drop", sets)
    alone = np.array([Engine(classifier).outputs(asked, "drop", [s])[0] for s in sets])
    backwards = Engine(classifier).outputs(asked, "drop", sets[::-1])[::-1]
    assert np.abs(together - alone).max() < 1e-6
    assert np.abs(together - backwards).max() < 1e-6


def test_texts_that_share_batches_have_the_values_they_have_alone(classifier: Model, masked: Model) -> None:
    for model, texts, targets in (
        (classifier, ("the film was good", "a b c d e f g", "not bad"), (0, 1, 1)),
        (masked, ("the [MASK] was good and fine", "the film was [MASK]"), (20, 21)),
    ):
        asked = [question(model, text, target=target) for text, target in zip(texts, targets, strict=True)]
        sets = [[random.Random(i).getrandbits(len(one.units)) for _ in range(9)] for i, one in enumerate(asked)]
        engine = Engine(model)
        engine.prepare((one, "drop", many) for one, many in zip(asked, sets, strict=True))
        runs = engine.runs
        for one, many in zip(asked, sets, strict=True):
            slow = [one_by_one(model, one, "drop", s) for s in many]
            assert np.abs(engine.outputs(one, "drop", many) - slow).max() < 1e-6
        assert engine.runs == runs  # nothing runs twice


def test_special_tokens_stay_in_every_variant(additive: Model) -> None:
    asked = question(additive)
    additive.model.seen.clear()
    Engine(additive).values(asked, "drop", range(full(len(asked.units)) + 1))
    assert len(additive.model.seen) > 500
    for ids in additive.model.seen:
        assert ids[0] == 2
        assert ids[-1] == 3


def test_the_whole_text_gives_the_models_own_output(additive: Model) -> None:
    asked = question(additive)
    expected = 0.5 + sum(WEIGHTS[w] for w in TEXT.split())
    assert Engine(additive).outputs(asked, "drop", [0])[0] == pytest.approx(expected, abs=1e-12)


def test_the_asking_position_is_no_unit(masked: Model) -> None:
    asked = question(masked, "the film was [MASK] and dull", target=9)
    assert asked.position == 4
    assert asked.units.names == ("the", "film", "was", "and", "dull")
    with pytest.raises(InputError, match="2 mask tokens"):
        question(masked, "the [MASK] was [MASK]", target=9)


def test_an_unknown_word_is_removable(classifier: Model) -> None:
    prepared = prepared_text(classifier, "the zebra was good")
    units = units_of(prepared, "word", None, unknown_id(classifier.tokenizer))
    assert units.names == ("the", "[UNK]", "was", "good")
    assert units.spans[1] == (3, 10)


def test_a_model_whose_padding_leaks_runs_in_batches_of_one_length(classifier: Model) -> None:
    class Leaky(torch.nn.Module):
        """Ignores its attention mask: padding changes its outputs."""

        config = classifier.model.config

        def __init__(self) -> None:
            super().__init__()
            self.inner = classifier.model

        def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor) -> Any:
            return self.inner(input_ids=input_ids, token_type_ids=token_type_ids)

    LeakyForSequenceClassification = type("LeakyForSequenceClassification", (Leaky,), {})
    model = Model(LeakyForSequenceClassification().eval(), classifier.tokenizer, name="leaky")
    asked = question(model)
    sets = [random.Random(2).getrandbits(len(asked.units)) for _ in range(30)]
    slow = [one_by_one(classifier, asked, "drop", s) for s in sets]
    assert np.abs(Engine(model).outputs(asked, "drop", sets) - slow).max() < 1e-6


def test_batches_are_small_enough_and_hardly_padded() -> None:
    lengths = [random.Random(3).randint(3, 300) for _ in range(500)]
    seen: list[int] = []
    for batch in batches(lengths, 8192, 2, 100):
        width = max(lengths[i] for i in batch)
        assert width * len(batch) <= 8192
        padding = width * len(batch) - sum(lengths[i] for i in batch)
        assert padding <= max(0.1 * width * len(batch), 100)
        seen += batch
    assert sorted(seen) == list(range(500))


def test_a_model_without_a_head_is_refused(classifier: Model) -> None:
    headless = Model(classifier.model.bert, classifier.tokenizer, name="headless")
    asked = question(classifier)
    with pytest.raises(InputError, match="no head"):
        Engine(headless).values(asked, "drop", [0])
    with pytest.raises(InputError, match="no head"):
        whence.faithfulness(headless, "the film was good", "rollout")
