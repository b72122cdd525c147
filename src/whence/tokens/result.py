"""Token identifiability as it was measured: rates with intervals and chance, layer by layer."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from whence.errors import InputError
from whence.results.declared import Array, is_kind, listed
from whence.results.result import Result

if TYPE_CHECKING:
    import pandas as pd

AXES = ("target", "part", "map", "distance", "layer")
MISS, HIT, NOT_COUNTED = 0, 1, 255
REPORT: dict[str, Any] = {
    **dict.fromkeys(("chance", "chance_with_ties", "ties"), float),
    "majority": float | None,
    "left_out": Mapping[str, int],
    "diverged": list[Mapping[str, Any]],
    **{f"{side}{what}": int for side in ("train", "validation", "test") for what in ("", "_sequences")},
}
"""What a report says at least."""
LAYERED = {"low": (-1,), "high": (-1,), "hits": (-2,), "epochs": (-1,), "control": (-1,), "transfer": (-2, -1)}


@dataclass(frozen=True)
class TokenIdentifiability(Result):
    """`values` [target, part, map, distance, layer]: the share of test tokens recovered; NaN where a map diverged.

    `tokens` are the test tokens, sentence after sentence. `extra` holds low and high (the bootstrap interval), hits
    (… × token: 1, 0, 255 not counted), transfer [map, distance, trained on, tested on], control [distance, layer]
    (ridge with shuffled labels), and of each test token its sentence, position, length and count in training.
    """

    kind: ClassVar[str] = "token identifiability"
    arrays: ClassVar[Mapping[str, Array]] = {
        "values": Array(" ".join(AXES)),
        **dict.fromkeys(("low", "high"), Array(" ".join(AXES))),
        "hits": Array(" ".join((*AXES, "token")), "integer"),
        "epochs": Array(" ".join(AXES), "integer"),
        "control": Array("distance layer"),
        **dict.fromkeys(("sentence", "position", "length", "count"), Array("token", "integer")),
        "blind": Array("token"),
        "transfer": Array("learned distance layer layer", needed=False),
    }

    targets: tuple[int, ...] = (0,)  # 0: the token itself, 1: the next one
    parts: tuple[str, ...] = ("whole",)
    maps: tuple[str, ...] = ()
    distances: tuple[str, ...] = ()
    pool: str = "sentence"
    report: Mapping[str, Any] = field(default_factory=dict)  # sizes, chance, ties, left_out, diverged, seconds

    @property
    def chance(self) -> float:
        """The rate of a blind guess, mean(1/n): over the test tokens' sequences, or 1/vocabulary."""
        return float(self.report["chance"])

    @property
    def diverged(self) -> list[dict[str, Any]]:
        """Maps that diverged, each with its target, part, map, distance, layer and reason; their rates are NaN."""
        return list(self.report["diverged"])

    def _labels(self, axis: str) -> list[Any]:
        plural = {"target": self.targets, "part": self.parts, "map": self.maps, "distance": self.distances}
        return list(plural[axis]) if axis in plural else super()._labels(axis)

    def _index_of(self, axis: str, label: Any) -> int:
        labels = self._labels(axis)
        if label not in labels:
            raise InputError(f"{axis}={label!r} was not measured; this result has {', '.join(map(repr, labels))}.")
        return labels.index(label)

    def rate(
        self,
        map: str = "linear",  # noqa: A002
        distance: str = "cosine",
        *,
        part: str = "whole",
        target: int = 0,
    ) -> Tensor:
        """Rates by layer, [layer]."""
        at = self._at(map, distance, part, target)
        return self.values[at]

    def interval(
        self,
        map: str = "linear",  # noqa: A002
        distance: str = "cosine",
        *,
        part: str = "whole",
        target: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Low and high end of the bootstrap interval over sentences, by layer, [layer] each."""
        at = self._at(map, distance, part, target)
        return self.extra["low"][at], self.extra["high"][at]

    def _at(self, map: str, distance: str, part: str, target: int) -> tuple[int, int, int, int]:  # noqa: A002
        wanted = zip(AXES, (target, part, map, distance), strict=False)
        a, b, c, d = (self._index_of(axis, label) for axis, label in wanted)
        return a, b, c, d

    def transfer(self, map: str = "linear", distance: str = "cosine") -> Tensor:  # noqa: A002
        """[trained on, tested on]: the rate of layer l's map on every layer m."""
        learned = [name for name in self.maps if name != "naive"]
        if "transfer" not in self.extra or map not in learned:
            have = ", ".join(learned) if "transfer" in self.extra else "none: measure with transfer=True"
            raise InputError(f"there is no transfer matrix for map={map!r}; there are: {have}.")
        return self.extra["transfer"][learned.index(map), self._index_of("distance", distance)]

    def select(self, *, layer: int | list[int] | None = None, head: int | list[int] | None = None) -> Self:
        """Only these layers."""
        if head is not None:
            raise InputError("token identifiability is a property of layers, not of heads: select by layer.")
        made = super().select(layer=layer)
        places = torch.tensor([self.layers.index(one) for one in made.layers])
        extra = dict(self.extra)
        for name, axes in LAYERED.items():
            for axis in axes:
                if name in extra:
                    extra[name] = extra[name].index_select(axis, places)
        return replace(made, extra=extra)

    def words(self) -> Self:
        raise InputError("rates are counted by token; see breakdown('piece') for whole words, first and later pieces.")

    def to_frame(self) -> pd.DataFrame:
        """One line per rate that was measured, with its interval and chance."""
        frame = super().to_frame()
        for name in ("low", "high"):
            frame[name] = self.extra[name].reshape(-1).numpy()
        frame["chance"] = self.chance
        measured = (self.extra["hits"] != NOT_COUNTED).any(-1).reshape(-1).numpy()
        wrong = {tuple(entry[axis] for axis in AXES) for entry in self.diverged}
        frame["diverged"] = [tuple(row) in wrong for row in frame[list(AXES)].itertuples(index=False, name=None)]
        columns: pd.DataFrame = frame[measured | frame["diverged"]].reset_index(drop=True)
        return columns

    def breakdown(self, by: str) -> pd.DataFrame:
        """Rates by kind of token, piece of a word, frequency in training, position or length (of whole states)."""
        from whence.tokens.breakdown import breakdown

        return breakdown(self, by)

    def plot(
        self,
        *,
        layer: int | None = None,
        head: int | None = None,
        ax: Any = None,
        part: str = "whole",
        target: int = 0,
    ) -> Any:
        """Rates by layer with their intervals, and chance; returns the matplotlib Axes."""
        from whence.tokens.plots import plot_rates

        if layer is not None or head is not None:
            raise InputError("rates are drawn over all layers and have no heads: choose a part= and a target= instead.")
        return plot_rates(self, part=part, target=target, ax=ax)

    def plot_transfer(self, map: str = "linear", distance: str = "cosine", *, ax: Any = None) -> Any:  # noqa: A002
        """The transfer matrix as an image; returns the matplotlib Axes."""
        from whence.tokens.plots import plot_transfer

        return plot_transfer(self, map, distance, ax=ax)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: the rates with their intervals, not the tokens."""
        rows = self.to_frame().to_dict(orient="records")
        out = {key: value for key, value in self._header().items() if key not in ("tokens", "key_tokens", "heads")}
        if "transfer" in self.extra:
            out["transfer"] = self.extra["transfer"].tolist()
        return {**out, "control": self.extra["control"].tolist(), "rates": rows}

    def _header(self) -> dict[str, Any]:
        own = ("targets", "parts", "maps", "distances")
        return {
            **super()._header(),
            **{name: list(getattr(self, name)) for name in own},
            "pool": self.pool,
            "report": dict(self.report),
        }

    @classmethod
    def _fields(cls, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> dict[str, Any]:
        own = {name: listed(header[name]) for name in ("targets", "parts", "maps", "distances")}
        return {**super()._fields(tensors, header), **own, "pool": header["pool"], "report": header["report"]}

    def _sizes(self) -> dict[str, int]:
        own = {axis: len(self._labels(axis)) for axis in AXES}
        learned = sum(name != "naive" for name in self.maps)
        return {**super()._sizes(), **own, "token": len(self.tokens), "learned": learned}

    def _check(self) -> None:
        super()._check()
        if wrong := [name for name, kind in REPORT.items() if not is_kind(self.report.get(name, ...), kind)]:
            raise ValueError(f"its report lacks {wrong[0]}, or it is no {REPORT[wrong[0]]}")

    def remarks(self) -> list[str]:
        """What a reader of the numbers should know, in sentences."""
        r = self.report
        sizes = (
            f"{r['train']:,} tokens of {r['train_sequences']} sequences trained the maps, {r['validation']:,} of "
            f"{r['validation_sequences']} stopped them, {r['test']:,} of {r['test_sequences']} were counted."
        )
        said = [sizes]
        left = [f"{n} {why}" for why, n in r["left_out"].items() if n]
        if left:
            said.append(f"Texts left out: {', '.join(left)}.")
        if r["ties"]:
            said.append(
                f"{r['ties']:.1%} of the test tokens share their input embedding with another candidate; a hit on any "
                f"of them counts, so that a blind guess hits {r['chance_with_ties']:.4f} of the time."
            )
        if self.pool == "vocabulary":
            said.append(f"Always answering the most frequent token of the training would be right {r['majority']:.1%}.")
        for entry in self.diverged:
            where = ", ".join(f"{axis} {entry[axis]}" for axis in AXES)
            said.append(f"Diverged and not counted: {where}: {entry['reason']}.")
        return said

    def _repr_html_(self) -> str:
        title = html.escape(f"Token identifiability of {self.provenance.model}, {self.pool}, chance {self.chance:.4f}")
        frame = self.to_frame()
        by_layer = frame.pivot_table(
            index=["target", "part", "map", "distance"], columns="layer", values="value", sort=False
        )
        notes = "<br>".join(html.escape(line) for line in self.remarks())
        return f"<div><b>{title}</b>{by_layer.to_html(float_format=lambda v: f'{v:.3f}')}{notes}</div>"
