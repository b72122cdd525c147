"""`whence.faithfulness`: which of these explanations does the model react to as they say?"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from whence.errors import InputError
from whence.faithful.ceilings import EXACT, Ceiling, beam_ceiling, exact_ceiling
from whence.faithful.curves import flip, order_of, prefixes, ties_in
from whence.faithful.engine import OPERATORS, Engine, mask_id
from whence.faithful.explainers import Explained, Explainer, explainers, scores_of
from whence.faithful.question import TextQuestion, asking_position, prepared_text, units_of
from whence.faithful.rationale import marks_of
from whence.faithful.records import Curve, TextRecord
from whence.faithful.result import METHOD, Faithfulness
from whence.faithful.targets import GOLD, one_each, target_id, target_name
from whence.model.identity import model_hashes
from whence.model.load import Model, as_model
from whence.reading.datasets import dataset_texts, is_dataset
from whence.reading.texts import Texts
from whence.reading.tokenised import unknown_id
from whence.results.files import as_plain
from whence.results.progress import Progress, Say, counted
from whence.results.records import Records
from whence.results.run_identity import RunIdentity, hash_texts

CEILINGS = ("auto", "exact", "none")
TOGETHER = 8  # texts that share batches where nothing is saved


def faithfulness(
    model: Any,
    texts: Any,
    methods: Any = "fast",
    target: Any = "predicted",
    units: str = "word",
    operators: Sequence[str] = OPERATORS,
    random: int = 10,
    ceiling: str | None = "auto",
    rationales: Sequence[Any] | None = None,
    seed: int = 0,
    save: str | os.PathLike[str] | None = None,
    resume: bool = True,
    *,
    foil: Any = None,
    documents: Sequence[Any] | None = None,
    truncate: bool = False,
    progress: Progress = False,
    say: Say | None = None,
) -> Faithfulness:
    """Which explanation is faithful: does the model lose its prediction as fast as the explanation says?

    Every method orders the units of a text; they are removed one after another, most important first (and least important
    first), and the watched output v is read: F(π) = 1/(N−1)·Σ_k [v(∅) − v(π_1…π_k)], Δ = F(π) − F(reverse π).

    methods: "fast", "all" (but flow and hidden-token attribution), names of the method table, {"mine": scores of every
    text}, a function of (model, text), or a list of these; scores are per token or per unit. target: "predicted", "gold"
    (texts with labels), a class, a token, or one per text; never chosen again when units go. foil: with it the output is
    logit(target) − logit(foil). Language models: the asking position is the mask token, or the last one; encoder–decoders
    take (source, written so far) and lose source tokens. units: "word" or "token". operators: "drop" deletes ids, "mask"
    puts the mask token in their place. random: so many pairs of a random order and its reverse. ceiling: "auto" (exact up
    to 12 units, beam search beyond), "exact" (only those texts), "none". rationales: one per text, see `whence.plausibility`.
    save: a file of JSON lines; with `resume` a run that was stopped goes on there, another is refused. `say`: told when the
    run there is finished. documents: the document of each text,
    where texts share one. Everything random is drawn from (seed, text), so order, shards and resuming change nothing; without
    `save` short texts share batches, and outputs then depend on their neighbours in the last digits.

    >>> import whence
    >>> result = whence.faithfulness("…", texts, methods="alti,occlusion")    # doctest: +SKIP
    >>> print(*result.verdict(), sep="\\n")                                    # doctest: +SKIP
    """
    chosen = as_model(model)
    texts = dataset_texts(texts) if is_dataset(texts) else texts
    given = _texts(texts)
    operators = _operators(operators, chosen)
    if ceiling is not None and ceiling not in CEILINGS:
        raise InputError(f"ceiling={ceiling!r} is not one of {', '.join(CEILINGS)}.")
    if random < 0 or int(random) != random:
        raise InputError(f"random={random!r}: give 0 or more pairs of random orders, a whole number.")
    for name, many in (("rationales", rationales), ("documents", documents)):
        if many is not None and len(many) != len(given):
            raise InputError(f"{name} has {len(many)} entries for {len(given)} texts: give one for each.")
    asked = explainers(methods, len(given), chosen)
    targets = one_each("target", _gold(texts) if target == GOLD else target, len(given))
    foils = one_each("foil", foil, len(given))
    settings = {
        "model": chosen.name,
        "methods": [e.name for e in asked],
        "signed": {e.name: e.signed for e in asked},
        "perturbs": [e.name for e in asked if e.perturbs],
        "units": units,
        "operators": list(operators),
        "random": random,
        "ceiling": ceiling or "none",
        "foil": foil is not None,
        "seed": seed,
    }
    beside = [targets, foils, rationales, documents, [_given_scores(asked, number) for number in range(len(given))]]
    hashes = model_hashes(chosen) | {
        "texts": hash_texts(map(_entry, given)),
        "questions": hash_texts(map(_entry, beside)),
    }
    identity = RunIdentity(METHOD, hashes, settings | {"truncate": truncate})
    engine = Engine(chosen)
    records = []
    with _saved(save, identity, resume) as saved, counted("texts", len(given), progress) as step:
        finished = {record["key"]: TextRecord.from_dict(record) for record in saved or ()}
        if saved is not None and saved.finished is not None:
            if say is not None:
                say(f"The run in {str(save)!r} is finished: nothing was done.")
            return Faithfulness(identity, tuple(finished[key] for key in saved.finished))
        # A saved run that is killed loses at most the text under way; else several short texts share batches.
        several = 1 if saved is not None else TOGETHER
        for start in range(0, len(given), several):
            begun: dict[str, Begun] = {}
            keys = []
            for number in range(start, min(start + several, len(given))):
                with _of_text(number, len(given)):
                    made = _question(chosen, given[number], targets[number], foils[number], units, engine, truncate)
                rationale = None if rationales is None else rationales[number]
                keys.append(_key(made[0], asked, number, rationale))
                if keys[-1] not in finished and keys[-1] not in begun:
                    begun[keys[-1]] = _begin(engine, *made, number, asked, settings, rationale)
            engine.prepare((one.question, operator, one.sets()) for one in begun.values() for operator in operators)
            for number, key in enumerate(keys, start):
                if key not in finished:
                    document = None if documents is None else str(documents[number])
                    finished[key] = replace(_record(engine, begun[key], settings), key=key, document=document)
                    if saved is not None:
                        saved.append(finished[key].to_dict())
                records.append(finished[key])
                step()
            engine.forget()
        if saved is not None:
            saved.finish([record.key for record in records])
    return Faithfulness(identity, tuple(records))


@contextmanager
def _of_text(number: int, texts: int) -> Iterator[None]:
    """Errors about one of many texts say which."""
    try:
        yield
    except InputError as problem:
        raise problem if texts == 1 else InputError(f"text {number}: {problem}") from problem


def _key(question: TextQuestion, asked: Iterable[Explainer], number: int, rationale: Any) -> str:
    """The content that a record depends on: the question, scores that were given for this text, its rationale."""
    given = _given_scores(asked, number)
    if not given and rationale is None:
        return question.key
    content = json.dumps([question.key, given, None if rationale is None else list(rationale)], default=list)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _given_scores(asked: Iterable[Explainer], number: int) -> list[Any]:
    """The scores that were handed over for one text, by method."""
    return [[one.name, np.asarray(scores_of(one.given(number))).tolist()] for one in asked if one.given is not None]


def _entry(given: Any) -> Any:
    """What a caller gave, as something that can be hashed by its content."""
    if isinstance(given, str) or given is None:
        return given
    if isinstance(given, Mapping):
        return [part for name, value in sorted(given.items()) for part in (name, as_plain(value))]
    return [as_plain(one) for one in given] if isinstance(given, Iterable) else [as_plain(given)]


def _texts(texts: Any) -> list[Any]:
    if isinstance(texts, Mapping) or hasattr(texts, "input_ids"):  # a BatchEncoding: one text per row
        return [{name: rows[i] for name, rows in dict(texts).items()} for i in range(len(texts["input_ids"]))]
    if not isinstance(texts, Iterable):
        raise InputError(f"texts={texts!r} is a {type(texts).__name__}: give a text, or a list of texts.")
    given = [texts] if isinstance(texts, (str, tuple)) else list(texts)
    if isinstance(texts, Texts):
        given = [t if len(t) > 1 else t[0] for t in texts.sequences]
    if not given:
        raise InputError("no texts were given: there is nothing to remove words from.")
    return given


def _gold(texts: Any) -> Sequence[Any]:
    labels = getattr(texts, "labels", None)
    if labels is None:
        raise InputError(
            "target='gold' needs labels: read texts with whence.read_texts(…, label=…), or give one target each."
        )
    return list(labels)


def _operators(operators: Any, model: Model) -> tuple[str, ...]:
    named = (operators,) if isinstance(operators, str) else tuple(operators)
    unknown = [o for o in named if o not in OPERATORS]
    if unknown or not named:
        raise InputError(f"operators={list(named)!r}: choose among {', '.join(OPERATORS)}.")
    if "mask" in named:
        mask_id(model)
    return named


def _question(
    model: Model, text: Any, target: Any, foil: Any, units: str, engine: Engine, truncate: bool
) -> tuple[TextQuestion, float]:
    """The question about one text, and the watched output of the whole text."""
    prepared = prepared_text(model, text, truncate)
    position = asking_position(model, prepared)
    made = units_of(prepared, units, position, unknown_id(model.tokenizer))
    logits = engine.whole(TextQuestion(prepared, made, position, 0))
    classes = position is None and "decoder_input_ids" not in prepared.inputs
    if classes and len(logits) < 2:
        raise InputError(f"{model.name} has one output, a number and no classes: faithfulness needs a classifier.")
    number = target_id(model, logits, target, classes)
    against = None if foil is None else target_id(model, logits, foil, classes, "foil")
    if against == number:
        raise InputError(f"target and foil are both {target_name(model, number, classes)!r}: a contrast needs two.")
    question = TextQuestion(prepared, made, position, number, against)
    return question, engine.values(question, "drop", [0])[0][0]


def _saved(save: Any, identity: RunIdentity, resume: bool) -> AbstractContextManager[Records | None]:
    """The file of the run, open to go on with; a file of another run is refused with what differs."""
    if save is None:
        return nullcontext()
    if not resume and Path(save).expanduser().exists():
        raise InputError(f"{str(save)!r} exists: give another file, or resume=True to go on with it.")
    return Records(save, identity)


@dataclass(frozen=True)
class Begun:
    """A text that was explained, and whose units are to be removed: every method's order, and random ones."""

    question: TextQuestion
    about: Mapping[str, Any]
    scores: Mapping[str, np.ndarray[Any, Any]]
    failures: Mapping[str, str]
    orders: Mapping[str, tuple[int, ...]]
    drawn: tuple[tuple[int, ...], ...]

    def sets(self) -> list[int]:
        """Every set that a curve needs, each once."""
        both = [o for order in (*self.orders.values(), *self.drawn) for o in (order, order[::-1])]
        return sorted({s for order in both for s in prefixes(order)})


