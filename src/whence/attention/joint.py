"""What does a whole layer's output determine? Not each head's row given its own output, but all heads given the sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from whence.attention.heads import find_token
from whence.core.attention.joint import JointIdentifiability, joint_identifiability
from whence.reading.trace import Trace
from whence.results.provenance import Provenance
from whence.results.short_repr import short_repr


@dataclass(frozen=True)
class LayerStatement:
    """The joint statement for one layer: does its output determine the head outputs, and what is free in common."""

    __repr__ = short_repr

    layer: int
    query: int
    joint: JointIdentifiability
    provenance: Provenance

    def sentence(self) -> str:
        """What is determined and what is not, in words."""
        joint = self.joint
        where = f"Layer {self.layer}: the attention block's output (before residual and norm)"
        if joint.determines_heads:
            first = (
                f"{where} determines every head's output; recovering them amplifies noise up to "
                f"{joint.condition:.0f}-fold."
            )
        else:
            first = (
                f"{where} does not determine the heads' outputs (its matrix has rank {joint.rank}), so nothing that is "
                "unique per head is unique from the block."
            )
        return (
            f"{first} The rows of its {joint.heads} heads at token {self.query} can move together in "
            f"{joint.null_dimension} directions."
        )

    def plot(self, *, ax: Any = None) -> Any:
        """What is free in common. See `whence.attention.plots`; returns the Axes."""
        from whence.attention.plots import plot_layer_statement

        return plot_layer_statement(self, ax)

    def to_dict(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "query": self.query,
            **self.joint.to_dict(),
            "provenance": self.provenance.to_dict(),
        }


def layer_statement(trace: Trace, layer: int, query: int = -1, *, attention: str | None = None) -> LayerStatement:
    """Whether the layer's output determines its head outputs (output matrix of full row rank); what is free in common.

    >>> import whence
    >>> trace = whence.trace(whence.load(), "The bank raised its rates.")
    >>> whence.layer_statement(trace, 0).joint.determines_heads
    True
    """
    stack = trace.of(attention)
    found = stack[layer]
    row = find_token(stack.tokens, query)
    values = found.values
    masks = [found.visible_of(place) for place in range(len(found.heads))]
    seen = None if found.visible is None else torch.stack([mask[row] for mask in masks if mask is not None])
    if found.sink is not None:
        values = pad(values, (0, 0, 0, 1))
        seen = None if seen is None else pad(seen, (0, 1), value=True)
    joint = joint_identifiability(found.projection.weight, values, visible=seen)
    origin = trace.provenance.by("layer-statement", layer=layer, query=row, attention=stack.name)
    return LayerStatement(layer, row, joint, origin)
