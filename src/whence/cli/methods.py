"""`whence methods`: what whence can measure."""

from __future__ import annotations

from typing import Annotated

import typer

from whence import registry
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
    from rich.table import Table

    for key, words in registry.QUESTIONS.items():
        answers = [method for method in found if method.question == key]
        if answers:
            table = Table(
                "method", "what it gives", "paper", "cost", "needs", title=words, title_justify="left"
            )
            for m in answers:
                table.add_row(m.name, m.summary, m.paper, m.cost, ", ".join(m.needs))
            results.print(table)
