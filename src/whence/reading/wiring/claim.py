"""What was read of one attention call, for the interventions to test."""

from __future__ import annotations

from dataclasses import dataclass

from whence.reading.wiring.equation import Wiring
from whence.reading.wiring.handles import Handle, StateHandles
from whence.reading.wiring.projection import Projection


@dataclass(frozen=True)
class AttentionClaim:
    """What was read of one attention call, to be tested: where the head outputs go, and where that can be seen."""

    stack: str
    projection: Projection | None
    wiring: Wiring | None
    handles: StateHandles | None  # of the wiring
    projected: Handle | None  # the projection's output
    stream: Handle | None  # residual + branch, before a post-norm
    block_output: Handle | None
    block_input: Handle | None = None  # what the module around residual and attention is given

    @property
    def states(self) -> tuple[Handle, ...]:
        """Every place where this block shows a state."""
        own = () if self.handles is None else self.handles.all
        return tuple(h for h in (*own, self.projected, self.stream, self.block_output) if h is not None)
