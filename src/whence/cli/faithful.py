"""`whence faithful TEXTS --model DIR`: which explanation of this classifier is faithful?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli._app import Debug, Json, Quiet, messages, results, watched, working
from whence.cli._model import ModelChoice, takes_model
from whence.cli._output import Format, chosen_format, put_out
from whence.errors import InputError

if TYPE_CHECKING:
    from whence.faithful.result import Faithfulness


@takes_model(without=("pair",))
def command(
    texts: Annotated[
        str, typer.Argument(metavar="TEXTS", help="CSV, TSV, JSONL, Parquet, text, or a data set's name.")
    ],
    methods: Annotated[
        str, typer.Option("--methods", help="fast, all, or names with commas: see whence methods.")
    ] = "fast",
    target: Annotated[
        str, typer.Option("--target", help="predicted, gold (needs --label), a class or a token.")
    ] = "predicted",
    foil: Annotated[
        str | None, typer.Option("--foil", help="Set against the target: logit(target) − logit(foil).")
    ] = None,
    units: Annotated[str, typer.Option("--units", help="word or token.")] = "word",
    operators: Annotated[
        str, typer.Option("--operators", help="How units are removed: drop, mask, or both.")
    ] = "drop,mask",
    limit: Annotated[int | None, typer.Option("--limit", help="Only so many texts, from the start.")] = None,
    column: Annotated[str | None, typer.Option("--text", help="The column that holds the texts.")] = None,
    pair: Annotated[str | None, typer.Option("--pair", help="The column of second texts.")] = None,
    label: Annotated[str | None, typer.Option("--label", help="The column of gold labels.")] = None,
    rationales: Annotated[
        str | None, typer.Option("--rationales", help="A column of marks (0 1 1 …), or of character spans as JSON.")
    ] = None,
    text_format: Annotated[
        str | None, typer.Option("--read-as", help="How to read TEXTS, where its name does not say.")
    ] = None,
    split: Annotated[str, typer.Option("--split", help="Of a data set.")] = "train",
    random: Annotated[int, typer.Option("--random", help="Pairs of random orders.")] = 10,
    ceiling: Annotated[str, typer.Option("--ceiling", help="auto, exact or none.")] = "auto",
    seed: Annotated[int, typer.Option("--seed", help="Draws random orders and ties, together with each text.")] = 0,
    save: Annotated[
        Path | None, typer.Option("--save", help="Keep every finished text in this file; run again, it goes on.")
    ] = None,
    page: Annotated[Path | None, typer.Option("--html", help="Also write a report of the run to this file.")] = None,
    as_json: Json = False,
    format_: Format = "table",
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 (acted on as it is parsed)
    *,
    source: ModelChoice,
) -> None:
    """Remove words in each explanation's order and see how fast the prediction goes: what beats what, and how surely."""
    how = chosen_format(format_, as_json)
    from whence.reading.texts import read_texts

    given = {"format": text_format, "split": split, "limit": limit}
    read = read_texts(texts, column, label, pair=pair, **given)  # type: ignore[arg-type]
    marked = None
    if rationales is not None:
        cells = read_texts(texts, column, rationales, **given).labels or ()  # type: ignore[arg-type]
        marked = [parse_rationale(cell, row) for row, cell in enumerate(cells)]
    with working(f"Loading {source.model}", quiet):
        from whence.faithful.evaluate import faithfulness

        loaded = source.load()
    found = faithfulness(
        loaded,
        read,
        methods,
        target,
        units,
        [name.strip() for name in operators.split(",")],
        random,
        ceiling,
        marked,
        seed,
        save,
        foil=foil,
        truncate=source.truncate,
        progress=watched(quiet),
        say=messages.print,
    )
    if page is not None:
        from whence.reporting.report import report

        report(found).save(page)
    put_out(how, table=lambda: show(found), data=found.to_dict, frame=lambda: found.table().reset_index())


def parse_rationale(cell: Any, row: int) -> list[Any]:
    """Marks or spans from a cell: a list as it is, JSON, or marks with spaces."""
    if isinstance(cell, list | tuple):
        return list(cell)
    text = str(cell).strip()
    try:
        return (
            list(json.loads(text)) if text.startswith("[") else [int(mark) for mark in text.replace(",", " ").split()]
        )
    except (ValueError, TypeError):
        raise InputError(f"the rationale of row {row} is {text[:60]!r}: write 0 1 1 … or [[start, end], …].") from None


def show(faithfulness: Faithfulness) -> None:
    """A table for each way of removing words, best first, then the verdict, and plausibility where there are rationales."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    from whence.faithful.plausibility import MEASURES, of_run

    frame = faithfulness.table() if faithfulness.paired else None
    for operator in faithfulness.operators if frame is not None else ():
        table = Table(box=SIMPLE_HEAD, pad_edge=False, title=f"words removed: {operator}", title_justify="left")
        table.add_column("method", no_wrap=True)
        for name in ("signed", "Δ", "95 %", "comp", "suff", "NAOPC"):
            table.add_column(name, justify="left" if name == "signed" else "right", no_wrap=True)
        for row in frame[frame["operator"] == operator].to_dict("records"):  # type: ignore[index]
            exact = row["naopc"] == row["naopc"]
            naopc = row["naopc"] if exact else row["naopc_beam"]
            table.add_row(
                escape(row["method"]),
                {True: "yes", False: "no"}.get(faithfulness.signed.get(row["method"]), ""),  # type: ignore[arg-type]
                f"{row['delta']:.2f}",
                f"{row['low']:.2f} … {row['high']:.2f}",
                f"{row['comp']:.2f}",
                f"{row['suff']:.2f}",
                f"{'' if exact else '≤ '}{naopc:.2f}" if naopc == naopc else "–",
            )
        results.print(table)
    for sentence in faithfulness.verdict():
        results.print(escape(sentence), soft_wrap=True)
    plausible = of_run(faithfulness)
    if plausible is not None:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, title="against the rationales", title_justify="left")
        table.add_column("method", no_wrap=True)
        for name in MEASURES:
            table.add_column(name.upper(), justify="right")
        for row in plausible.table().sort_values("ap", ascending=False).to_dict("records"):
            table.add_row(escape(str(row["method"])), *(f"{row[name]:.2f}" for name in MEASURES))
        results.print(table)
        results.print(
            f"{len(plausible.numbers)} texts with marked and unmarked words. Plausible is not faithful.", soft_wrap=True
        )
