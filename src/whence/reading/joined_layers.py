"""A measure of single layers, made of a stream: what it gives for each layer, joined along the layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from whence.errors import InputError
from whence.reading.refusals import ranges
from whence.reading.trace import Trace
from whence.results.result import Result

R = TypeVar("R", bound=Result)


class JoinedLayers(Generic[R]):
    """A reader: `measure` of every layer by itself, and then one result with all of them."""

    satisfied = False

    def __init__(self, measure: Callable[[Trace], R]) -> None:
        self.measure, self.results = measure, list[R]()

    def see(self, piece: Trace) -> None:
        self.results.append(self.measure(piece))

    def result(self) -> R:
        return join_layers(self.results)


def join_layers(results: list[R]) -> R:
    """One result of results of one layer each; every tensor has the layer as its first axis."""
    if not results:
        raise InputError("the stream showed no layer.")
    first = results[0]

    def joined(tensors: list[Any]) -> Tensor:
        if len({t.shape[1:] for t in tensors}) > 1:
            tensors = list(torch.broadcast_tensors(*tensors))
        return torch.cat(tensors)

    return replace(
        first,
        values=joined([r.values for r in results]),
        layers=tuple(layer for r in results for layer in r.layers),
        extra={name: joined([r.extra[name] for r in results]) for name in first.extra},
    )


class ChosenLayer:
    """A reader that wants one layer alone: the pass ends when it was seen."""

    def __init__(self, index: int) -> None:
        self.index, self.indices = index, list[int]()
        self.piece: Trace | None = None

    @property
    def satisfied(self) -> bool:
        return self.piece is not None

    def see(self, piece: Trace) -> None:
        (layer,) = piece.of().layers
        self.indices.append(layer.index)
        if layer.index == self.index:
            self.piece = piece

    def result(self) -> Trace:
        if self.piece is None:
            raise InputError(f"there is no layer {self.index}; there are layers {ranges(tuple(self.indices))}.")
        return self.piece
