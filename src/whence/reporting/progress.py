"""What a report is doing, for those who wait for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 64

Step = Callable[[str, float], None]
"""Told what is being done and how much of the whole is done, in [0, 1]. It may raise, to stop the work."""


def silent(_what: str, _share: float) -> None:
    """Nobody waits."""


@contextmanager
def shown(show: bool | None) -> Iterator[Step]:
    """A line on standard error that goes away at the end; None: only on a terminal or in a notebook."""
    from rich.console import Console

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter if show is None else show):
        yield silent
    elif console.is_jupyter or not console.is_terminal:  # a bar would need widgets, or a terminal
        with _line() as step:
            yield step
    else:
        with _bar(console) as step:
            yield step


@contextmanager
def _line() -> Iterator[Step]:
    def step(what: str, share: float) -> None:
        sys.stderr.write(f"\r{share:4.0%}  {what}".ljust(WIDTH))

    try:
        yield step
    finally:
        sys.stderr.write("\r" + " " * WIDTH + "\r")


@contextmanager
def _bar(console: Console) -> Iterator[Step]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=28), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda what, share: progress.update(task, description=what, completed=share)
