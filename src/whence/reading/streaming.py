"""A stream: the layers of one forward pass, one by one as the model makes them, each forgotten before the next.

A trace is a stream collected. Measures that read one layer at a time take a stream where they take a trace, in memory that does
not grow with the number of layers.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from whence.errors import InputError
from whence.model.load import Model, as_model
from whence.model.memory import refusing_lock
from whence.reading.capture.untouched import guarded
from whence.reading.inputs import Prepared, prepare
from whence.reading.rerun.run import Outcome, prove_model, run
from whence.reading.trace import KEEP, Layer, Trace
from whence.reading.trace_of_row import trace_of_row
from whence.reading.wiring.sites import AttentionSite

__all__ = ["Reader", "Stream", "stream"]


class Reader(Protocol):
    """What a measure makes of the layers, one at a time."""

    @property
    def satisfied(self) -> bool:
        """Whether it needs no further layer."""

    def see(self, piece: Trace) -> None:
        """One more layer, as a trace that holds nothing else."""

    def result(self) -> Any:
        """What it has made of them, when the last was seen."""


class OneStackReader:
    """A reader whose measure joins an encoder and its decoder on a trace, and cannot on a stream: the stack must be named."""


class _Stop(BaseException):
    """Ends a pass of which nothing more is needed."""


class Stream:
    """The layers of one text, made when they are asked for. Each `for`, and each measure, runs the model once.

    >>> import whence
    >>> stream = whence.stream(whence.load(), "The bank raised its rates.")
    >>> [layer.attention.shape[0] for layer in stream]
    [12, 12, 12, 12, 12, 12]
    >>> whence.identifiability(stream).values.shape
    torch.Size([6, 12, 8])
    """

    def __init__(self, model: Model, prepared: Prepared) -> None:
        self.model, self.prepared = model, prepared

    def __repr__(self) -> str:
        return f"Stream({self.model.name}: {self.prepared.length} tokens)"

    # -- all of it --------------------------------------------------------------------------------------------------

    def collect(self) -> Trace:
        """The same as `whence.trace` of the text: every layer at once, and the logits."""
        from whence.reading.tracing import collected

        return collected(self.model, self.prepared)

    # -- layer by layer ---------------------------------------------------------------------------------------------

    def read(self, reader: Reader, attention: str | None = None) -> Any:
        """Run the model once and show `reader` every layer of one stack; what it makes of them."""
        return self._run([(reader, attention)])[0]

    def measure(self, *functions: Callable[[Stream], Any]) -> list[Any]:
        """Several measures in one pass: each function is given a stream and returns what one measure makes of it.

        Each function is called twice: once to learn what it reads, and once more with what was read.

        >>> import whence
        >>> shares, mixed = whence.stream(whence.load(), "The bank raised its rates.").measure(
        ...     whence.identifiability,
        ...     lambda layers: whence.contributions(layers, "alti", rollout=True, layers=[-1]),
        ... )
        >>> shares.values.shape, mixed.values.shape
        (torch.Size([6, 12, 8]), torch.Size([1, 8, 8]))
        """
        asked = []
        for function in functions:
            branch = _Branch(self.model, self.prepared)
            try:
                function(branch)
            except _Asked as request:
                asked.append((request.reader, request.attention))
            else:
                raise InputError("a function given to measure(…) must hand its stream to one measure, and did not.")
        results = self._run(asked)
        return [
            function(_Branch(self.model, self.prepared, (result,)))
            for function, result in zip(functions, results, strict=True)
        ]

    def _run(self, readers: list[tuple[Reader, str | None]]) -> list[Any]:
        names: list[str] | None = None

        def show(piece: Trace, stacks: list[str]) -> None:
            nonlocal names
            if names is None:
                names = [_stack_name(stacks, attention, reader) for reader, attention in readers]
            own = next(iter(piece.stacks))
            for (reader, _), name in zip(readers, names, strict=True):
                if name == own and not reader.satisfied:
                    reader.see(piece)
            if all(reader.satisfied for reader, _ in readers):
                raise _Stop

        self._pass(show)
        return [reader.result() for reader, _ in readers]

    def _pass(self, show: Callable[[Trace, list[str]], None]) -> None:
        """One forward pass in this thread; `show` is given each layer in its course, and may end it by `_Stop`."""
        with contextlib.suppress(_Stop):
            guarded(self.model.model, lambda: self._forward(show))

    def _forward(self, show: Callable[[Trace, list[str]], None]) -> None:
        proof, wanted = prove_model(self.model, self.prepared), frozenset(KEEP)
        order: list[str] = [s for s in ("encoder", "decoder", "cross") if s in proof.stacks]

        def consume(site: AttentionSite, outcome: Outcome) -> None:
            piece = trace_of_row(self.model, proof, outcome, 0, self.prepared, wanted, [site])
            if len(order) == 1:
                (name,) = piece.stacks
                order[:] = [name]
            show(piece, order)

        run(self.model, proof, dict(self.prepared.inputs), 1, wanted, consumer=consume)

    # -- by hand ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Layer]:
        """The layers in the order of the pass (an encoder's, then a decoder's own and cross layers in turn).

        The pass runs in a thread that waits after each layer until the next is asked for, and ends when the loop does.
        """
        pieces = self.pieces()
        try:
            for piece in pieces:
                (stack,) = piece.stacks.values()
                yield stack.layers[0]
        finally:
            pieces.close()  # type: ignore[attr-defined]

    def pieces(self) -> Iterator[Trace]:
        """As the layers, each as a trace that holds nothing else: with its stack, tokens and provenance."""
        # Unbounded, so that neither side ever waits to put: whoever is interrupted, the other still comes to its end.
        offered: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()

        def show(piece: Trace, _stacks: list[str]) -> None:
            offered.put(("piece", piece))
            del piece
            if not wanted.get():
                raise _Stop

        def work() -> None:
            try:
                if wanted.get():
                    self._pass(show)
                offered.put(("end", None))
            except BaseException as problem:  # handed to the thread that asked
                offered.put(("problem", problem))

        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(work,), name="whence stream", daemon=True)

        def end() -> None:
            wanted.put(False)  # the pass may be on its way to the next layer, and ends there
            if thread.ident is not None:
                thread.join()

        with refusing_lock(self.model.model, thread):
            try:
                thread.start()
                while True:
                    wanted.put(True)
                    kind, content = offered.get()
                    if kind == "problem":
                        raise content
                    if kind == "end":
                        return
                    yield content
                    del content
            finally:
                try:
                    end()
                finally:
                    end()  # again, if the first was interrupted


class _Asked(BaseException):
    """What a function wants to read, learned without running the model."""

    def __init__(self, reader: Reader, attention: str | None) -> None:
        self.reader, self.attention = reader, attention


class _Branch(Stream):
    """The stream as one of several measures sees it: first it is asked what it reads, then it is given that."""

    def __init__(self, model: Model, prepared: Prepared, answer: tuple[Any] | None = None) -> None:
        super().__init__(model, prepared)
        self.answer = answer

    def read(self, reader: Reader, attention: str | None = None) -> Any:
        if self.answer is None:
            raise _Asked(reader, attention)
        return self.answer[0]


def _stack_name(stacks: list[str], attention: str | None, reader: Reader) -> str:
    if attention is None and len(stacks) > 1 and isinstance(reader, OneStackReader):
        raise InputError(
            f"this model has {', '.join(stacks)}, which a stream does not join: choose attention='encoder' or 'decoder', or "
            "collect() the stream."
        )
    if attention is not None and attention not in stacks:
        raise InputError(f"attention={attention!r} is not in this model; it has: {', '.join(stacks)}.")
    return stacks[0] if attention is None else attention


def stream(model: Any, text: Any, text_pair: Any = None, target: Any = None, *, truncate: bool = False) -> Stream:
    """The layers of `model` on `text`, one by one: for texts whose trace would not fit in memory.

    Takes what `whence.trace` takes, one text at a time. Measures that read one layer at a time (`identifiability`,
    `contributions` with the methods that give a matrix, `effective_attention`, `certify`) take the stream in place of a
    trace; `measure` runs several of them in one pass; `for layer in stream` hands out the layers themselves.

    >>> import whence
    >>> layers = whence.stream(whence.load(), "The bank raised its rates.")
    >>> whence.contributions(layers, "alti", rollout=True, layers=[-1]).values.shape
    torch.Size([1, 8, 8])
    """
    chosen = as_model(model)
    prepared, single = prepare(chosen, text, text_pair, target, truncate=truncate)
    if not single and len(prepared) != 1:
        raise InputError(f"a stream is of one text; {len(prepared)} were given: take them one by one.")
    return Stream(chosen, prepared[0])
