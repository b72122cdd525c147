"""What long work is doing, for those who wait for it: the one way in which everything here tells of its progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 64

Progress = bool | Callable[[str, float, float], None] | None
"""What a caller gives. True: a bar on standard error; None: one where somebody watches (a terminal or a notebook); False:
nothing. A function: told what is being done, how much is done, and of how much; it may raise, to stop the work."""


Say = Callable[[str], None]
"""Told of something worth a sentence."""


class Step(Protocol):
    """What the work calls: what is being done, how much of it is done, and of how much (1: `done` is a share)."""

    def __call__(self, what: str, done: float, total: float = 1.0, /) -> None: ...


def silent(_what: str, _done: float, _total: float = 1.0, /) -> None:
    """Nobody waits."""


@contextmanager
def shown(progress: Progress) -> Iterator[Step]:
    """A function for the work to call; what it shows goes away at the end."""
    from rich.console import Console

    if callable(progress):
        yield lambda what, done, total=1.0, /: progress(what, done, total)
        return
    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter if progress is None else progress):
        yield silent
    elif console.is_jupyter or not console.is_terminal:  # a bar would need widgets, or a terminal
        with _line() as step:
            yield step
    else:
        with _bar(console) as step:
            yield step


@contextmanager
def counted(title: str, total: int, progress: Progress) -> Iterator[Callable[[], None]]:
    """A function to call after each of `total` steps of one kind."""
    with shown(progress) as step:
        done = 0

        def one() -> None:
            nonlocal done
            done += 1
            step(title, done, total)

        yield one


@contextmanager
def _line() -> Iterator[Step]:
    def step(what: str, done: float, total: float = 1.0, /) -> None:
        sys.stderr.write(f"\r{done / max(total, 1):4.0%}  {what}".ljust(WIDTH))

    try:
        yield step
    finally:
        sys.stderr.write("\r" + " " * WIDTH + "\r")


@contextmanager
def _bar(console: Console) -> Iterator[Step]:
    from rich import progress as bars

    columns = (
        bars.BarColumn(bar_width=28), bars.TaskProgressColumn(), bars.TextColumn("{task.description}"), bars.TimeElapsedColumn(),
    )  # fmt: skip
    with bars.Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda what, done, total=1.0, /: progress.update(task, description=what, completed=done, total=total)
