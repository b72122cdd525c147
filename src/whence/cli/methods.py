"""`whence methods`: what whence can measure."""

from __future__ import annotations

from typing import Annotated

import typer

from whence import method_table
from whence.cli._app import Debug, Json, messages, results
from whence.cli._output import Format, chosen_format, frame_of, put_out


def command(
    name: Annotated[str | None, typer.Argument(metavar="[METHOD]", help="Everything about one method.")] = None,
    question: Annotated[
        str | None,
        typer.Option(help=f"Only those that answer one question: {', '.join(method_table.QUESTIONS)}."),
    ] = None,
    as_json: Json = False,
    format_: Format = "table",
    debug: Debug = False,  # noqa: ARG001 (acted on as it is parsed)
) -> None:
    """List the methods: the question each answers, its paper, what it costs and what it needs."""
    how = chosen_format(format_, as_json)
    found = method_table.methods(question) if name is None else (method_table.method(name),)
    if how != "table":
        rows = [method.to_dict() for method in found]
        put_out(how, table=lambda: None, data=lambda: rows, frame=lambda: frame_of(rows))
        return
    from rich.padding import Padding

    if not found:
        messages.print("No method is registered for that.")
        return
    if name is not None:
        _about(found[0])
        return
    for key, words in method_table.QUESTIONS.items():
        answers = [method for method in found if method.question == key]
        if answers:
            results.print(f"\n[bold]{words}[/bold]")
        for m in answers:
            results.print(f"  {m.name}", style="cyan", highlight=False)
            results.print(Padding(f"{m.summary} [dim]({m.paper}; {m.cost})[/dim]", (0, 0, 0, 6)), highlight=False)
    results.print("\nMore of one: whence methods NAME.", highlight=False)


def _about(m: method_table.Method) -> None:
    from rich.table import Table

    where = {
        "matrix": "whence mix, whence attribute",
        "contributions": "whence mix, whence attribute",
        "scores": "whence attribute",
        "measure": "its own function or command",
    }
    lines = {
        "gives": m.summary,
        "paper": m.paper,
        "cost": f"{m.cost}: {method_table.COSTS[m.cost]}",
        "needs": ", ".join(m.needs) or "a trace",
        "options": ", ".join(m.options) or "none",
        "signed": "yes: a negative number speaks against" if m.signed else "no",
        "target, foil": "yes" if m.contrast else "no: its answer does not depend on what is predicted",
        "determined": method_table.DETERMINED[m.determined],
        "use": where[m.gives],
        "code": m.location,
    }
    if m.gives == "measure":
        lines = {key: value for key, value in lines.items() if key not in ("signed", "target, foil", "determined")}
    results.print(f"[bold]{m.name}[/bold]: {m.title}", highlight=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for key, value in lines.items():
        table.add_row(key, value)
    results.print(table, highlight=False)
