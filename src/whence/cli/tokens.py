"""`whence tokens --texts FILE`: is this token still itself, layer by layer?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli._app import Debug, Json, Quiet, messages, results, watched, working
from whence.cli._model import ModelChoice, takes_model
from whence.cli._output import Format, check_plot, chosen_format, put_out, save_plot
from whence.errors import InputError

if TYPE_CHECKING:
    from whence.tokens.result import TokenIdentifiability


@takes_model(without=("pair",))
def command(
    texts: Annotated[
        str, typer.Option("--texts", metavar="FILE", help="CSV, TSV, JSONL, Parquet, plain text, or a data set's name.")
    ],
    text: Annotated[str | None, typer.Option("--text", help="The column with the texts.")] = None,
    pair: Annotated[str | None, typer.Option("--pair", help="The column with second texts.")] = None,
    read_as: Annotated[
        str | None, typer.Option("--read-as", help="csv, tsv, jsonl, json, parquet, text, datasets.")
    ] = None,
    split: Annotated[str, typer.Option("--split", help="Of a data set.")] = "train",
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first so many texts.")] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Hidden states, as 0,3,6 or 0-6; 0: embeddings.")
    ] = None,
    maps: Annotated[str, typer.Option("--maps", help="Of naive, linear, mlp, ridge, procrustes.")] = "naive,linear,mlp",
    distances: Annotated[str, typer.Option("--distances", help="Of cosine, l2.")] = "cosine,l2",
    parts: Annotated[str, typer.Option("--parts", help="Of whole, direction, norm.")] = "whole,direction,norm",
    targets: Annotated[str | None, typer.Option("--targets", help="0: the token itself, 1: the next one.")] = None,
    pool: Annotated[str, typer.Option("--pool", help="Candidates: sentence or vocabulary.")] = "sentence",
    attention: Annotated[
        str | None, typer.Option("--attention", help="encoder or decoder, of a model with both.")
    ] = None,
    by: Annotated[str | None, typer.Option("--by", help="Also by kind, piece, frequency, position or length.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the split, the maps and the bootstrap.")] = 0,
    save: Annotated[Path | None, typer.Option("--save", help="Keep the result in this file.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Keep what is fitted in this folder; run again, it goes on.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the rates by layer into this file (png, svg).")
    ] = None,
    as_json: Json = False,
    format_: Format = "table",
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 (acted on as it is parsed)
    *,
    source: ModelChoice,
) -> None:
    """How often does a hidden state still tell which input token it was?

    Maps from each layer back to the input embeddings are fitted on 70 % of the sentences, stopped on 15 % and counted
    on 15 %: the share of tokens whose own embedding is the nearest, with a bootstrap interval and chance.
    """
    how = chosen_format(format_, as_json)
    _check_by(by)
    check_plot(plot)
    chosen = _numbers("--layers", layers)
    aims = _numbers("--targets", targets)
    with working(f"Loading {source.model}", quiet):
        from whence.reading.texts import read_texts
        from whence.tokens.token_identifiability import token_identifiability

        data = read_texts(texts, text, pair=pair, format=read_as, split=split, limit=limit)
        loaded = source.load()
    result = token_identifiability(
        loaded, data, layers=chosen, maps=_names(maps), distances=_names(distances), parts=_names(parts), pool=pool,
        targets=aims, seed=seed, truncate=source.truncate, attention=attention, checkpoint=checkpoint,
        progress=watched(quiet), say=messages.print,
    )  # fmt: skip
    if save is not None:
        result.save(save)
    if plot is not None:
        save_plot(result.plot(), plot)

    def as_data() -> dict[str, Any]:
        lines = [] if by is None else result.breakdown(by).to_dict(orient="records")
        return {**result.to_dict(), **({} if by is None else {"breakdown": lines})}

    put_out(how, table=lambda: show(result, by), data=as_data, frame=result.to_frame)
    if not quiet and how == "table":
        for remark in result.remarks():
            messages.print(remark, soft_wrap=True)


def show(result: TokenIdentifiability, by: str | None = None) -> None:
    """The rates as tables, a line per map and distance."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    what = {0: "the token itself", 1: "the next token"}
    for target in result.targets:
        for part in result.parts:
            if part != "whole" and target != 0:
                continue
            source = "" if part == "whole" else f", from its {part} only"
            title = (
                f"{result.provenance.model}: {what.get(target, f'the token at {target:+d}')}{source} (by hidden state)"
            )
            table = Table("map", "distance", title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
            for layer in result.layers:
                table.add_column(str(layer), justify="right", no_wrap=True)
            for name in result.maps:
                for distance in result.distances:
                    rates = result.rate(name, distance, part=part, target=target).tolist()
                    table.add_row(name, distance, *(_rate(rate) for rate in rates))
            results.print(table)
    controls = result.extra["control"].nanmean().item()
    results.print(f"chance {result.chance:.4f}; ridge with shuffled labels {controls:.4f} on average")
    if by is not None:
        _show_breakdown(result, by)


def _show_breakdown(result: TokenIdentifiability, by: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    frame = result.breakdown(by)
    for (target, name, distance), lines in frame.groupby(["target", "map", "distance"], sort=False):
        title = f"by {by}: {name}, {distance}" + ("" if target == 0 else f", target {target:+d}")
        table = Table(by, "tokens", title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for layer in result.layers:
            table.add_column(str(layer), justify="right", no_wrap=True)
        for group, cells in lines.groupby(by, sort=False):
            rates = dict(zip(cells["layer"], cells["rate"], strict=True))
            row = [_rate(rates.get(layer, float("nan"))) for layer in result.layers]
            table.add_row(str(group), f"{cells['tokens'].iloc[0]:,}", *row)
        results.print(table)


def _rate(rate: float) -> str:
    return "–" if rate != rate else f"{rate:.3f}"


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",") if name.strip()]


def _numbers(option: str, given: str | None) -> list[int] | None:
    """0,3,6 or 0-6, as numbers."""
    if given is None:
        return None
    numbers: list[int] = []
    for part in _names(given):
        first, dash, last = part.partition("-") if not part.startswith("-") else (part, "", "")
        try:
            numbers += range(int(first), int(last) + 1) if dash else [int(first)]
        except ValueError:
            raise InputError(f"{option} {given!r}: write numbers, as 0,3,6 or 0-6.") from None
    return numbers


def _check_by(by: str | None) -> None:
    known = ("kind", "piece", "frequency", "position", "length")
    if by is not None and by not in known:
        raise InputError(f"--by {by!r} is no breakdown; choose one of {', '.join(known)}.")
