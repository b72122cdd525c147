"""Where queries and keys come from, in the very pass that is traced: from which inputs and which earlier attention calls.

A tensor's lineage is a set, kept as the bits of one number: a bit for every input of the model and for every attention call
that the tensor was computed from. Self-attention makes keys from the queries' own stream, so that they descend from all that the
queries descend from. The encoder's states, the keys of cross-attention, lack the decoder's input and its calls before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from whence.reading.capture.own_hooks import on_enter, on_leave
from whence.reading.wiring.op_graph import walk

if TYPE_CHECKING:
    from whence.reading.capture.recorder import Call


@dataclass(frozen=True)
class Role:
    """What one attention call does in its pass."""

    elsewhere: bool  # the queries' own stream is not in the keys
    in_decoder: bool  # it ran inside the model's decoder
    after: frozenset[int]  # the earlier calls that its queries descend from, by number
    reads: frozenset[int]  # and those that its keys descend from
    # The inputs of the model that its queries descend from. A mask that hides nothing may be left out, so they may differ.
    sources: frozenset[str] = field(compare=False)


class Lineage(TorchFunctionMode):
    """Follows lineages through the forward pass inside its `with` block. Holds no tensor, only numbers."""

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._depth = 0  # how many calls of the decoder are open
        self._bits = 0
        self._calls: list[int] = []
        self._sources: list[tuple[str, int]] = []
        for path, tensor in walk(inputs):
            self._sources.append((".".join(map(str, path)), self._next_bit()))
            self._add(tensor, self.of(tensor) | self._sources[-1][1])

    def of(self, tensor: Tensor) -> int:
        """The lineage of a tensor; 0 for weights and whatever was made from nothing that is followed."""
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else 0

    def role(self, call: Call) -> Role:
        """The part that an attention call plays. From now on its head outputs, and what is made of them, descend from it."""
        output = call.output if call.node is None else call.node
        before, bit = self.of(output), self._next_bit()
        self._add(output, before | bit)
        queries = before if call.query is None else self.of(call.query)
        keys = self.of(call.value if call.key is None else call.key)
        after, reads = (
            frozenset(number for number, other in enumerate(self._calls) if lineage & other)
            for lineage in (queries, keys)
        )
        self._calls.append(bit)
        sources = frozenset(name for name, source in self._sources if queries & source)
        return Role(bool(queries & ~keys), self._depth > 0, after, reads, sources)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        lineage = 0
        for _, tensor in walk((args, kwargs) if kwargs else args):
            lineage |= self.of(tensor)
        result = func(*args, **kwargs)
        if lineage:
            for _, tensor in walk(result):
                self._add(tensor, lineage)
            if result is None and args and isinstance(args[0], Tensor):  # x[…] = y writes into its first argument
                self._add(args[0], lineage)
        return result

    @contextmanager
    def within(self, decoder: nn.Module | None) -> Iterator[Lineage]:
        """Follow the pass, and know when it is inside the decoder."""

        def step(by: int) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                self._depth += by

            return hook

        hooks = []
        try:
            if decoder is not None:
                hooks = [on_enter(decoder, step(1)), on_leave(decoder, step(-1))]
            with self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _next_bit(self) -> int:
        self._bits += 1
        return 1 << (self._bits - 1)

    def _add(self, tensor: Tensor, lineage: int) -> None:
        self._known[id(tensor)] = (weakref.ref(tensor), lineage)
