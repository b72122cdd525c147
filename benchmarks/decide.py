"""Decisions against one cold `linprog` for each question, in one run: an atom map, and windows over 1,500 frames.

Baseline: scipy's `linprog` (HiGHS), a new program for every question. Processor time, one thread; answers are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from scipy.optimize import linprog

import whence
from whence import rules
from whence.attention.position_names import atom_candidates

T = TypeVar("T")
# 69 tokens with [CLS] and [SEP].
REACTION = "C=CC(C=C)C(O)C12CC3CC(CC(C3)C1)C2>>C=CC(C=C)C(Br)C12CC3CC(CC(C3)C1)C2"


def timed(call: Callable[[], T]) -> tuple[T, float]:
    begin = time.process_time()
    result = call()
    return result, time.process_time() - begin


def cold(cost: np.ndarray, row: np.ndarray, values: np.ndarray) -> float:
    equal = np.vstack([values.T, np.ones(len(row))])
    return float(linprog(cost, A_eq=equal, b_eq=np.append(row @ values, 1.0), bounds=(0, None), method="highs").fun)


def atoms() -> None:
    trace = whence.trace(whence.load("rxnmapper"), REACTION)
    candidates = atom_candidates(list(trace.tokens))
    queries = list(candidates)
    rule = rules.argmax(candidates)
    whence.decide(trace, rule, layer=10, head=5, queries=queries[:1])  # imports and first calls
    found, ours = timed(lambda: whence.decide(trace, rule, layer=10, head=5, queries=queries))
    rows, values = found.rows[0].numpy(), found.values[0].numpy()

    def baseline() -> list[bool]:
        certain = []
        for i, query in enumerate(queries):
            best = max(candidates[query], key=lambda k: rows[i, k])
            gaps = []
            for rival in candidates[query]:
                if rival != best:
                    cost = np.zeros(len(rows[i]))
                    cost[best], cost[rival] = 1.0, -1.0
                    gaps.append(cold(cost, rows[i], values))
            certain.append(min(gaps, default=1.0) > 0)
        return certain

    theirs, slow = timed(baseline)
    same = theirs == [word == "certified" for word in found.verdicts]
    asked = sum(len(c) - 1 for c in candidates.values())
    print(f"atoms: {len(trace.tokens)} tokens, {len(queries)} product atoms, {asked} questions, same verdicts: {same}")
    programs = sum(d.programs for d in found.decisions)
    print(f"  linprog {slow:.2f} s, whence {ours:.3f} s ({programs} programs), {slow / ours:.1f}x (wanted 5x)")


def frames(count: int = 40) -> None:
    model = whence.load("whisper")
    generator = np.random.default_rng(0)
    seconds = np.arange(6 * 16_000) / 16_000
    # A made-up sound: no recording is needed for rows of real heads.
    sound = 0.3 * np.sin(2 * np.pi * (140 + 40 * np.sin(3 * seconds)) * seconds) * (np.sin(5 * seconds) > -0.3)
    sound = (sound + 0.01 * generator.normal(size=len(sound))).astype(np.float32)
    features = model.processor(sound, sampling_rate=16_000, return_tensors="pt")["input_features"]
    ids = model.tokenizer(" When the music stopped, nobody in the room knew what to say about it.")["input_ids"]
    trace = whence.trace(
        model,
        {"input_features": features, "decoder_input_ids": torch.tensor([ids])},
        keep=("attention", "values", "outputs"),
    )
    pairs = [(1, 0), (2, 0), (3, 1)]
    per = -(-count // len(pairs))
    rule = rules.mass(rules.around_peak(10), at_least=0.5)
    places = [(pair, q) for pair in pairs for q in range(2, 2 + per)][:count]

    def ask() -> list[tuple[float, float]]:
        ends = []
        for pair in pairs:
            queries = [q for p, q in places if p == pair]
            found = whence.decide(trace, rule, heads=[pair], queries=queries, attention="cross", verify=False)
            ends += list(zip(found.lower.tolist(), found.upper.tolist(), strict=True))
        return ends

    ours_ends, ours = timed(ask)

    def baseline() -> list[tuple[float, float]]:
        ends = []
        for (layer, head), query in places:
            at = trace.of("cross")[layer]
            row, values = at.attention[head, query].double().numpy(), at.values[head].double().numpy()
            row = row / row.sum()
            cost = np.zeros(len(row))
            cost[rules.around_peak(10)(query, torch.from_numpy(row))] = 1.0
            ends.append((cold(cost, row, values), -cold(-cost, row, values)))
        return ends

    theirs, slow = timed(baseline)
    error = max(abs(a - b) for x, y in zip(ours_ends, theirs, strict=True) for a, b in zip(x, y, strict=True))
    n = len(trace.of("cross").key_tokens)
    print(f"frames: {len(places)} rows × {n} frames, both ends, largest difference {error:.1e}")
    print(f"  linprog {slow:.2f} s, whence {ours:.2f} s, {slow / ours:.1f}x (wanted 2x)")


if __name__ == "__main__":
    torch.set_num_threads(1)
    atoms()
    frames()
