"""The engine of `whence.faithfulness` against the usual ways, in one run on one thread.

    python benchmarks/faithfulness.py [--texts 225 --baseline 12]

Orders of twenty methods on real sentences are made first (not timed). Then the outputs that the measures need are found in
several ways, which must agree to 1e-6, for two jobs: the published bins, and full curves (every prefix and suffix).

    ours                         each distinct set once, for all methods, in batches sorted by length
    ferret's loop                for every explanation and each of its two measures: the whole text, then a batch of the texts
                                 with words removed, tokenised again; equal sets that follow each other run once
    one batch an explanation     the two measures of an explanation in one batch, without the whole text: fewer calls than any
                                 library makes
    one by one                   every text on its own (ALTI's `aupc.py`)

The bar: at least 10 times a batch per explanation, 15 times one by one. Ours runs at the model's own speed, so that the ratio
cannot exceed the tokens (with padding) that the others run over those that ours runs, but for what their calls cost; that
bound is printed. Last, full curves of all sentences by ours.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import whence
from whence.faithful.curves import bin_sizes, order_of, prefixes
from whence.faithful.engine import Engine
from whence.faithful.evaluate import TOGETHER
from whence.faithful.explainers import Explained, explainers
from whence.faithful.question import TextQuestion, prepared_text, units_of

SHARED = Path(os.environ.get("WHENCE_SHARED", Path(__file__).resolve().parents[2] / "shared"))
METHODS = (
    "attention,effective,rollout,effective-rollout,norms,alti,globenc,decompx,value-zeroing,gradient,input-x-gradient,"
    "absolute-input-x-gradient,integrated-gradients,absolute-integrated-gradients,gradient-rollout,last-attention,"
    "last-effective,occlusion,lime,kernel-shap"
)

Asked = tuple[TextQuestion, list[tuple[int, ...]]]


def asked(model: Any, texts: list[str]) -> list[Asked]:
    """Every text with the orders of all methods."""
    found = []
    for number, text in enumerate(texts):
        prepared = prepared_text(model, text)
        question = TextQuestion(prepared, units_of(prepared, "word", None), None, 1)
        explained = Explained(model, question, number)
        scores = [e.of_units(explained) for e in explainers(METHODS, len(texts), model)]
        found.append((question, [order_of(s, question.generator(0, "ties")) for s in scores]))
    return found


def at_bins(order: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The sets of the two measures at the published bins: the top k gone, and all but the top k gone."""
    forward, n = prefixes(order), len(order)
    return [forward[k] for k in bin_sizes(n)], [forward[n] & ~forward[k] for k in bin_sizes(n)]