def _begin(
    engine: Engine,
    question: TextQuestion,
    output: float,
    number: int,
    asked: Iterable[Explainer],
    settings: dict[str, Any],
    rationale: Any,
) -> Begun:
    """The explanations of one text. A text of one unit has none."""
    units, seed = question.units, settings["seed"]
    classes = question.position is None and "decoder_input_ids" not in question.prepared.inputs
    text = question.prepared.text or " ".join(units.names)
    about: dict[str, Any] = {
        "key": question.key,
        "text": text,
        "units": units.names,
        "target": target_name(engine.model, question.target, classes),
        "output": output,
        "marks": None if rationale is None else marks_of(rationale, text, units, number),
    }
    scores: dict[str, np.ndarray[Any, Any]] = {}
    failures: dict[str, str] = {}
    if len(units) < 2:
        return Begun(question, about, scores, failures, {}, ())
    explained = Explained(engine.model, question, number)
    for one in asked:
        try:
            scores[one.name] = one.of_units(explained)
        except Exception as problem:
            failures[one.name] = f"{type(problem).__name__}: {problem}"
    orders = {name: order_of(values, question.generator(seed, "ties")) for name, values in scores.items()}
    generator = question.generator(seed, "random")
    drawn = tuple(tuple(int(u) for u in generator.permutation(len(units))) for _ in range(settings["random"]))
    return Begun(question, about, scores, failures, orders, drawn)


