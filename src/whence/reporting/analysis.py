"""One analysis of a trace that look, the report and the server share: whatever they ask for is computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from whence.attention.overview import Overview, overview
from whence.attention.witness import RowWitness, witness
from whence.core.attention.verdict import check_epsilon
from whence.mixing.contributions import Contributions, contributions
from whence.reading.trace import Trace

Measured = TypeVar("Measured")


class Analysis:
    """What is known of `trace`; `epsilon`: how far a weight may be uncertain and still be read.

    A measure that refuses is asked again each time, so that each caller hears why.

    >>> import whence
    >>> analysis = Analysis(whence.trace(whence.load(), "The bank raised its rates."))
    >>> analysis.mixture("alti") is analysis.mixture("alti")
    True
    """

    def __init__(self, trace: Trace, *, epsilon: float = 0.05) -> None:
        check_epsilon(epsilon)
        self.trace, self.epsilon = trace, epsilon
        self._results: dict[tuple[Any, ...], Any] = {}

    def _once(self, key: tuple[Any, ...], measure: Callable[[], Measured]) -> Measured:
        if key not in self._results:
            self._results[key] = measure()
        measured: Measured = self._results[key]
        return measured

    def overview(self, attention: str | None = None) -> Overview:
        """The verdict on every head of a stack, with the certificates of the rows that are listed."""
        stack = self.trace.of(attention).name
        return self._once(("overview", stack), lambda: overview(self.trace, epsilon=self.epsilon, attention=stack))

    def mixture(self, method: str, attention: str | None = None) -> Contributions:
        """`whence.contributions` by this method, layer by layer where the method has layers."""
        # None: an encoder–decoder's two stacks together; with one stack its name says nothing more.
        stack = attention if len(self.trace.stacks) > 1 else None
        return self._once(("mixture", method, stack), lambda: contributions(self.trace, method, attention=stack))

    def witness(self, layer: int, head: int, query: int, attention: str | None = None) -> RowWitness:
        """The farthest other row with the same output that was found."""
        stack = self.trace.of(attention).name
        return self._once(
            ("witness", stack, layer, head, query),
            lambda: witness(self.trace, layer, head, query, attention=stack),
        )
