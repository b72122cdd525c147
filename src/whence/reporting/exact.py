"""Exact intervals of whole heads, solved beside the rest of a report: every row of the heads that it lists.

HiGHS works without Python's lock, so a thread per core is as good as a process; on short texts the rest of the report
holds that lock, and the intervals wait for it to be done. The threads take the heads in turns, a few rows each: when the
time is up, every head has its share, and each row says whether it is exact.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain
from threading import Event, Lock

import torch
from torch import Tensor

from whence.attention.heads import head_of
from whence.core.attention.row_intervals import RowInterval, row_intervals
from whence.core.numerics.threads import SHORT, one_thread, workers_for
from whence.core.numerics.tolerances import GAP
from whence.reading.trace import Layer

WEIGHTS = 16
"""How many of a row's weights are solved: those that the page draws unless told to draw all."""

WHOLE = 512
"""Up to so many tokens every row of the listed heads is exact, however long it takes (on two cores about ten seconds at
128 tokens, minutes at 512)."""

SECONDS = 15.0
"""For longer texts, unless told otherwise."""

TURN = 8


@dataclass
class HeadIntervals:
    """One head: keys [query, k] (−1: none), lower and upper [query, k], and which rows [query] are solved.

    raw and other [query, key]: the attention, and the farthest alternative known to each of its rows.
    """

    keys: Tensor
    lower: Tensor
    upper: Tensor
    solved: Tensor
    raw: Tensor
    other: Tensor
    _work: Iterator[RowInterval] = field(repr=False)

    def turn(self) -> bool:
        """Solve a few rows; False when none are left."""
        for _ in range(TURN):
            found = next(self._work, None)
            if found is None:
                return False
            q, total = found.query, self.raw[found.query].sum()
            self.lower[q], self.upper[q] = found.lower * total, found.upper * total
            if self._moved(found.other * total, q) > self._moved(self.other[q], q):
                self.other[q] = found.other * total
            self.solved[q] = True
        return True

    @property
    def moved(self) -> bool:
        """Whether any row has an alternative."""
        return float((self.other - self.raw).abs().amax()) > GAP

    def _moved(self, row: Tensor, query: int) -> float:
        return float((row - self.raw[query]).abs().sum())


class ExactIntervals:
    """The heads of one report. `budget`: seconds from the first one; None: see `WHOLE` and `SECONDS`."""

    def __init__(self, tokens: int, budget: float | None) -> None:
        self._seconds = (float("inf") if tokens <= WHOLE else SECONDS) if budget is None else budget
        self.heads: dict[tuple[str, int, int], HeadIntervals] = {}
        self._deadline: float | None = None
        self._stopped, self._lock = Event(), Lock()
        self._left: deque[HeadIntervals] = deque()
        self._beside = tokens > SHORT
        self._pool = ThreadPoolExecutor(workers_for(tokens), thread_name_prefix="whence-exact")
        self._running: list[Future[None]] = []

    def _late(self) -> bool:
        return self._stopped.is_set() or (self._deadline is not None and time.monotonic() > self._deadline)

    def add(
        self,
        stack: str,
        layer: Layer,
        head: int,
        keys: Tensor,
        free: Tensor,
        first: Sequence[int],
        then: Sequence[int],
        other: Tensor | None,
    ) -> None:
        """Begin with a head.

        keys [query, k] to solve; free [query], 0: the row is unique; first: rows to solve whatever time it takes; then:
        rows to solve after them; other [query, key]: alternatives that are known already.
        """
        place = layer.heads.index(head)
        row, mine, visible = head_of(layer, place)
        raw = row.detach().to(torch.float64)
        unique = free == 0
        weights = raw.gather(-1, keys.clamp(min=0)) * (keys >= 0)
        listed = [q for q in dict.fromkeys(first) if not unique[q]]
        rest = [q for q in then if not unique[q] and q not in listed]
        made = HeadIntervals(
            keys,
            torch.where(unique[:, None], weights, 0.0),
            torch.where(unique[:, None], weights, 0.0),
            unique.clone(),
            raw,
            (raw if other is None else other).clone(),
            chain(
                row_intervals(row, mine, keys, rows=listed, visible=visible, stop=self._stopped.is_set),
                row_intervals(row, mine, keys, rows=rest, visible=visible, stop=self._late),
            ),
        )
        self.heads[stack, layer.index, head] = made
        if self._deadline is None:
            self._deadline = time.monotonic() + self._seconds
        with self._lock:
            self._left.append(made)
        if self._beside:
            self._begin()

    def _begin(self) -> None:
        self._running.append(self._pool.submit(self._run))

    @one_thread()
    def _run(self) -> None:
        while not self._stopped.is_set():
            with self._lock:
                if not self._left:
                    return
                head = self._left.popleft()
            if head.turn():
                with self._lock:
                    self._left.append(head)

    @property
    def rows(self) -> tuple[int, int]:
        """How many rows are solved, and of how many."""
        solved = [head.solved for head in self.heads.values()]
        return sum(int(s.sum()) for s in solved), sum(len(s) for s in solved)

    def finish(self, step: Callable[[int, int], None]) -> None:
        """Wait until all rows are solved or the time is up; `step` hears how many are done. It may raise."""
        if not self._beside:
            self._begin()
        while wait(self._running, timeout=0.1).not_done:
            step(*self.rows)
        for one in self._running:
            one.result()

    def close(self) -> None:
        """Leave off: what is not solved stays a bound."""
        self._stopped.set()
        self._pool.shutdown(wait=True)
