"""A progress bar on standard error, or a caller's own: only where it was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = bool | Callable[[int, int], None]
"""True: a bar. A function: told how many steps are done, and of how many; it may raise, to stop the work."""


@contextmanager
def bar(title: str, total: int, show: Progress) -> Iterator[Callable[[], None]]:
    """A function to call after each of `total` steps."""
    if callable(show):
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            show(done, total)

        yield step
        return
    if not show:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)
