"""What a report is doing, for those who wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Step = Callable[[str, float], None]
"""Told what is being done and how much of the whole is done, in [0, 1]. It may raise, to stop the work."""


def silent(_what: str, _share: float) -> None:
    """Nobody waits."""


@contextmanager
def shown(show: bool | None) -> Iterator[Step]:
    """A bar on standard error that goes away at the end; None: only on a terminal or in a notebook."""
    from rich.console import Console

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter if show is None else show):
        yield silent
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=28), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda what, share: progress.update(task, description=what, completed=share)
