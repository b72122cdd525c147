"""Rules: what people decide from an attention row, each as claims that are linear in it.

A rule looks at the row as it is (one head's, or a sum or mean of heads), decides, and says which linear claims the
decision rests on; `whence.decide` then asks whether every row with the same head output satisfies them.

    argmax(candidates)            which of these keys has the largest weight
    mass(keys, at_least=0.5)      do these keys together hold at least so much
    order(a, b)                   which of two keys has more
    above(key, threshold)         is this weight above a threshold
    expected(positions)           the mean position under the row, to within a tolerance
    linear(costs, at_least=0)     any other linear rule
    path()                        a monotone alignment of queries to keys (dynamic time warping)

Keys are positions, token texts or names ("C22", "1.40 s"). Where they depend on the query, give a mapping from query to
keys, or a function of (query, row).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from whence.core.attention.claim import Claim
from whence.errors import InputError

Key = int | str
Keys = Sequence[Key] | Mapping[Any, Sequence[Key]] | Callable[[int, Tensor], Sequence[Key]] | None


@dataclass(frozen=True)
class Row:
    """One query as a rule sees it: `weights` (n_key,) float64, `visible` (n_key,), and what the keys are called."""

    query: int
    weights: Tensor
    visible: Tensor
    names: Sequence[str]
    find: Callable[[Key], int]

    def keys(self, given: Keys) -> list[int]:
        """Positions of the keys that a rule names for this query; only those that the query sees."""
        if given is None:
            return self.visible.nonzero().squeeze(-1).tolist()
        if callable(given):
            given = given(self.query, self.weights)
        elif isinstance(given, Mapping):
            if self.query not in given:
                raise InputError(f"the rule names no keys for query {self.query}; it has: {sorted(given)}.")
            given = given[self.query]
        if isinstance(given, (str, int)):
            given = [given]
        found = list(dict.fromkeys(self.find(k) for k in given))
        return [k for k in found if bool(self.visible[k])]


@dataclass(frozen=True)
class Question:
    """A decision made from one row: `answer` in words, the `claims` it rests on, the observed `value`.

    quantity (n_key,): the costs of the number that was compared, where the decision is about one number.
    """

    answer: str
    value: float
    claims: tuple[Claim, ...]
    quantity: Tensor | None = None


class Rule(Protocol):
    """What `whence.decide` asks of a rule."""

    @property
    def text(self) -> str:
        """The rule in words."""
        ...

    def ask(self, row: Row) -> Question:
        """The decision for one row, and what it rests on."""
        ...


@dataclass(frozen=True)
class Argmax:
    """Which of the candidates has the largest weight; None: of all visible keys."""

    candidates: Keys = None

    @property
    def text(self) -> str:
        return "the largest weight among " + ("all visible keys" if self.candidates is None else "the candidates")

    def ask(self, row: Row) -> Question:
        keys = row.keys(self.candidates)
        if not keys:
            raise InputError(f"query {row.query} sees none of the candidates of argmax: {self.candidates!r:.200}.")
        weights = row.weights[keys]
        best = keys[int(weights.argmax())]
        rivals = tuple(k for k in keys if k != best)
        claims = (Claim(_indicator(row, [best]), rivals=rivals),) if rivals else ()
        gap = float(row.weights[best] - row.weights[list(rivals)].max()) if rivals else 1.0
        return Question(row.names[best], gap, claims)


@dataclass(frozen=True)
class Mass:
    """Whether these keys together hold at least so much."""

    keys: Keys
    at_least: float = 0.5
    label: str = "these keys"

    @property
    def text(self) -> str:
        return f"at least {self.at_least:g} on {self.label}"

    def ask(self, row: Row) -> Question:
        costs = _indicator(row, row.keys(self.keys))
        value = float(costs @ row.weights)
        return _threshold(costs, value, self.at_least, self.text, f"less than {self.at_least:g} on {self.label}")


@dataclass(frozen=True)
class Order:
    """Which of two keys has the larger weight."""

    first: Key
    second: Key

    @property
    def text(self) -> str:
        return f"which of {self.first!r} and {self.second!r} has more"

    def ask(self, row: Row) -> Question:
        a, b = row.find(self.first), row.find(self.second)
        if a == b:
            raise InputError(f"order({self.first!r}, {self.second!r}) names the key {row.names[a]!r} twice.")
        if row.weights[b] > row.weights[a]:
            a, b = b, a
        costs = _indicator(row, [a]) - _indicator(row, [b])
        claim = Claim(costs)
        return Question(f"{row.names[a]} over {row.names[b]}", float(costs @ row.weights), (claim,), costs)


@dataclass(frozen=True)
class Above:
    """Whether one weight is above a threshold."""

    key: Key
    threshold: float

    @property
    def text(self) -> str:
        return f"more than {self.threshold:g} on {self.key!r}"

    def ask(self, row: Row) -> Question:
        key = row.find(self.key)
        costs = _indicator(row, [key])
        value, name = float(row.weights[key]), row.names[key]
        if value > self.threshold:
            claim = Claim(costs, self.threshold)
            return Question(f"more than {self.threshold:g} on {name}", value, (claim,), costs)
        claim = Claim(-costs, -self.threshold, strict=False)
        return Question(f"at most {self.threshold:g} on {name}", value, (claim,), costs)


@dataclass(frozen=True)
class Expected:
    """The mean position under the row, to within `within` (None: half the smallest step between two positions)."""

    positions: Sequence[float] | Tensor | None = None
    within: float | None = None

    @property
    def text(self) -> str:
        return "the expected position" + ("" if self.within is None else f" to within {self.within:g}")

    def ask(self, row: Row) -> Question:
        n = len(row.weights)
        costs = torch.arange(n) if self.positions is None else torch.as_tensor(self.positions)
        costs = _checked_costs("positions", costs, n)
        value = float(costs @ row.weights)
        steps = costs.unique().diff()
        within = self.within if self.within is not None else float(steps.min()) / 2 if len(steps) else 0.0
        if within < 0:
            raise InputError(f"within={within!r} is negative; give how far the expected position may move.")
        claims = (Claim(costs, value - within, strict=False), Claim(-costs, -value - within, strict=False))
        return Question(f"{value:.4g} ± {within:.3g}", value, claims, costs)


@dataclass(frozen=True)
class Linear:
    """Whether Σ costs · weights is at least `at_least`."""

    costs: Sequence[float] | Tensor
    at_least: float = 0.0

    @property
    def text(self) -> str:
        return f"Σ costs · weights at least {self.at_least:g}"

    def ask(self, row: Row) -> Question:
        costs = _checked_costs("costs", torch.as_tensor(self.costs), len(row.weights))
        value = float(costs @ row.weights)
        return _threshold(costs, value, self.at_least, f"at least {self.at_least:g}", f"less than {self.at_least:g}")


@dataclass(frozen=True)
class Path:
    """A monotone alignment of all queries to keys: dynamic time warping over −weights.

    The matrix is not standardised: that would couple all rows (see `whence.align` for Whisper's own recipe). A query's
    answer is the key where the path first reaches it. median: width of a running median over keys, odd; 1, none: then the
    range of the path is found exactly, by masses of stretches of keys, with a median only from intervals of single cells,
    which are wide. keys: how many of the first keys take part (None: all); within: how many keys the answer may move and
    still count as the same.
    """

    median: int = 1
    keys: int | None = None
    within: int = 0

    def __post_init__(self) -> None:
        if self.median < 1 or self.median % 2 == 0:
            raise InputError(f"median={self.median!r}; the filter's width is an odd number of keys, 1 for none.")
        if self.within < 0 or (self.keys is not None and self.keys < 1):
            raise InputError(f"within={self.within!r}, keys={self.keys!r}; give within ≥ 0 and at least one key.")

    @property
    def text(self) -> str:
        return "where a monotone path first reaches the query" + (f", to within {self.within}" if self.within else "")

    def ask(self, row: Row) -> Question:
        raise InputError(f"path() is about all queries together, not about query {row.query} alone; use whence.decide.")


def argmax(candidates: Keys = None) -> Argmax:
    """Which of `candidates` has the largest weight.

    >>> argmax([3, 5, 8]).text
    'the largest weight among the candidates'
    """
    return Argmax(candidates)


def mass(keys: Keys, *, at_least: float = 0.5, label: str = "these keys") -> Mass:
    """Whether `keys` together hold at least `at_least`; `label` is what they are called in sentences."""
    return Mass(keys, _share("at_least", at_least), label)


def order(a: Key, b: Key) -> Order:
    """Which of two keys has the larger weight."""
    return Order(a, b)


def above(key: Key, threshold: float) -> Above:
    """Whether the weight on `key` is above `threshold`."""
    return Above(key, _share("threshold", threshold))


def expected(positions: Sequence[float] | Tensor | None = None, *, within: float | None = None) -> Expected:
    """The mean of `positions` (default 0, 1, 2, …) under the row, to within `within`."""
    return Expected(positions, within)


def linear(costs: Sequence[float] | Tensor, *, at_least: float = 0.0) -> Linear:
    """Whether Σ costs · weights ≥ `at_least`."""
    return Linear(costs, at_least)


def path(*, median: int = 1, keys: int | None = None, within: int = 0) -> Path:
    """A monotone alignment of the queries to the keys, by dynamic time warping."""
    return Path(median, keys, within)


def around_peak(width: int) -> Callable[[int, Tensor], list[int]]:
    """The keys within `width` positions of the heaviest one, for `mass`.

    >>> around_peak(1)(0, torch.tensor([0.1, 0.2, 0.6, 0.1]))
    [1, 2, 3]
    """

    def window(_query: int, row: Tensor) -> list[int]:
        peak = int(row.argmax())
        return list(range(max(0, peak - width), min(len(row), peak + width + 1)))

    return window


def parse(text: str) -> Rule:
    """A rule as it is written on the command line.

    `argmax`, `argmax:KEYS`, `mass:KEYS>=0.5`, `order:KEY>KEY`, `above:KEY>0.3`, `expected`, `expected:WITHIN`,
    `path`, `path:MEDIAN`. KEYS are positions, ranges of positions (3-9) and names, with commas between them.

    >>> parse("mass:[CLS],[SEP],3-5>=0.4").keys
    ['[CLS]', '[SEP]', 3, 4, 5]
    """
    name, _, rest = text.strip().partition(":")
    try:
        if name == "argmax":
            return argmax(_parse_keys(rest) if rest else None)
        if name == "mass" and rest:
            keys, _, share = rest.partition(">=")
            return mass(_parse_keys(keys), at_least=float(share) if share else 0.5, label=keys.strip())
        if name == "order" and ">" in rest:
            first, _, second = rest.partition(">")
            return order(_parse_keys(first)[0], _parse_keys(second)[0])
        if name == "above" and ">" in rest:
            key, _, threshold = rest.rpartition(">")
            return above(_parse_keys(key)[0], float(threshold))
        if name == "expected":
            return expected(within=float(rest) if rest else None)
        if name == "path":
            return path(median=int(rest) if rest else 1)
    except (ValueError, IndexError) as problem:
        if isinstance(problem, InputError):
            raise
    raise InputError(
        f"the rule {text!r} is not understood; write argmax, argmax:KEYS, mass:KEYS>=0.5, order:KEY>KEY, above:KEY>0.3, "
        "expected:WITHIN, path or path:MEDIAN, with KEYS like 3,7-9,[CLS]."
    )


def _parse_keys(text: str) -> list[Key]:
    keys: list[Key] = []
    for part in (p.strip() for p in text.split(",")):
        begin, _, end = part.partition("-")
        if begin.isdigit() and end.isdigit():
            keys += range(int(begin), int(end) + 1)
        elif part:
            keys.append(int(part) if part.isdigit() else part)
    if not keys:
        raise ValueError(text)
    return keys


def _share(name: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise InputError(f"{name}={value!r}; weights lie between 0 and 1, so the threshold does too.")
    return float(value)


def _indicator(row: Row, keys: Iterable[int]) -> Tensor:
    costs = torch.zeros(len(row.weights), dtype=torch.float64)
    costs[list(keys)] = 1.0
    return costs


def _checked_costs(name: str, costs: Tensor, n: int) -> Tensor:
    if costs.shape != (n,) or not bool(torch.isfinite(costs.to(torch.float64)).all()):
        raise InputError(f"{name} of shape {tuple(costs.shape)}: give {n} finite numbers, one for each key.")
    return costs.to(torch.float64)


def _threshold(costs: Tensor, value: float, at_least: float, yes: str, no: str) -> Question:
    if value >= at_least:
        return Question(yes, value, (Claim(costs, at_least, strict=False),), costs)
    return Question(no, value, (Claim(-costs, -at_least),), costs)
