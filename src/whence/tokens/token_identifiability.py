"""Token identifiability (Brunner et al., ICLR 2020, section 4): is this hidden state still its input token?

    e_i^l is identified by g  ⇔  argmin_j δ(g(e_i^l), x_j) = i

x_j the input embeddings (token + position + segment, after the embedding norm) of the same sequence, or with
pool="vocabulary" the embedding table; g the identity or a map fitted on other sentences. A hit is any j with x_j = x_i.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence.errors import InputError
from whence.loading import Model, as_model
from whence.provenance import Provenance
from whence.reading.tokens import Tokens
from whence.tokens import nearest
from whence.tokens.closed_form import Moments, moments, procrustes, ridge
from whence.tokens.corpus import corpus
from whence.tokens.intervals import bootstrap as interval
from whence.tokens.maps import MAPS, PARTS, Affine, Map, part_of
from whence.tokens.nearest import DISTANCES
from whence.tokens.result import AXES, HIT, MISS, NOT_COUNTED, TokenIdentifiability
from whence.tokens.split import SHARES, SIDES, Split, split
from whence.tokens.states import BUDGET, Store, collect
from whence.tokens.training import Training, mean_distance, train

POOLS = ("sentence", "vocabulary")

Progress = Callable[[str, int, int], None]


def token_identifiability(
    model: Any,
    texts: Any,
    *,
    layers: Sequence[int] | int | None = None,
    maps: Sequence[str] = ("naive", "linear", "mlp"),
    distances: Sequence[str] = DISTANCES,
    pool: str = "sentence",
    targets: Sequence[int] | None = None,
    parts: Sequence[str] = PARTS,
    transfer: bool | None = None,
    shares: Sequence[float] = SHARES,
    seed: int = 0,
    training: Training | None = None,
    bootstrap: int = 1000,
    shuffle_labels: bool = False,
    attention: str | None = None,
    truncate: bool = False,
    batch_size: int = 16,
    memory: int = BUDGET,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> TokenIdentifiability:
    """At layer l, can one still tell which input token a hidden state was? The share of test tokens for which one can.

    `texts`: texts or pairs of texts (or what `whence.read_texts` gives); split by sentence 70/15/15 (`shares`, `seed`),
    duplicates removed, pairs that share a sentence kept on one side. `layers`: hidden states, 0 (embeddings) to L;
    None: all. `maps`: "naive" (identity), "linear" and "mlp" (trained with the distance as loss, early stopping),
    "ridge" and "procrustes" (closed form). `distances`: "cosine", "l2", for the training and the nearest neighbour.
    `pool`: the candidates, the input embeddings of the same "sentence" or those of the "vocabulary" (the embedding
    table, which is then also what the maps are trained to give). `targets`: 0 the token itself, 1 the next one; None:
    (0,), for causal models (0, 1). `parts`: also recover from the "direction" e/‖e‖ or the "norm" ‖e‖ alone (target 0).
    `transfer`: the map of each layer tested on every other; None: for pool="sentence". `shuffle_labels`: permute which
    embedding belongs to which token within each sequence; every rate must then fall to chance. `attention`: "encoder"
    or "decoder" of a model that has both (its decoder reads the same text). `memory`: bytes of states kept in memory,
    beyond which they go to temporary files in `folder`. `progress`: called with a stage, what is done and the total.

    The model runs once. Returns rates [target, part, map, distance, layer] with bootstrap intervals over sentences,
    chance, ties, breakdowns by token, and what was left out or diverged.

    >>> import whence
    >>> texts = [f"The {a} {b} near the {c}." for a in ("old", "red", "tall") for b in ("house stood", "ship lay")
    ...          for c in ("sea", "hill", "road", "wood")]
    >>> found = whence.token_identifiability(whence.load(), texts, layers=[0, 6], maps=("naive", "ridge"))
    >>> found.rate("naive", "cosine")[0].item()          # at the embeddings every token is itself
    1.0
    """
    chosen = as_model(model)
    settings = training or Training()
    _check("maps", maps, MAPS)
    _check("distances", distances, DISTANCES)
    _check("pool", [pool], POOLS)
    _check("parts", parts, PARTS)
    if bootstrap < 1 or batch_size < 1:
        raise InputError(f"bootstrap={bootstrap} and batch_size={batch_size} must be at least 1.")
    wanted = [layers] if isinstance(layers, int) else None if layers is None else list(layers)
    read = corpus(chosen, texts, truncate=truncate)
    sides = split(read.sequences, seed=seed, shares=shares)
    clock = Clock(progress or (lambda *_: None))
    with Store(memory, folder) as store:
        with clock("forward"):
            tokens, numbers, causal = collect(
                chosen, read, store, wanted, attention=attention, batch_size=batch_size, truncate=truncate,
                progress=lambda done, total: clock.tell("forward", done, total),
            )  # fmt: skip
        data = Data(
            store,
            tokens,
            sides,
            Vocabulary.of(chosen) if pool == "vocabulary" else None,
            seed,
            shuffle_labels,
        )
        if data.vocabulary is not None:
            _check_widths(data, maps)
        chosen_targets = tuple(targets) if targets is not None else (0, 1) if causal else (0,)
        if not chosen_targets or not all(isinstance(target, int) for target in chosen_targets):
            raise InputError(f"targets={targets!r} must be whole numbers: 0 for the token itself, 1 for the next one.")
        measurement = Measurement(
            data, numbers, chosen_targets, tuple(dict.fromkeys(parts)), tuple(dict.fromkeys(maps)),
            tuple(dict.fromkeys(distances)), settings, seed, clock,
        )  # fmt: skip
        measurement.run()
        with_transfer = transfer if transfer is not None else pool == "sentence"
        if with_transfer and 0 in chosen_targets and "whole" in parts and set(maps) - {"naive"}:
            measurement.transfer()
        with clock("bootstrap"):
            low, high = interval(
                measurement.hits == HIT, measurement.hits != NOT_COUNTED, data.sentence, draws=bootstrap, seed=seed
            )
    provenance = Provenance(
        chosen.name,
        "token identifiability",
        {
            "pool": pool, "seed": seed, "shares": list(shares), "bootstrap": bootstrap,
            "shuffle_labels": shuffle_labels, "attention": attention, "truncate": truncate,
            "training": {**asdict(settings), "penalties": list(settings.penalties)},
        },
        source=chosen,
    )  # fmt: skip
    return measurement.result(provenance, low, high, pool, read.left_out)


def _check(name: str, given: Any, known: Sequence[str]) -> None:
    if isinstance(given, str) or not given:
        raise InputError(f"{name}={given!r}: give a list, with one or more of {', '.join(known)}.")
    wrong = [one for one in given if one not in known]
    if wrong:
        raise InputError(f"{name}: {wrong[0]!r} is not known; choose among {', '.join(known)}.")


def _check_widths(data: Data, maps: Sequence[str]) -> None:
    assert data.vocabulary is not None
    width, table = data.store[0].shape[1], data.vocabulary.table.shape[1]
    square = [name for name in maps if name in ("naive", "procrustes")]
    if width != table and square:
        raise InputError(
            f"the embedding table has width {table} and the states {width}: {' and '.join(square)} cannot bring one "
            "to the other. Choose maps among linear, mlp, ridge."
        )


class Clock:
    """Seconds by stage, on the wall and of the processor, and whoever wants to hear of the progress."""

    def __init__(self, tell: Progress) -> None:
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


@dataclass(frozen=True)
class Vocabulary:
    """The embedding table, [V, d], and for each row the first that equals it."""

    table: Tensor
    equal: Tensor

    @classmethod
    def of(cls, model: Model) -> Vocabulary:
        module = getattr(model.model, "get_input_embeddings", lambda: None)()
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor):
            raise InputError(f"{model.name} has no table of input embeddings, so pool='vocabulary' has no candidates.")
        table = weight.detach().to("cpu", torch.float32)
        return cls(table, nearest.equal_in_vocabulary(table))


class Data:
    """The tokens of the corpus as rows: which belong to which side, and which embedding each is to be brought to."""

    def __init__(
        self, store: Store, tokens: list[Tokens], sides: Split, vocabulary: Vocabulary | None, seed: int, shuffle: bool
    ) -> None:
        self.store, self.vocabulary = store, vocabulary
        self.lengths = [len(t) for t in tokens]
        self.starts = list(accumulate(self.lengths, initial=0))
        self.sides = {side: getattr(sides, side) for side in SIDES}
        self.rows = {side: self._rows(members) for side, members in self.sides.items()}
        ids = [one.ids for one in tokens]
        self.ids = torch.tensor([i for one in ids for i in (one or ())], dtype=torch.long)
        if len(self.ids) != self.starts[-1]:
            raise InputError("the model's tokens have no ids, so that they cannot be identified.")
        self.last = torch.empty(self.starts[-1], dtype=torch.long)  # of each row, its sequence's first and last row
        self.first = torch.empty_like(self.last)
        for start, n in zip(self.starts, self.lengths, strict=False):
            self.first[start : start + n], self.last[start : start + n] = start, start + n - 1
        self.test_lengths = [self.lengths[k] for k in self.sides["test"]]
        self.test_tokens = [tokens[k] for k in self.sides["test"]]
        self.sentence = torch.repeat_interleave(torch.arange(len(self.test_lengths)), torch.tensor(self.test_lengths))
        self.embeddings = store[0][self.rows["test"]]  # candidates of the test sentences
        self.shuffled = self._shuffled(seed)
        self.label = self.shuffled if shuffle else torch.arange(self.starts[-1])
        self.equal = (
            nearest.equal_in_sequence(self.embeddings, self.test_lengths) if vocabulary is None else vocabulary.equal
        )
        # Where a row of the corpus stands among the test rows.
        self.place = torch.full((self.starts[-1],), -1)
        self.place[self.rows["test"]] = torch.arange(len(self.rows["test"]))

    def _rows(self, members: Sequence[int]) -> Tensor:
        spans = [torch.arange(self.starts[k], self.starts[k] + self.lengths[k]) for k in members]
        return torch.cat(spans)

    def _shuffled(self, seed: int) -> Tensor:
        """A permutation of the rows within each sequence, for the control."""
        generator = torch.Generator().manual_seed(seed)
        orders = [s + torch.randperm(n, generator=generator) for s, n in zip(self.starts, self.lengths, strict=False)]
        return torch.cat(orders)

    def pairs(self, side: str, target: int, label: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rows of the states, and of the token each is to identify; those whose target is outside are not there."""
        rows = self.rows[side]
        there = (rows + target >= self.first[rows]) & (rows + target <= self.last[rows])
        return rows[there], (self.label if label is None else label)[rows[there] + target]

    def wanted(self, rows: Tensor) -> Tensor:
        """The embeddings that the maps are to give, for these rows of the corpus."""
        return self.store[0][rows] if self.vocabulary is None else self.vocabulary.table[self.ids[rows]]

    def nearest(self, found: Tensor, distance: str, part: str = "whole") -> Tensor:
        """For every test token, its nearest candidate; `part` is what of the candidates is compared."""
        candidates = self.embeddings if self.vocabulary is None else self.vocabulary.table
        if part == "norm":
            distance = "norm"
        elif part == "direction":
            candidates = part_of(candidates, part)
        if self.vocabulary is None:
            return nearest.nearest_in_sequence(found, candidates, self.test_lengths, distance)
        return nearest.nearest_in_vocabulary(found, candidates, distance)

    def hits(self, chosen: Tensor, target: int, label: Tensor | None = None) -> Tensor:
        """HIT, MISS or NOT_COUNTED of every test token, [N]."""
        rows, right = self.pairs("test", target, label)
        at = self.place[rows]
        answer = self.place[right] if self.vocabulary is None else self.ids[right]
        out = torch.full((len(chosen),), NOT_COUNTED, dtype=torch.uint8)
        out[at] = torch.where(self.equal[chosen[at]] == self.equal[answer], HIT, MISS).to(torch.uint8)
        return out

    def blind(self) -> tuple[Tensor, Tensor]:
        """The chance of each test token, 1/n (or 1/V), and with ties, m/n; [N] each."""
        counts = torch.zeros(int(self.equal.max()) + 1, dtype=torch.float64)
        counts.index_add_(0, self.equal, torch.ones(len(self.equal), dtype=torch.float64))
        if self.vocabulary is not None:
            size = len(self.vocabulary.table)
            same = counts[self.equal[self.ids[self.rows["test"]]]]
            return torch.full_like(same, 1 / size), same / size
        n = torch.tensor(self.test_lengths, dtype=torch.float64)[self.sentence]
        return 1 / n, counts[self.equal] / n

    def majority(self) -> float:
        """How often the most frequent training token is the right answer."""
        common = self.ids[self.rows["train"]].mode().values
        return float((self.ids[self.rows["test"]] == common).double().mean())


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
                self._layer(place, target, part)
                self.clock.tell("maps", place * len(jobs) + number + 1, total)

    def _layer(self, place: int, target: int, part: str) -> None:
        data, states = self.data, self.data.store[place + 1]
        test = states[data.rows["test"]]
        seen = part_of(test, part)
        if "naive" in self.maps:
            for distance in self.distances:
                with self.clock("nearest"):
                    chosen = data.nearest(test if part == "norm" else seen, distance, part)
                self._note(target, part, "naive", distance, place, data.hits(chosen, target))
        learned = [name for name in self.maps if name != "naive"]
        check = target == 0 and part == "whole"
        if not learned and not check:
            return
        fit, held, found, ridges = self._moments(states, target, part, None)
        for distance in self.distances:
            with self.clock("closed form"):
                start, penalty = self._best(ridges, held, distance)
            for name in learned:
                g = self._fit(name, distance, place, target, part, fit, held, start, penalty, found)
                if g is None:
                    continue
                with self.clock("nearest"):
                    chosen = data.nearest(g(seen), distance)
                self._note(target, part, name, distance, place, data.hits(chosen, target))
                if check:
                    self.fitted[name, distance, place] = g
        if check:
            self._check_by_shuffling(states, test, place)

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
        self, name: str, distance: str, place: int, target: int, part: str, fit: tuple[Tensor, Tensor],
        held: tuple[Tensor, Tensor], start: Affine, penalty: float, found: Moments,
    ) -> Map | None:  # fmt: skip
        if name == "ridge":
            return start
        if name == "procrustes":
            # A single number cannot be rotated into d dimensions.
            with self.clock("closed form"):
                return None if part == "norm" else procrustes(found)
        key = [self.layers[place], target, PARTS.index(part), MAPS.index(name), DISTANCES.index(distance)]
        with self.clock("training"):
            made = train(name, fit, held, distance, start, penalty, found, self.settings, _seed(self.seed, key))
        self.epochs[self._at(target, part, name, distance, place)] = made.epochs
        if made.map is None:
            where = dict(zip(AXES, (target, part, name, distance, self.layers[place]), strict=True))
            self.diverged.append({**where, "reason": made.diverged})
        return made.map

    def _best(self, ridges: list[Affine], held: tuple[Tensor, Tensor], distance: str) -> tuple[Affine, float]:
        """The ridge map, and its penalty, that the validation sentences prefer."""
        losses = [mean_distance(g, *held, distance) for g in ridges]
        best = losses.index(min(losses))
        return ridges[best], self.settings.penalties[best]

    def _check_by_shuffling(self, states: Tensor, test: Tensor, place: int) -> None:
        """The control: a ridge map for labels shuffled within each sequence, counted with the shuffled labels."""
        label = self.data.shuffled
        _, held, _, ridges = self._moments(states, 0, "whole", label)
        for d, distance in enumerate(self.distances):
            with self.clock("closed form"):
                g, _ = self._best(ridges, held, distance)
            with self.clock("nearest"):
                hits = self.data.hits(self.data.nearest(g(test), distance), 0, label)
            self.control[d, place] = (hits == HIT).double().mean()

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
            self.clock.tell("transfer", m + 1, n)

    def _at(self, target: int, part: str, name: str, distance: str, place: int) -> tuple[int, int, int, int, int]:
        axes = (self.targets.index(target), self.parts.index(part), self.maps.index(name))
        return (*axes, self.distances.index(distance), place)

    def _note(self, target: int, part: str, name: str, distance: str, place: int, hits: Tensor) -> None:
        self.hits[self._at(target, part, name, distance, place)] = hits

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
