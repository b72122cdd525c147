"""The engine of `whence.faithfulness` against the two usual ways, in one run on one thread.

    python benchmarks/faithfulness.py [--texts 225]

Orders of every cheap method on real sentences are made first (not timed). Then, for 12 sentences and the published bins, the
outputs are found three ways: each distinct set once in batches sorted by length (ours), a batch for every explanation,
tokenised again (ferret's way), and one by one (ALTI's `aupc.py`). The three must agree to 1e-6. Last, full curves of all
sentences by ours. The bar: ≥ 10 times a batch per explanation, ≥ 15 times one by one.
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
from whence.faithful.explainers import Explained, explainers
from whence.faithful.question import Question, prepared_text, units_of

SHARED = Path(os.environ.get("WHENCE_SHARED", Path(__file__).resolve().parents[2] / "shared"))
METHODS = (
    "attention,effective,rollout,effective-rollout,norms,alti,globenc,decompx,value-zeroing,gradient,input-x-gradient,"
    "absolute-input-x-gradient,integrated-gradients,absolute-integrated-gradients,gradient-rollout,last-attention,"
    "last-effective,occlusion,lime,kernel-shap"
)
FEW = 12

Asked = tuple[Question, list[tuple[int, ...]]]


def asked(model: Any, texts: list[str]) -> list[Asked]:
    """Every text with the orders of all methods."""
    found = []
    for number, text in enumerate(texts):
        prepared = prepared_text(model, text)
        question = Question(prepared, units_of(prepared, "word", None), None, 1)
        explained = Explained(model, question, number)
        scores = [e.of_units(explained) for e in explainers(METHODS, len(texts), model)]
        found.append((question, [order_of(s, question.generator(0, "ties")) for s in scores]))
    return found


def at_bins(order: tuple[int, ...]) -> list[int]:
    """The ten sets of one explanation: the top k gone, and all but the top k gone, at the five published bins."""
    forward, n = prefixes(order), len(order)
    return [s for k in bin_sizes(n) for s in (forward[k], forward[n] & ~forward[k])]


def ours(model: Any, given: list[Asked], operator: str = "drop") -> np.ndarray[Any, Any]:
    engine, values = Engine(model), []
    for question, orders in given:
        sets = [s for order in orders for s in at_bins(order)]
        values.append(engine.outputs(question, operator, sets))
        engine.forget()
    print(f"   ({engine.runs:,} of {engine.asked:,} sets were run)")
    return np.concatenate(values)


def words(question: Question, removed: int) -> list[str]:
    return [name for u, name in enumerate(question.units.names) if not removed >> u & 1]


def probabilities(model: Any, batch: Any) -> list[float]:
    with torch.no_grad():
        return torch.softmax(model.model(**batch).logits.double(), -1)[:, 1].tolist()


def batch_per_explanation(model: Any, given: list[Asked]) -> np.ndarray[Any, Any]:
    values = []
    for question, orders in given:
        for order in orders:
            texts = [words(question, s) for s in at_bins(order)]
            batch = model.tokenizer(texts, is_split_into_words=True, padding=True, return_tensors="pt")
            values += probabilities(model, batch)
    return np.array(values)


def one_by_one(model: Any, given: list[Asked]) -> np.ndarray[Any, Any]:
    values = []
    for question, orders in given:
        for order in orders:
            for s in at_bins(order):
                batch = model.tokenizer([words(question, s)], is_split_into_words=True, return_tensors="pt")
                values += probabilities(model, batch)
    return np.array(values)


def timed(name: str, run: Callable[[], Any], repeat: int = 1) -> tuple[float, Any]:
    """The shortest of `repeat` runs, in process time: other jobs on the machine do not count."""
    times = []
    for _ in range(repeat):
        start = time.process_time()
        made = run()
        times.append(time.process_time() - start)
    print(f"{name:<28} {min(times):8.3f} s")
    return min(times), made


def full_curves(model: Any, given: list[Asked]) -> Engine:
    engine = Engine(model)
    for question, orders in given:
        sets = [s for order in orders for o in (order, order[::-1]) for s in prefixes(o)]
        engine.values(question, "drop", sets)
        engine.forget()
    return engine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=int, default=225)
    count = parser.parse_args().texts
    folder = SHARED / "models" / "bert-tiny-sst2"
    if not folder.is_dir():
        print("left out: there is no bert-tiny-sst2 beside the project")
        return
    torch.set_num_threads(1)
    model = whence.load(str(folder))
    lines = (SHARED / "data" / "sst2-sentences" / "stsa.binary.test").read_text("latin-1").split("\n")
    texts = [t for t in (line.partition(" ")[2].strip() for line in lines) if len(t.split()) > 1][:count]
    given = asked(model, texts)
    few = given[:FEW]
    print(f"bert-tiny, {FEW} sentences × {len(few[0][1])} methods × 10 sets")
    mine, values = timed("each set once, sorted", lambda: ours(model, few), 3)
    batched, theirs = timed("a batch per explanation", lambda: batch_per_explanation(model, few), 3)
    single, alone = timed("one by one", lambda: one_by_one(model, few))
    worst = max(np.abs(values - theirs).max(), np.abs(values - alone).max())
    print(f"largest difference {worst:.1e}; {batched / mine:.1f} times a batch per explanation (bar 10), "
          f"{single / mine:.1f} times one by one (bar 15)")  # fmt: skip
    assert worst < 1e-6, "the three ways do not agree"
    spent, engine = timed(f"full curves, {len(given)} × {len(few[0][1])}", lambda: full_curves(model, given))
    print(f"   {engine.runs:,} of {engine.asked:,} sets were run, {1e6 * spent / engine.runs:.0f} µs each")


if __name__ == "__main__":
    main()
