"""`whence survey --texts FILE --out DIR`: the measures over a corpus. `whence survey report DIR`, `survey compare DIR DIR`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from whence.cli._app import Debug, Json, Quiet, messages, results, watched
from whence.cli._model import ModelChoice, takes_model
from whence.cli._output import Format, chosen_format, frame_of, put_out
from whence.errors import InputError


@takes_model(without=("pair",))
def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[report DIR | compare DIR DIR]", help="Look at surveys that were run."),
    ] = None,
    texts: Annotated[
        str | None, typer.Option("--texts", help="CSV, TSV, JSONL, Parquet, text, or a data set's name.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The survey's folder, or the report's file.")] = None,
    measures: Annotated[str, typer.Option("--measures", help="Besides the default ones: hta, local-global.")] = "",
    without: Annotated[
        str, typer.Option("--without", help="Leave out some of attention, certainty, alti, tokens.")
    ] = "",
    limit: Annotated[int | None, typer.Option("--limit", help="Only so many texts, from the start.")] = None,
    column: Annotated[str | None, typer.Option("--text", help="The column that holds the texts.")] = None,
    pair: Annotated[str | None, typer.Option("--pair", help="The column of second texts.")] = None,
    text_format: Annotated[
        str | None, typer.Option("--read-as", help="How to read the texts, where the name does not say.")
    ] = None,
    split: Annotated[str, typer.Option("--split", help="Of a data set.")] = "train",
    epsilon: Annotated[float, typer.Option("--epsilon", help="How near is certain.")] = 0.05,
    rows: Annotated[int, typer.Option("--rows", help="Rows of a text whose certainty is decided; 0: all.")] = 8,
    probes: Annotated[int, typer.Option("--probes", help="Directions per token of hta and local-global.")] = 16,
    shard_size: Annotated[int, typer.Option("--shard-size", help="Texts in one file.")] = 64,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Processes (or actors), each with one thread.")
    ] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="ray: actors of a Ray cluster.")] = None,
    address: Annotated[
        str | None, typer.Option("--address", help="Of the cluster; auto: the one this machine belongs to.")
    ] = None,
    card: Annotated[bool, typer.Option("--card", help="Print the paragraph for a model card.")] = False,
    as_json: Json = False,
    format_: Format = "table",
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 (acted on as it is parsed)
    *,
    source: ModelChoice,
) -> None:
    """What holds on my data? Runs the measures over a corpus, keeps every row, and goes on after a kill."""
    how = chosen_format(format_, as_json)
    if words:
        if texts is not None:
            raise InputError(f"{words[0]!r} looks at surveys that were run: leave out --texts.")
        _show_survey(words, out, card, how)
        return
    if texts is None or out is None:
        raise InputError("a survey needs --texts FILE and --out DIR (or: whence survey report DIR).")
    from whence.surveys.card import facts, paragraph
    from whence.surveys.run import survey

    try:
        found = survey(
            source.model if source.only_a_name else source.load(), texts, out,
                measures=measures, without=without, text=column, pair=pair, format=text_format,
            split=split, limit=limit, epsilon=epsilon, rows=rows, probes=probes, truncate=source.truncate,
            shard_size=shard_size, workers=workers, engine=engine, address=address, progress=watched(quiet),
            say=messages.print,
        )  # fmt: skip
    except KeyboardInterrupt:
        messages.print("Stopped. What is done is kept: run the same command again to go on.")
        raise
    if how != "table":
        put_out(how, table=lambda: None, data=lambda: facts(found), frame=lambda: frame_of([facts(found)]))
    else:
        results.print(paragraph(found), soft_wrap=True, markup=False, highlight=False)
        if not card:
            messages.print(f"Rows in {out}; figures: whence survey report {out}", soft_wrap=True, markup=False)


def _show_survey(words: list[str], out: Path | None, card: bool, how: str) -> None:
    from whence.reporting.report import report
    from whence.results.files import write_atomically
    from whence.surveys.card import badge, facts, paragraph
    from whence.surveys.compare import compare
    from whence.surveys.result import read_survey

    if words[0] == "compare" and len(words) == 3:
        frame = compare(read_survey(words[1]), read_survey(words[2]))
        if how != "table":
            put_out(how, table=lambda: None, data=lambda: frame.to_dict("records"), frame=lambda: frame)
        else:
            results.print(frame.round(3).to_string(index=False), soft_wrap=True, markup=False, highlight=False)
        return
    if words[0] != "report" or len(words) != 2:
        raise InputError(f"{' '.join(words)!r}: write report DIR, or compare DIR DIR.")
    found = read_survey(words[1])
    if how != "table":
        put_out(how, table=lambda: None, data=lambda: facts(found), frame=lambda: frame_of([facts(found)]))
        return
    if card:
        results.print(paragraph(found), soft_wrap=True, markup=False, highlight=False)
        return
    page = report(found).save(out or found.folder / "report.html")
    write_atomically(page.with_suffix(".svg"), badge(found).encode())
    numbers = json.dumps(facts(found), indent=2, default=str).replace("NaN", "null")
    write_atomically(page.with_suffix(".json"), numbers.encode())
    results.print(f"{page} (and the badge and its numbers beside it: .svg, .json)", soft_wrap=True, markup=False)