def _record(engine: Engine, begun: Begun, settings: dict[str, Any]) -> TextRecord:
    """Everything about one text; its outputs are mostly there already."""
    if len(begun.question.units) < 2:
        return TextRecord(**begun.about)
    question = begun.question
    curves, random, ceilings = {}, {}, {}
    for operator in settings["operators"]:
        curves[operator] = {name: _curve(engine, question, operator, order) for name, order in begun.orders.items()}
        random[operator] = tuple(_curve(engine, question, operator, order) for order in begun.drawn)
        found = _ceiling(engine, question, operator, settings["ceiling"])
        if found is not None:
            ceilings[operator] = _no_lower(found, (*curves[operator].values(), *random[operator]))
    return TextRecord(
        **begun.about,
        scores={name: tuple(values.tolist()) for name, values in begun.scores.items()},
        ties={name: ties_in(values) for name, values in begun.scores.items()},
        failures=begun.failures,
        curves=curves,
        random=random,
        ceilings=ceilings,
    )


def _curve(engine: Engine, question: TextQuestion, operator: str, order: tuple[int, ...]) -> Curve:
    forward, reverse = prefixes(order), prefixes(order[::-1])
    found = engine.values(question, operator, [*forward, *reverse])
    return Curve(
        tuple(found[s][0] for s in forward), tuple(found[s][0] for s in reverse), flip([found[s][1] for s in forward])
    )


def _ceiling(engine: Engine, question: TextQuestion, operator: str, kind: str) -> Ceiling | None:
    n = len(question.units)
    outputs: Callable[[Sequence[int]], np.ndarray[Any, Any]] = lambda sets: engine.outputs(question, operator, sets)  # noqa: E731
    if kind == "none" or (kind == "exact" and n > EXACT):
        return None
    return exact_ceiling(n, outputs) if n <= EXACT else beam_ceiling(n, outputs)


def _no_lower(ceiling: Ceiling, curves: Iterable[Curve]) -> Ceiling:
    """A beam may miss what one of the orders reached: the ceiling is then that order."""
    if ceiling.kind == "exact":
        return ceiling
    from whence.faithful.curves import area

    areas = [area(np.array(v)) for c in curves for v in (c.forward, c.reverse)]
    return Ceiling(max(ceiling.best, *areas), min(ceiling.worst, *areas), ceiling.kind)
