"""Which tokens are recovered? Rates by type, piece of a word, frequency, position and sentence length."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING

import torch

from whence.errors import InputError
from whence.tokens.intervals import bootstrap
from whence.tokens.result import HIT, NOT_COUNTED, TokenIdentifiability

if TYPE_CHECKING:
    import pandas as pd

BINS = {
    "frequency": (0, 1, 4, 16, 64, 256),  # occurrences in the training sentences
    "position": (0, 1, 8, 16, 32, 64, 128, 256),
    "length": (2, 9, 17, 33, 49, 65, 129, 257),  # tokens of the sequence
}
BY = ("kind", "piece", *BINS)


def groups_of(result: TokenIdentifiability, by: str) -> list[str]:
    """The group of every test token."""
    if by == "kind":
        return list(result.tokens.kinds())
    if by == "piece":
        return _pieces(result)
    if by in BINS:
        numbers = result.extra["count" if by == "frequency" else by].tolist()
        return [_bin(int(number), BINS[by]) for number in numbers]
    raise InputError(f"by={by!r} is no breakdown; choose one of {', '.join(BY)}.")


def _bin(number: int, edges: tuple[int, ...]) -> str:
    at = bisect_right(edges, number) - 1
    if at + 1 == len(edges):
        return f"{edges[at]}+"
    last = edges[at + 1] - 1
    return str(last) if last == edges[at] else f"{edges[at]}–{last}"


def _pieces(result: TokenIdentifiability) -> list[str]:
    """Whole word, first or later piece of one; special tokens; "unknown" where the tokenizer names no words."""
    words = result.tokens.words or (None,) * len(result.tokens)
    keys = list(zip(result.extra["sentence"].tolist(), words, strict=True))
    sizes = Counter(keys)
    seen: set[tuple[int, int | None]] = set()
    groups = []
    for key, special in zip(keys, result.tokens.special, strict=True):
        if special:
            groups.append("special")
        elif key[1] is None:
            groups.append("unknown")
        elif sizes[key] == 1:
            groups.append("whole word")
        else:
            groups.append("later piece" if key in seen else "first piece")
            seen.add(key)
    return groups


def _order(by: str, groups: list[str]) -> list[str]:
    if by in BINS:
        edges = BINS[by]
        return [name for name in dict.fromkeys(_bin(edge, edges) for edge in edges) if name in groups]
    return [name for name, _ in Counter(groups).most_common()]


def breakdown(result: TokenIdentifiability, by: str) -> pd.DataFrame:
    """One line per target, map, distance, layer and group: tokens, rate, interval over sentences, chance.

    Whole states only. The rates of all groups, weighted by their tokens, give back the overall rate.
    """
    import pandas as pd

    groups = groups_of(result, by)
    whole = result._index_of("part", "whole")
    hits = result.extra["hits"][:, whole]  # [target, map, distance, layer, token]
    sentence = result.extra["sentence"]
    lines = []
    for name in _order(by, groups):
        inside = torch.tensor([group == name for group in groups])
        counted = (hits != NOT_COUNTED) & inside
        right = (hits == HIT) & inside
        total = counted.sum(-1)
        rate = right.sum(-1) / total
        draws = int(result.provenance.settings["bootstrap"])
        low, high = bootstrap(right, counted, sentence, draws=draws, seed=int(result.provenance.settings["seed"]))
        blind = result.extra["blind"][inside].mean()
        for place in torch.cartesian_prod(*(torch.arange(n) for n in rate.shape)).tolist():
            at = tuple(place)
            if total[at] == 0:
                continue
            t, m, d, layer = at
            lines.append(
                {
                    "target": result.targets[t],
                    "map": result.maps[m],
                    "distance": result.distances[d],
                    "layer": result.layers[layer],
                    by: name,
                    "tokens": int(total[at]),
                    "rate": float(rate[at]),
                    "low": float(low[at]),
                    "high": float(high[at]),
                    "chance": float(blind),
                }
            )
    return pd.DataFrame(lines)
