"""`whence methods`: what whence can measure."""

from __future__ import annotations

from typing import Annotated

import typer

from whence import method_table as registry
from whence.cli._app import Debug, Json, messages, print_json, results


def command(
    question: Annotated[
        str | None,
        typer.Option(help=f"Only those that answer one question: {', '.join(registry.QUESTIONS)}."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001 (acted on as it is parsed)
) -> None:
    """List the methods: the question each answers, its paper, what it costs and what it needs."""
    found = registry.methods(question)
    if as_json:
        print_json([method.to_dict() for method in found])
        return
    if not found:
        messages.print("No method is registered for that.")
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    for key, words in registry.QUESTIONS.items():
        answers = [method for method in found if method.question == key]
        if answers:
            table = Table(title=words, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
            table.add_column("method", no_wrap=True)
            table.add_column("what it gives", ratio=1)
            for name in ("cost", "needs"):
                table.add_column(name)
            for m in answers:
                table.add_row(m.name, f"{m.summary} [dim]({m.paper})[/dim]", m.cost, ", ".join(m.needs))
            results.print(table)
