"""What a survey measures, and how: all that decides its numbers besides the model and the texts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from whence.core.attention.verdict import check_epsilon
from whence.errors import InputError

DEFAULT = ("attention", "certainty", "alti", "tokens")
ON_REQUEST = ("hta", "local-global")
ROWS = 8
SHARD_SIZE = 64


@dataclass(frozen=True)
class SurveySettings:
    """Which measures, and their options.

    measures: of `DEFAULT` and `ON_REQUEST`. epsilon: what counts as certain (methods 1.3). rows: how many of a text's
    rows that are not unique are looked at, of all layers and heads together, drawn by content; 0: all. probes: directions
    per token of hta and local-global. truncate: cut texts that are too long. attention: which stack of an
    encoder–decoder. shard_size: texts in one file.
    """

    measures: tuple[str, ...] = DEFAULT
    epsilon: float = 0.05
    rows: int = ROWS
    probes: int = 16
    truncate: bool = False
    attention: str | None = None
    shard_size: int = SHARD_SIZE

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        for name, least in (("rows", 0), ("probes", 2), ("shard_size", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name}={value!r}: give a whole number, {least} or more.")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for the run's identity."""
        return {**asdict(self), "measures": list(self.measures)}


def chosen_measures(more: str | Iterable[str] = (), without: str | Iterable[str] = ()) -> tuple[str, ...]:
    """The default measures and those asked for, less those not wanted, in their fixed order.

    >>> chosen_measures("hta", without=["certainty"])
    ('attention', 'alti', 'tokens', 'hta')
    """
    known = (*DEFAULT, *ON_REQUEST)
    added, dropped = _names(more), _names(without)
    if unknown := [name for name in (*added, *dropped) if name not in known]:
        raise InputError(f"no measure of a survey is called {unknown[0]!r}; there are: {', '.join(known)}.")
    if "attention" in dropped and "certainty" in {*DEFAULT, *added} - set(dropped):
        raise InputError("certainty needs the measure attention: leave out both, or neither.")
    measures = tuple(name for name in known if name in {*DEFAULT, *added} - set(dropped))
    if not measures:
        raise InputError("every measure was left out: nothing remains to be surveyed.")
    return measures


def _names(given: str | Iterable[str]) -> list[str]:
    parts = given.split(",") if isinstance(given, str) else given
    return [name.strip() for name in parts if name.strip()]
