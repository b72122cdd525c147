"""`whence attribute TEXT --model M --method alti`: which input tokens made the model predict this?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whence.cli._app import Debug, Json, Model, Options, Quiet, options_of, print_json, results, working
from whence.errors import InputError

if TYPE_CHECKING:
    from whence.mixing.attribution import Attribution


def command(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text; - reads it from standard input.")],
    method: Annotated[
        str, typer.Option("--method", help="alti, occlusion, ig, … (several with commas): see whence methods.")
    ] = "alti",
    target: Annotated[
        str | None, typer.Option("--target", help="A class (name or number) or a token; else what the model prefers.")
    ] = None,
    foil: Annotated[str | None, typer.Option("--foil", help="Why the target rather than this one.")] = None,
    position: Annotated[
        int | None, typer.Option("--position", help="Which position predicts, for models that predict at each token.")
    ] = None,
    pair: Annotated[str | None, typer.Option("--pair", help="A second text, for models of pairs.")] = None,
    words: Annotated[bool, typer.Option("--words", help="Gather sub-words into words.")] = False,
    model: Model = "minilm",
    task: Annotated[str | None, typer.Option("--task", help="The head to load: text-classification, …")] = None,
    option: Options = None,
    save: Annotated[Path | None, typer.Option("--save", help="Also write the scores to this safetensors file.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 (acted on as it is parsed)
) -> None:
    """Score each input token for one prediction, by one method or several side by side."""
    names = [name.strip() for name in method.split(",") if name.strip()]
    if not names:
        raise InputError("--method names no method: see whence methods.")
    if save is not None and len(names) > 1:
        raise InputError(f"--save writes one result: give one method, not {len(names)}.")
    with working(f"Reading {model}", quiet):
        from whence.mixing.attribute import attribute
        from whence.model.load import load

        loaded = load(model, task)
        source = sys.stdin.read() if text == "-" else text
    with working(f"Explaining by {', '.join(names)}", quiet):
        found = attribute(
            loaded, source, names, target, foil=foil, text_pair=pair, position=position, **options_of(option)
        )
    if save is not None:
        found[names[0]].save(save)
    shown = {name: scores.words() if words else scores for name, scores in found.items()}
    if as_json:
        plain = {name: scores.to_dict() for name, scores in shown.items()}
        print_json(plain[names[0]] if len(names) == 1 else plain)
        return
    _show(shown)


def _show(attributions: dict[str, Attribution]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    first = next(iter(attributions.values()))
    for group in _groups(attributions):
        table = Table("", "token", box=SIMPLE_HEAD, pad_edge=False)
        for name in group:
            table.add_column(name, justify="right")
        tokens = next(iter(group.values())).tokens
        for i, token in enumerate(tokens):
            numbers = [f"{float(s.values[i]):{'+' if s.signed else ''}.3g}" for s in group.values()]
            table.add_row(str(i), escape(token), *numbers)
        results.print(table)
    settings = first.provenance.settings
    if settings.get("target") is None:
        explained = "no prediction (the model has no head): the mean of all final states"
    else:
        rather = "" if settings.get("foil") is None else f" rather than {settings['foil']}"
        place = "" if settings.get("position") is None else f" at position {settings['position']}"
        explained = f"number {settings['target']} of the output{rather}{place}"
    results.print(f"{first.provenance.model}: {explained}.", soft_wrap=True)


def _groups(attributions: dict[str, Attribution]) -> list[dict[str, Attribution]]:
    """Up to four methods side by side, of the same tokens: what 80 columns hold."""
    groups: list[dict[str, Attribution]] = []
    for name, scores in attributions.items():
        if groups and len(groups[-1]) < 4 and next(iter(groups[-1].values())).tokens == scores.tokens:
            groups[-1][name] = scores
        else:
            groups.append({name: scores})
    return groups
