"""Going through layers, targets, parts, distances and maps: fitting, finding the nearest, counting hits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whence.errors import InputError
from whence.results.labels import Tokens
from whence.results.progress import Step
from whence.results.provenance import Provenance
from whence.tokens.candidates import Data
from whence.tokens.checkpoint import FittedCell, FittedMaps
from whence.tokens.closed_form import Moments, moments, procrustes, ridge
from whence.tokens.maps import MAPS, PARTS, Affine, Map, part_of
from whence.tokens.nearest import DISTANCES
from whence.tokens.result import AXES, HIT, NOT_COUNTED, TokenIdentifiability
from whence.tokens.split import SIDES
from whence.tokens.training import Training, mean_distance, train


class Clock:
    """Seconds by stage, on the wall and of the processor, and whoever wants to hear of the progress."""

    def __init__(self, tell: Step) -> None:
        self.tell = tell
        self.wall: dict[str, float] = {}
        self.processor: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start, processor = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.wall[stage] = self.wall.get(stage, 0.0) + time.perf_counter() - start
            self.processor[stage] = self.processor.get(stage, 0.0) + time.process_time() - processor

    @property
    def times(self) -> dict[str, dict[str, float]]:
        """The seconds so far, as plain data."""
        return {"seconds": dict(self.wall), "cpu_seconds": dict(self.processor)}

    def add(self, times: dict[str, dict[str, float]]) -> None:
        """Seconds that an earlier process took."""
        for ours, theirs in ((self.wall, times["seconds"]), (self.processor, times["cpu_seconds"])):
            for stage, seconds in theirs.items():
                ours[stage] = ours.get(stage, 0.0) + seconds


@dataclass
class Measurement:
    """One run over layers, targets, parts, distances and maps; the hits of every test token are kept."""

    data: Data
    layers: tuple[int, ...]
    targets: tuple[int, ...]
    parts: tuple[str, ...]
    maps: tuple[str, ...]
    distances: tuple[str, ...]
    settings: Training
    seed: int
    clock: Clock
    checkpoint: FittedMaps | None = None
    diverged: list[dict[str, Any]] = field(default_factory=list)
    fitted: dict[tuple[str, str, int], Map] = field(default_factory=dict)  # (map, distance, place of the layer)

    def __post_init__(self) -> None:
        sizes = tuple(len(axis) for axis in (self.targets, self.parts, self.maps, self.distances, self.layers))
        self.hits = torch.full((*sizes, len(self.data.rows["test"])), NOT_COUNTED, dtype=torch.uint8)
        self.epochs = torch.zeros(sizes, dtype=torch.long)
        self.control = torch.full((len(self.distances), len(self.layers)), torch.nan, dtype=torch.float64)
        self.matrix: Tensor | None = None

    def run(self) -> None:
        """Every cell, a layer at a time, so that only one layer's states are gathered at once."""
        # What a direction or a norm tells is asked of the token itself only.
        jobs = [(t, p) for t in self.targets for p in self.parts if p == "whole" or t == 0]
        total = len(self.layers) * len(jobs)
        for place in range(len(self.layers)):
            for number, (target, part) in enumerate(jobs):
                self._cell(place, target, part)
                self.clock.tell("Fitting maps", place * len(jobs) + number + 1, total)

    def _cell(self, index: int, target: int, part: str) -> None:
        """One layer, target and part: taken from the checkpoint, or fitted and kept there."""
        layer = self.layers[index]
        there = None if self.checkpoint is None else self.checkpoint.load(layer, target, part)
        if there is not None:
            self._take(there, index, target, part)
            return
        known, before = len(self.diverged), self.clock.times
        self._layer(index, target, part)
        if self.checkpoint is not None:
            facts = {"diverged": self.diverged[known:], "times": _since(before, self.clock.times)}
            self.checkpoint.save(layer, target, part, self._fitted(index, target, part, facts))

    def _fitted(self, index: int, target: int, part: str, facts: dict[str, Any]) -> FittedCell:
        t, p = self.targets.index(target), self.parts.index(part)
        whole = target == 0 and part == "whole"
        arrays = {"hits": self.hits[t, p, :, :, index], "epochs": self.epochs[t, p, :, :, index]}
        if whole:
            arrays["control"] = self.control[:, index]
        maps = {(name, distance): g for (name, distance, at), g in self.fitted.items() if whole and at == index}
        return FittedCell(arrays, maps, facts)

    def _take(self, there: FittedCell, index: int, target: int, part: str) -> None:
        t, p = self.targets.index(target), self.parts.index(part)
        self.hits[t, p, :, :, index] = there.arrays["hits"]
        self.epochs[t, p, :, :, index] = there.arrays["epochs"]
        if "control" in there.arrays:
            self.control[:, index] = there.arrays["control"]
        self.fitted |= {(name, distance, index): g for (name, distance), g in there.maps.items()}
        self.diverged += there.facts["diverged"]
        self.clock.add(there.facts["times"])

    def _layer(self, index: int, target: int, part: str) -> None:
        data, states = self.data, self.data.store[index + 1]
        test = states[data.rows["test"]]
        seen = part_of(test, part)
        if "naive" in self.maps:
            for distance in self.distances:
                with self.clock("nearest"):
                    chosen = data.nearest(test if part == "norm" else seen, distance, part)
                self._note(target, part, "naive", distance, index, data.hits(chosen, target))
        learned = [name for name in self.maps if name != "naive"]
        check = target == 0 and part == "whole"
        if not learned and not check:
            return
        fit, held, found, ridges = self._moments(states, target, part, None)
        for distance in self.distances:
            with self.clock("closed form"):
                start, penalty = self._best(ridges, held, distance)
            for name in learned:
                g = self._fit(name, distance, index, target, part, fit, held, start, penalty, found)
                if g is None:
                    continue
                with self.clock("nearest"):
                    chosen = data.nearest(g(seen), distance)
                self._note(target, part, name, distance, index, data.hits(chosen, target))
                if check:
                    self.fitted[name, distance, index] = g
        if check:
            self._check_by_shuffling(states, test, index)

    def _moments(
        self, states: Tensor, target: int, part: str, label: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Moments, list[Affine]]:
        with self.clock("closed form"):
            sides = []
            for side in ("train", "validation"):
                rows, right = self.data.pairs(side, target, label)
                if not len(rows):
                    raise InputError(f"no {side} token has another one {target:+d} places away in its sequence.")
                sides.append((part_of(states[rows], part), self.data.wanted(right)))
            found = moments(*sides[0])
            return sides[0], sides[1], found, ridge(found, self.settings.penalties)

    def _fit(
        self, name: str, distance: str, index: int, target: int, part: str, fit: tuple[Tensor, Tensor],
        held: tuple[Tensor, Tensor], start: Affine, penalty: float, moments: Moments,
    ) -> Map | None:  # fmt: skip
        if name == "ridge":
            return start
        if name == "procrustes":
            # A single number cannot be rotated into d dimensions.
            with self.clock("closed form"):
                return None if part == "norm" else procrustes(moments)
        key = [self.layers[index], target, PARTS.index(part), MAPS.index(name), DISTANCES.index(distance)]
        with self.clock("training"):
            made = train(name, fit, held, distance, start, penalty, moments, self.settings, _seed(self.seed, key))
        self.epochs[self._at(target, part, name, distance, index)] = made.epochs
        if made.map is None:
            where = dict(zip(AXES, (target, part, name, distance, self.layers[index]), strict=True))
            self.diverged.append({**where, "reason": made.diverged})
        return made.map

    def _best(self, ridges: list[Affine], held: tuple[Tensor, Tensor], distance: str) -> tuple[Affine, float]:
        """The ridge map, and its penalty, that the validation sentences prefer."""
        losses = [mean_distance(g, *held, distance) for g in ridges]
        best = losses.index(min(losses))
        return ridges[best], self.settings.penalties[best]

    def _check_by_shuffling(self, states: Tensor, test: Tensor, index: int) -> None:
        """The control: a ridge map for labels shuffled within each sequence, counted with the shuffled labels."""
        label = self.data.shuffled
        _, held, _, ridges = self._moments(states, 0, "whole", label)
        for d, distance in enumerate(self.distances):
            with self.clock("closed form"):
                g, _ = self._best(ridges, held, distance)
            with self.clock("nearest"):
                hits = self.data.hits(self.data.nearest(g(test), distance), 0, label)
            self.control[d, index] = (hits == HIT).double().mean()

    def transfer(self) -> None:
        """The map of every layer tested on every layer, [map, distance, trained on, tested on]."""
        learned = [name for name in self.maps if name != "naive"]
        n = len(self.layers)
        self.matrix = torch.full((len(learned), len(self.distances), n, n), torch.nan, dtype=torch.float64)
        for m in range(n):
            test = self.data.store[m + 1][self.data.rows["test"]]
            for (name, distance, place), g in self.fitted.items():
                with self.clock("transfer"):
                    hits = self.data.hits(self.data.nearest(g(test), distance), 0)
                at = (learned.index(name), self.distances.index(distance), place, m)
                self.matrix[at] = (hits == HIT).double().mean()
            self.clock.tell("Testing maps on other layers", m + 1, n)

    def _at(self, target: int, part: str, name: str, distance: str, index: int) -> tuple[int, int, int, int, int]:
        axes = (self.targets.index(target), self.parts.index(part), self.maps.index(name))
        return (*axes, self.distances.index(distance), index)

    def _note(self, target: int, part: str, name: str, distance: str, index: int, hits: Tensor) -> None:
        self.hits[self._at(target, part, name, distance, index)] = hits

    def result(
        self, provenance: Provenance, low: Tensor, high: Tensor, pool: str, left_out: Any
    ) -> TokenIdentifiability:
        """Everything that was counted, as one frozen result."""
        data = self.data
        counted = (self.hits != NOT_COUNTED).sum(-1)
        rates = (self.hits == HIT).sum(-1).double() / counted
        blind, tied = data.blind()
        report = {
            "chance": float(blind.mean()),
            "chance_with_ties": float(tied.mean()),
            "ties": float((tied > blind * 1.5).double().mean()),
            "majority": data.majority() if data.vocabulary is not None else None,
            "left_out": dict(left_out),
            "diverged": self.diverged,
            "states_on_disk": data.store.on_disk,
            "states_bytes": data.store.bytes,
            "seconds": self.clock.wall,
            "processor_seconds": self.clock.processor,
            **{side: len(data.rows[side]) for side in SIDES},
            **{f"{side}_sequences": len(data.sides[side]) for side in SIDES},
        }
        rows = data.rows["test"]
        frequency = torch.bincount(data.ids[data.rows["train"]], minlength=int(data.ids.max()) + 1)
        extra = {
            "low": low,
            "high": high,
            "hits": self.hits,
            "epochs": self.epochs,
            "control": self.control,
            "sentence": data.sentence,
            "position": rows - data.first[rows],
            "length": torch.tensor(data.test_lengths)[data.sentence],
            "count": frequency[data.ids[rows]],
            "blind": blind,
        }
        if self.matrix is not None:
            extra["transfer"] = self.matrix
        return TokenIdentifiability(
            values=rates, axes=AXES, tokens=_joined(data.test_tokens), provenance=provenance, layers=self.layers,
            extra=extra, targets=self.targets, parts=self.parts, maps=self.maps, distances=self.distances, pool=pool,
            report=report,
        )  # fmt: skip


def _since(before: dict[str, dict[str, float]], now: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {clock: {s: t - before[clock].get(s, 0.0) for s, t in stages.items()} for clock, stages in now.items()}


def _seed(seed: int, key: Sequence[int]) -> int:
    """A seed for each map that does not depend on which others are trained."""
    for number in key:
        seed = (seed * 1_000_003 + number + 7) % (1 << 62)
    return seed


def _joined(tokens: list[Tokens]) -> Tokens:
    """The test sentences' tokens, end to end (words are numbered within their sentence)."""
    words = None if any(t.words is None for t in tokens) else tuple(w for t in tokens for w in t.words or ())
    return Tokens(
        tuple(x for t in tokens for x in t.text),
        tuple(x for t in tokens for x in t.raw),
        tuple(x for t in tokens for x in t.ids or ()),
        None,
        words,
        tuple(x for t in tokens for x in t.special),
    )
