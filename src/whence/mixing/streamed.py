"""Contributions of a stream: each layer's matrices are made, rolled on, and dropped unless they were asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from whence.errors import InputError
from whence.mixing.contributions import EMBEDDINGS, Contributions
from whence.mixing.rollout import roll_on
from whence.reading.joined_layers import join_layers
from whence.reading.refusals import refuse_following
from whence.reading.streaming import OneStackReader
from whence.reading.trace import Trace

OfLayer = Callable[[Trace], dict[str, Contributions]]
"""A trace of one layer → by method, what it is made of."""


class LayerContributions(OneStackReader):
    """A reader: by method, the layers that were asked for, as they are or rolled out from the embeddings.

    layers: which ones are held, negative from the end; None: all. each: what is held of a layer instead of its shares.
    """

    def __init__(
        self,
        of_layer: OfLayer,
        *,
        rollout: bool = False,
        layers: Sequence[int] | None = None,
        each: Callable[[Contributions], Any] | None = None,
    ) -> None:
        self.of_layer, self.rollout, self.layers, self.each = of_layer, rollout, layers, each
        self.count = 0
        self._rolled: dict[str, Tensor] = {}
        self._held: dict[str, list[tuple[int, Any]]] = {}

    @property
    def satisfied(self) -> bool:
        """Whether every layer that was asked for was seen; those counted from the end are known at the end alone."""
        layers = self.layers
        return layers is not None and min(layers, default=0) >= 0 and self.count > max(layers, default=-1)

    def see(self, piece: Trace) -> None:
        """Roll the layer on, and hold it where it was asked for."""
        (layer,) = piece.of().layers
        if self.rollout and layer.index != self.count:
            raise InputError(
                f"rollout needs every layer from 0 on; layer {self.count} is missing before {layer.index}."
            )
        for name, one in self.of_layer(piece).items():
            if self.rollout:
                refuse_following(f"the rollout of {one.method}", piece.mixes)
                matrix = one.values[0]
                self._rolled[name] = rolled = roll_on(self._rolled.get(name), matrix, causal=layer.causal)
                settings = {**one.provenance.settings, "origin": EMBEDDINGS}
                one = replace(one, values=rolled[None], provenance=one.provenance.by(one.method, **settings))
            self._hold(self._held.setdefault(name, []), one)
        self.count += 1

    def _hold(self, held: list[tuple[int, Any]], one: Contributions) -> None:
        layers = self.layers
        if layers is not None and self.count not in layers:
            # A layer counted from the end may be the last one seen: as many are held as the furthest of them asks for.
            back = -min((i for i in layers if i < 0), default=0)
            if not back:
                return
            recent = [place for place, (i, _) in enumerate(held) if i not in layers]
            if len(recent) >= back:
                held.pop(recent[0])
        if self.each is not None:
            held.append((self.count, self.each(one)))
            return
        # The next layer is rolled on in place.
        held.append((self.count, replace(one, values=one.values.clone()) if self.rollout else one))

    def result(self) -> dict[str, Any]:
        """By method: one result with the layers that were asked for, or what `each` made of them, in order."""
        wanted = range(self.count) if self.layers is None else [self._numbered(i) for i in self.layers]
        by_method = {}
        for name, held in self._held.items():
            by_number = dict(held)
            parts = [by_number[i] for i in wanted]
            by_method[name] = join_layers(parts) if self.each is None else _one_frame(parts)
        return by_method

    def _numbered(self, index: int) -> int:
        if not -self.count <= index < self.count:
            raise InputError(f"there is no layer {index}; there are {self.count} (0 … {self.count - 1}).")
        return index % self.count


def _one_frame(parts: list[Any]) -> Any:
    """Frames one below the other; anything else as a list."""
    import pandas as pd

    return pd.concat(parts, ignore_index=True) if parts and isinstance(parts[0], pd.DataFrame) else parts
