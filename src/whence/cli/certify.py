"""`whence certify TEXT --layer --head --query`: in what interval could each weight of one attention row lie?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli._app import Debug, Json, Quiet, in_quotes, results, working
from whence.cli._model import ModelChoice, takes_model
from whence.cli._output import Format, chosen_format, put_out

if TYPE_CHECKING:
    import pandas as pd

    from whence.attention.certify import TokenCertificate
    from whence.attention.witness import Verification


@takes_model()
def command(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text; - reads it from standard input.")],
    layer: Annotated[int, typer.Option("--layer", "-l", help="The attention layer, counted from 0.")],
    head: Annotated[int, typer.Option("--head", help="The head, counted from 0.")],
    query: Annotated[str, typer.Option("--query", help="The row: a position, or a token that stands once.")],
    top: Annotated[int, typer.Option("--top", help="How many of the heaviest weights; 0 for all.")] = 5,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="Let the output move by this share of its size (0.01: 1 %).")
    ] = 0.0,
    target: Annotated[str | None, typer.Option("--target", help="What an encoder–decoder's decoder reads.")] = None,
    attention: Annotated[str | None, typer.Option("--attention", help="encoder, decoder or cross.")] = None,
    decide_rules: Annotated[
        list[str] | None, typer.Option("--decide", help="A rule as in `whence decide`; may be given again.")
    ] = None,
    as_json: Json = False,
    format_: Format = "table",
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 (acted on as it is parsed)
    *,
    source: ModelChoice,
) -> None:
    """Certify one attention row: the exact interval of each weight, what is certain, and a counter-example.

    Every interval comes with a dual proof, which is checked again before anything is printed; the counter-example
    is put into the model.
    """
    how = chosen_format(format_, as_json)
    with working(f"Reading {source.model}", quiet):
        from whence.attention.certify import certify
        from whence.attention.decide import decide
        from whence.attention.witness import witness
        from whence.rules import parse

        found = source.trace(text, target)
    with working("Solving", quiet):
        row = certify(found, layer, head, query, top or None, tolerance, attention=attention)
        checked = row.check()
        other = witness(found, layer, head, row.query, attention=attention)
        verified = other.verify() if other.exists else None
        decided = [
            decide(found, parse(rule), layer=layer, head=head, query=row.query, attention=attention)
            for rule in decide_rules or ()
        ]

    def table() -> None:
        show(row, checked, verified)
        for decision in decided:
            results.print(decision.sentences()[0], soft_wrap=True, markup=False)

    def data() -> dict[str, Any]:
        shown = None if verified is None else {**other.to_dict(), **verified.to_dict()}
        return {**row.to_dict(), "witness": shown, "decisions": [d.to_dict() for d in decided]}

    put_out(how, table=table, data=data, frame=lambda: _frame(row))


def _frame(row: TokenCertificate) -> pd.DataFrame:
    import pandas as pd

    assert row.key_tokens is not None
    names = [row.key_tokens[int(key)] for key in row.keys]
    ends = {"weight": row.weights.tolist(), "lower": row.lower.tolist(), "upper": row.upper.tolist()}
    return pd.DataFrame({"key": row.keys.tolist(), "token": names, **ends})


def show(row: TokenCertificate, checked: bool, verified: Verification | None) -> None:
    """The intervals as a table, then what follows from them."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    assert row.tokens is not None
    assert row.key_tokens is not None
    title = f"Layer {row.layer}, head {row.head}, from {escape(in_quotes(row.tokens[row.query]))} (token {row.query})"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("key", justify="right")
    table.add_column("token")
    shown = [("lowest", "highest", row)]
    if row.exact is not None:
        within = f", within {row.tolerance:.0%}"
        shown = [("lowest", "highest", row.exact), (f"lowest{within}", f"highest{within}", row)]
    for name in ("weight", *(name for low, high, _ in shown for name in (low, high))):
        table.add_column(name, justify="right", no_wrap=True)
    for k, (key, weight) in enumerate(zip(row.keys.tolist(), row.weights.tolist(), strict=True)):
        ends = (f"{float(end[k]):.4f}" for _, _, found in shown for end in (found.lower, found.upper))
        table.add_row(str(key), escape(row.key_tokens[key]), f"{weight:.4f}", *ends)
    results.print(table)
    seen = int(row.visible.sum())
    if row.dimension == 0:
        results.print(f"This row over {seen} keys is the only one with its output.")
    else:
        results.print(
            f"The row over {seen} keys can be moved in {row.dimension} independent directions without any change of the "
            f"head's output. The keys not shown hold {1 - float(row.weights.sum()):.4f} and at most {row.outside:.4f}.",
            soft_wrap=True,
        )
    certain = row.pairs[row.certain].tolist()
    if certain:
        pairs = ", ".join(f"{in_quotes(row.key_tokens[i])} > {in_quotes(row.key_tokens[j])}" for i, j in certain)
        results.print(f"Certain orders: {escape(pairs)}.", soft_wrap=True)
    results.print("The proofs were checked without the solver." if checked else "[red]A proof failed its check.[/red]")
    if verified is not None:
        results.print("Another row, put into the model: " + verified.sentence(), soft_wrap=True)
