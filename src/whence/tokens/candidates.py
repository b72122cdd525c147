"""Who is to be recovered, and among whom: the tokens of the corpus as rows, and the embeddings they are sought among."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from whence.errors import InputError
from whence.model.load import Model
from whence.results.labels import Tokens
from whence.tokens import nearest
from whence.tokens.maps import part_of
from whence.tokens.result import HIT, MISS, NOT_COUNTED
from whence.tokens.split import SIDES, Split
from whence.tokens.states import Store


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

    def nearest(self, states: Tensor, distance: str, part: str = "whole") -> Tensor:
        """For every test token, its nearest candidate; `part` is what of the candidates is compared."""
        candidates = self.embeddings if self.vocabulary is None else self.vocabulary.table
        if part == "norm":
            distance = "norm"
        elif part == "direction":
            candidates = part_of(candidates, part)
        if self.vocabulary is None:
            return nearest.nearest_in_sequence(states, candidates, self.test_lengths, distance)
        return nearest.nearest_in_vocabulary(states, candidates, distance)

    def hits(self, nearest: Tensor, target: int, label: Tensor | None = None) -> Tensor:
        """HIT, MISS or NOT_COUNTED of every test token, [N]."""
        rows, right = self.pairs("test", target, label)
        at = self.place[rows]
        answer = self.place[right] if self.vocabulary is None else self.ids[right]
        out = torch.full((len(nearest),), NOT_COUNTED, dtype=torch.uint8)
        out[at] = torch.where(self.equal[nearest[at]] == self.equal[answer], HIT, MISS).to(torch.uint8)
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
