"""Which sentences train the maps, which stop the training, which are counted: no sentence is on two sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whence.core.numerics.tolerances import SHARES_SUM
from whence.errors import InputError

SHARES = (0.70, 0.15, 0.15)
SIDES = ("train", "validation", "test")
FEWEST = 3  # one sequence a side


@dataclass(frozen=True)
class Split:
    """Numbers of sequences, by side."""

    train: tuple[int, ...]
    validation: tuple[int, ...]
    test: tuple[int, ...]


def same_sentence(text: str) -> str:
    """What two spellings of one sentence share: case and white space do not make a sentence new."""
    return " ".join(text.split()).casefold()


def groups(sequences: Sequence[Sequence[str]]) -> list[list[int]]:
    """Sequences that share a sentence, directly or through others, belong together (union–find).

    >>> groups([("a", "b"), ("c",), ("B", "d")])
    [[0, 2], [1]]
    """
    first_equal = list(range(len(sequences)))

    def find(i: int) -> int:
        while first_equal[i] != i:
            first_equal[i] = first_equal[first_equal[i]]
            i = first_equal[i]
        return i

    owner: dict[str, int] = {}
    for i, sentences in enumerate(sequences):
        for sentence in sentences:
            first = owner.setdefault(same_sentence(sentence), i)
            a, b = find(first), find(i)
            first_equal[max(a, b)] = min(a, b)
    members: dict[int, list[int]] = {}
    for i in range(len(sequences)):
        members.setdefault(find(i), []).append(i)
    return list(members.values())


def split(sequences: Sequence[Sequence[str]], *, seed: int = 0, shares: Sequence[float] = SHARES) -> Split:
    """Train, validation and test sequences, 70/15/15 unless told, whole groups at a time.

    `sequences`: the sentences of each sequence (one text, or the two of a pair). Two sequences that share a sentence
    go to the same side, so that no sentence of the test was seen in training.

    >>> parts = split([(str(i),) for i in range(20)])
    >>> len(parts.train), len(parts.validation), len(parts.test)
    (14, 3, 3)
    """
    _check_shares(shares)
    if len(sequences) < FEWEST:
        raise InputError(
            f"{len(sequences)} different text{'s' * (len(sequences) != 1)} cannot be split into training, validation "
            f"and test: at least {FEWEST} are needed, and some hundreds for rates that mean something."
        )
    found = groups(sequences)
    if len(found) < FEWEST:
        raise InputError(
            f"the {len(sequences)} texts share sentences and form only {len(found)} independent group"
            f"{'s' * (len(found) != 1)}; training, validation and test need at least {FEWEST}. Give more texts."
        )
    order = np.random.default_rng(seed).permutation(len(found))
    wanted = {side: max(1, round(share * len(sequences))) for side, share in zip(SIDES, shares, strict=True)}
    sides: dict[str, list[int]] = {side: [] for side in SIDES}
    rest = [found[i] for i in order]
    for side, others in (("test", 2), ("validation", 1)):
        # Leave one group for each side that is still empty.
        while len(rest) > others and len(sides[side]) < wanted[side]:
            sides[side] += rest.pop(0)
    for group in rest:
        sides["train"] += group
    return Split(*(tuple(sorted(sides[side])) for side in SIDES))


def _check_shares(shares: Sequence[float]) -> None:
    if len(shares) != 3 or any(share <= 0 for share in shares) or abs(sum(shares) - 1) > SHARES_SUM:
        raise InputError(
            f"split={tuple(shares)} must be three positive shares that sum to 1, for training, validation and test, "
            f"such as {SHARES}."
        )
