"""`whence look TEXT`: what can, and what cannot, be read from the attention of a model on a text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli._app import Debug, Json, Quiet, check_report, in_quotes, messages, results, watched, working
from whence.cli._browser import open_in_browser
from whence.cli._model import Chat, Continuation, MaxNewTokens, ModelChoice, takes_model
from whence.cli._output import Format, chosen_format, put_out
from whence.errors import InputError

if TYPE_CHECKING:
    from whence.attention.overview import Overview
    from whence.reading.trace import Trace
    from whence.reporting.analysis import Analysis

COLUMNS = (
    "rank: of a head's values. free directions: in which a row can be moved with the same output. ‖a−a⊥‖/‖a‖: the part of a "
    "row outside the output's reach (it can exceed 1). r with effective: correlation of the row with the part that matters. "
    "special: attention to tokens like [CLS]. own share: how much of a state is its own token (ALTI). Medians; special: means.\n"
)
Text = Annotated[str, typer.Argument(metavar="TEXT", help="The text; - reads it from standard input.")]


@takes_model()
def command(
    text: Text,
    target: Annotated[str | None, typer.Option("--target", help="What an encoder–decoder's decoder reads.")] = None,
    attention: Annotated[
        str | None, typer.Option("--attention", help="encoder, decoder or cross, for encoder–decoders.")
    ] = None,
    continuation: Continuation = None,
    max_new_tokens: MaxNewTokens = None,
    chat: Chat = False,
    heads: Annotated[str, typer.Option("--heads", help="Which heads to show: worst, best or both.")] = "both",
    epsilon: Annotated[
        float, typer.Option("--epsilon", help="How far a weight may be uncertain and still be read.")
    ] = 0.05,
    report: Annotated[
        str, typer.Option("--report", metavar="FILE", help="Where to write the report; empty for none.")
    ] = "whence-report.html",
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no report.")] = False,
    open_: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    as_json: Json = False,
    format_: Format = "table",
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 (acted on as it is parsed)
    *,
    source: ModelChoice,
) -> None:
    """Look at a text through a model: which attention may be read, and which must not.

    Shows the layers and heads, how many directions of each attention row the output leaves free (measured, not
    assumed), which heads may be read (none, if none may) with exact intervals for some of their weights, and a
    counter-example that was put into the model and changed nothing. Ends by writing the report, a page to explore, and
    naming its path (with --json: as "report").
    """
    how = chosen_format(format_, as_json)
    if heads not in ("worst", "best", "both"):
        raise InputError(f"--heads {heads!r}: choose worst, best or both.")
    where = None if no_report or not report else report
    if open_ and where is None:
        raise InputError("--open opens the report: leave out --no-report, or give --report a file name.")
    if where is not None:
        check_report(where)
    from whence.core.attention.verdict import check_epsilon

    check_epsilon(epsilon)
    with working(f"Reading {source.model}", quiet):
        from whence.model.memory import fixed

        found = source.trace(text, target, continuation=continuation, max_new_tokens=max_new_tokens, chat=chat or None)
    with working("Looking for what is certain", quiet), fixed(found.model.model if found.model else None):
        from whence.reporting.analysis import Analysis

        analysis = Analysis(found, epsilon=epsilon)
        seen = analysis.overview(attention)
        seen = replace(seen, worst=() if heads == "best" else seen.worst, best=() if heads == "worst" else seen.best)
        example = counter_example(analysis, seen, attention)
        made_of = provenance(analysis, attention)
    if how == "table":
        show(found, seen, example, made_of)
    path = None if where is None else write_report(analysis, where, quiet)

    def name_report() -> None:
        if path is not None:
            results.print(f"\nReport: {path}", soft_wrap=True, highlight=False)

    put_out(
        how,
        table=name_report,
        data=lambda: {
            **seen.to_dict(),
            "counter_example": example,
            "provenance_of_states": made_of,
            "report": None if path is None else str(path),
        },
        frame=seen.verdict.to_frame,
    )
    if open_ and path is not None and not open_in_browser(path.resolve().as_uri()):
        messages.print("There is no display here to open it on.")


def write_report(analysis: Analysis, path: str, quiet: bool) -> Path:
    """The page of this text as one file; what was computed for the terminal is not computed again."""
    from whence.reporting.report import report

    made = report(analysis.trace, judged_rows=True, analysis=analysis, progress=watched(quiet))
    return made.save(path)


def provenance(analysis: Analysis, attention: str | None) -> dict[str, Any]:
    """What the states are made of, by ALTI: own-token share by layer, and the last layer's largest sources."""
    from whence.errors import WhenceError
    from whence.mixing.summaries import own_share_rows, source_rows

    try:
        whole = analysis.mixture("alti", None if attention == "cross" else attention).rollout()
    except WhenceError as problem:  # a wiring that was not proved: said, not shown
        return {"reason": str(problem)}
    names = {"token": "hidden_token", "hidden": "hidden", "own": "own", "input": "input_token", "share": "share"}
    return {
        "method": "alti",
        "own_share": [{name: row[name] for name in ("layer", "median", "q25", "q75")} for row in own_share_rows(whole)],
        "last_layer": [{key: row[name] for key, name in names.items()} for row in source_rows(whole, top=3)],
    }