def at_every_k(order: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The sets of full curves, most and least important first."""
    return prefixes(order)[1:-1], prefixes(order[::-1])[1:-1]


Job = Callable[[tuple[int, ...]], tuple[list[int], list[int]]]


def ours(model: Any, given: list[Asked], job: Job) -> np.ndarray[Any, Any]:
    engine, values = Engine(model), []
    for start in range(0, len(given), TOGETHER):
        some = [
            (question, [s for order in orders for measure in job(order) for s in measure])
            for question, orders in given[start : start + TOGETHER]
        ]
        engine.prepare((question, "drop", sets) for question, sets in some)
        values += [engine.outputs(question, "drop", sets) for question, sets in some]
        engine.forget()
    print(f"   ({engine.runs:,} of {engine.asked:,} sets were run)")
    return np.concatenate(values)


def words(question: TextQuestion, removed: int) -> list[str]:
    return [name for u, name in enumerate(question.units.names) if not removed >> u & 1]


def probabilities(model: Any, texts: list[list[str]]) -> list[float]:
    batch = model.tokenizer(texts, is_split_into_words=True, padding=True, return_tensors="pt")
    with torch.no_grad():
        return torch.softmax(model.model(**batch).logits.double(), -1)[:, 1].tolist()


def ferrets_loop(model: Any, given: list[Asked], job: Job) -> np.ndarray[Any, Any]:
    values: list[float] = []
    for question, orders in given:
        for order in orders:
            for measure in job(order):
                probabilities(model, [words(question, 0)])
                different = [s for s, before in zip(measure, [None, *measure], strict=False) if s != before]
                found = dict(zip(different, probabilities(model, [words(question, s) for s in different]), strict=True))
                values += [found[s] for s in measure]
    return np.array(values)


def batch_per_explanation(model: Any, given: list[Asked], job: Job) -> np.ndarray[Any, Any]:
    values: list[float] = []
    for question, orders in given:
        for order in orders:
            values += probabilities(model, [words(question, s) for measure in job(order) for s in measure])
    return np.array(values)


def one_by_one(model: Any, given: list[Asked], job: Job) -> np.ndarray[Any, Any]:
    values: list[float] = []
    for question, orders in given:
        for order in orders:
            for s in (s for measure in job(order) for s in measure):
                values += probabilities(model, [words(question, s)])
    return np.array(values)


def bound(given: list[Asked], job: Job) -> float:
    """Tokens that a batch per explanation runs, padding included, over the tokens of the distinct sets."""
    theirs = distinct = 0
    for question, orders in given:
        sizes = [len(places) for places in question.units.positions]
        stays = question.prepared.length - sum(sizes)

        def length(removed: int, sizes: list[int] = sizes, stays: int = stays) -> int:
            return stays + sum(size for u, size in enumerate(sizes) if not removed >> u & 1)

        for order in orders:
            lengths = [length(s) for measure in job(order) for s in measure]
            theirs += max(lengths) * len(lengths)
        distinct += sum(map(length, {s for order in orders for measure in job(order) for s in measure}))
    return theirs / distinct


def timed(name: str, run: Callable[[], Any], repeat: int = 1) -> tuple[float, Any]:
    """The shortest of `repeat` runs, in process time: other jobs on the machine do not count."""
    times = []
    for _ in range(repeat):
        start = time.process_time()
        made = run()
        times.append(time.process_time() - start)
    print(f"{name:<28} {min(times):8.3f} s")
    return min(times), made


def compare(title: str, model: Any, given: list[Asked], job: Job) -> None:
    print(f"{title}: {len(given)} sentences × {len(given[0][1])} methods")
    mine, values = timed("ours", lambda: ours(model, given, job), 3)
    for name, way, bar in (
        ("ferret's loop", ferrets_loop, 10),
        ("one batch an explanation", batch_per_explanation, 10),
        ("one by one", one_by_one, 15),
    ):
        spent, found = timed(name, lambda way=way: way(model, given, job))  # type: ignore[misc]
        worst = np.abs(values - found).max()
        print(f"   ours is {spent / mine:.1f} times as fast (bar {bar}); largest difference {worst:.1e}")
        assert worst < 1e-6, f"{name} gives other outputs"
    print(f"   tokens, one batch an explanation over ours: {bound(given, job):.1f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=int, default=225)
    parser.add_argument("--baseline", type=int, default=12, help="sentences on which the other ways run, too")
    asked_for = parser.parse_args()
    folder = SHARED / "models" / "bert-tiny-sst2"
    if not folder.is_dir():
        print("left out: there is no bert-tiny-sst2 beside the project")
        return
    torch.set_num_threads(1)
    model = whence.load(str(folder))
    lines = (SHARED / "data" / "sst2-sentences" / "stsa.binary.test").read_text("latin-1").split("\n")
    texts = [t for t in (line.partition(" ")[2].strip() for line in lines) if len(t.split()) > 1][: asked_for.texts]
    given = asked(model, texts)
    few = given[: asked_for.baseline]
    compare("published bins", model, few, at_bins)
    compare("full curves", model, few, at_every_k)
    spent, values = timed(f"full curves, {len(given)} sentences", lambda: ours(model, given, at_every_k))
    print(f"   {1e6 * spent / len(values):.0f} µs for each output asked for")


if __name__ == "__main__":
    main()