def counter_example(analysis: Analysis, overview: Overview, attention: str | None) -> dict[str, Any] | None:
    """The witness of the least certain row, verified in the model."""
    for row in overview.worst:
        if row.dimension > 0:
            found = analysis.witness(row.layer, row.head, row.query, attention)
            checked = found.verify()
            return {**found.to_dict(), "verification": checked.to_dict(), "sentence": checked.sentence()}
    return None


def show(trace: Trace, overview: Overview, example: dict[str, Any] | None, made_of: dict[str, Any]) -> None:
    """Everything as text and tables."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    found = overview.identifiability
    heads, size = len(found.heads), overview.head_size
    results.print(
        f"[bold]{escape(trace.provenance.model)}[/bold]: {overview.tokens} tokens, {len(found.layers)} {overview.stack} layers, "
        f"{heads} heads of {size}",
        soft_wrap=True,
    )
    results.print(escape(" ".join(found.tokens)), style="dim", soft_wrap=True)
    results.print()
    for sentence in overview.sentences():
        results.print(sentence, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    columns = (
        "layer",
        "rank",
        "free\ndirections",
        "‖a−a⊥‖\n/‖a‖",
        "r with\neffective",
        "special,\nraw",
        "special,\neffective",
        "own\nshare",
    )
    own = {row["layer"]: f"{row['median']:.2f}" for row in made_of.get("own_share", [])}
    for name in columns:
        table.add_column(name, justify="right", vertical="bottom")
    for i, layer in enumerate(found.layers):
        table.add_row(
            str(layer),
            _span(found.extra["rank"][i]),
            _span(found.extra["simplex_null_dimension"][i]),
            f"{float(found.values[i].median()):.2f}",
            _median(found.extra["head_r"][i]),
            f"{float(overview.special_mass[i].mean()):.2f}",
            f"{float(overview.effective_special_mass[i].mean()):.2f}",
            own.get(layer, "–"),
        )
    results.print(table)
    results.print(COLUMNS, style="dim")
    verdicts = overview.verdict
    readable = [*verdicts.heads_that("unique"), *verdicts.heads_that("read")]
    results.print(
        f"[bold]Heads that may be read:[/bold] {len(readable)} of {len(found.layers) * heads}"
        if readable
        else "[bold]Heads that may be read:[/bold] none"
    )
    for row in overview.best:
        results.print("  " + escape(verdicts.sentence(row.layer, row.head)), soft_wrap=True)
        results.print("    " + escape(row.sentence(0)), soft_wrap=True)
    if overview.worst:
        results.print("[bold]Heads not to read, for example:[/bold]")
        for row in overview.worst:
            results.print("  " + escape(verdicts.sentence(row.layer, row.head)), soft_wrap=True)
            results.print("    " + escape(row.sentence(row.widest)), soft_wrap=True)
    if example is not None:
        results.print("[bold]A counter-example, put into the model:[/bold]")
        where = f"layer {example['layer']} head {example['head']}, row {in_quotes(example['query_token'])}"
        results.print(f"  {where}: " + escape(example["sentence"]), soft_wrap=True)

    show_provenance(made_of)


def show_provenance(made_of: dict[str, Any]) -> None:
    """What the last layer's tokens are made of: the ones that are least themselves."""
    from rich.markup import escape

    if "reason" in made_of:
        results.print("Where the states come from is not shown: " + escape(made_of["reason"]), soft_wrap=True)
        return
    tokens: dict[int, list[dict[str, Any]]] = {}
    for row in made_of["last_layer"]:
        tokens.setdefault(row["hidden"], []).append(row)
    least = sorted(tokens.values(), key=lambda rows: float(rows[0]["own"]))[:3]
    results.print("[bold]After the last layer, the tokens that are least made of themselves (ALTI):[/bold]")
    for rows in least:
        others = [row for row in rows if (row["input"], row["share"]) != (row["token"], row["own"])]
        parts = ", ".join(f"{row['share']:.0%} {in_quotes(row['input'])}" for row in others)
        said = f"{in_quotes(rows[0]['token'])} is {rows[0]['own']:.0%} itself{'; ' if others else ''}{parts}"
        results.print("  " + escape(said), soft_wrap=True)


def _span(t: Any) -> str:
    low, high = int(t.min()), int(t.max())
    return str(low) if low == high else f"{low}–{high}"


def _median(t: Any) -> str:
    """The median of what is there; – where no head has a correlation (all weights equal)."""
    known = t[~t.isnan()]
    return "–" if known.numel() == 0 else f"{float(known.median()):.2f}"
