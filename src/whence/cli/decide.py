"""`whence decide TEXT --rule RULE`: does the model's computation fix a decision that was made from its attention?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from whence.cli._app import Debug, Json, Quiet, results, working
from whence.cli._model import ModelChoice, read, takes_model
from whence.cli._output import Format, check_plot, chosen_format, put_out, save_plot
from whence.errors import InputError

if TYPE_CHECKING:
    from whence.attention.align import Alignment
    from whence.attention.decide import Decisions


@takes_model()
def command(
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="The text; - reads it from standard input; for whisper, a WAV file.")
    ],
    rule: Annotated[
        str,
        typer.Option(
            "--rule",
            "-r",
            help="argmax[:KEYS], mass:KEYS>=0.5, order:KEY>KEY, above:KEY>0.3, expected[:WITHIN], path[:MEDIAN]; "
            "atoms: each product atom's largest reactant atom of the same element.",
        ),
    ] = "argmax",
    layer: Annotated[int | None, typer.Option("--layer", "-l", help="The attention layer, counted from 0.")] = None,
    head: Annotated[
        list[str] | None, typer.Option("--head", help="A head, or layer.head; give it again for the mean of several.")
    ] = None,
    query: Annotated[
        list[str] | None, typer.Option("--query", help="A position, a token or a name; again for more; none: all.")
    ] = None,
    combine: Annotated[str, typer.Option("--combine", help="Several heads: mean or sum.")] = "mean",
    within: Annotated[float, typer.Option("--within", help="path: seconds a word may move.")] = 0.2,
    words: Annotated[
        str | None, typer.Option("--words", help="path: what is spoken; none: what the model hears.")
    ] = None,
    rows: Annotated[
        str,
        typer.Option("--rows", help="path: a word's time from its own row, token (transformers), or before (OpenAI)."),
    ] = "token",
    target: Annotated[str | None, typer.Option("--target", help="What an encoder–decoder's decoder reads.")] = None,
    attention: Annotated[str | None, typer.Option("--attention", help="encoder, decoder or cross.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw it into this file (.png, .svg).")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Save it with every proof (.safetensors).")] = None,
    as_json: Json = False,
    format_: Format = "table",
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 (acted on as it is parsed)
    *,
    source: ModelChoice,
) -> None:
    """Certify decisions: does every attention row with the same head output decide the same?

    Certified decisions come with a dual proof, checked again before anything is printed; refuted ones with another row
    that decides otherwise and that the model, given it, did not notice.
    """
    how = chosen_format(format_, as_json)
    check_plot(plot)
    if not text.lower().endswith(".wav") and rule != "atoms":
        from whence import rules

        rules.parse(rule)  # a rule that is not understood is refused before the model is read
    with working(f"Reading {source.model}", quiet):
        loaded = source.load()
    with working("Deciding", quiet):
        if text.lower().endswith(".wav"):
            from whence.attention.align import align

            if rows not in ("token", "before"):
                raise InputError(f"--rows {rows}: a word's time is read off its own row, token, or the one before.")
            if rule not in ("path", "argmax"):
                raise InputError(f"--rule {rule}: a recording is aligned with --rule path.")
            found: Any = align(loaded, text, words, within=within, rows="before" if rows == "before" else "token")
        else:
            found = _decide(loaded, text, rule, layer, head, query, combine, attention, target, source)
    if plot is not None:
        save_plot(found.plot(), plot)
    if out is not None:
        if not hasattr(found, "save"):
            raise InputError("an alignment is not saved to a file; use --json.")
        found.save(out)
    put_out(how, table=lambda: show(found), data=found.to_dict, frame=found.to_frame)


def _decide(
    loaded: Any,
    text: str,
    rule: str,
    layer: int | None,
    head: list[str] | None,
    query: list[str] | None,
    combine: str,
    attention: str | None,
    target: str | None,
    source: ModelChoice,
) -> Decisions | Alignment:
    from whence import rules
    from whence.attention.decide import decide
    from whence.attention.position_names import atom_candidates
    from whence.reading.tracing import trace

    found = trace(loaded, read(text), source.pair, target, truncate=source.truncate)
    queries: list[Any] | None = list(query) if query else None
    asked: Any
    if rule == "atoms":
        candidates = atom_candidates(list(found.of(attention).tokens))
        asked, queries = rules.argmax(candidates), queries or list(candidates)
    else:
        asked = rules.parse(rule)
    if combine not in ("mean", "sum"):
        raise InputError(f"--combine {combine}: heads are read as their mean or their sum.")
    how: Literal["mean", "sum"] = "sum" if combine == "sum" else "mean"
    result: Decisions | Alignment = decide(
        found, asked, heads=heads_of(layer, head), queries=queries, combine=how, attention=attention
    )
    return result


def heads_of(layer: int | None, given: list[str] | None) -> list[tuple[int, int]]:
    """`--layer 3 --head 1 --head 4`, or `--head 3.1 --head 3.4`, as (layer, head) pairs."""
    pairs = []
    for text in given or []:
        parts = text.split(".")
        if not all(p.isdigit() for p in parts) or len(parts) > 2 or (len(parts) == 1 and layer is None):
            raise InputError(f"--head {text}: give a head's number beside --layer, or LAYER.HEAD.")
        pairs.append((int(parts[0]), int(parts[1])) if len(parts) == 2 else (int(layer or 0), int(parts[0])))
    if not pairs:
        raise InputError("--head is missing: name the head that the decision is made from, with --layer.")
    return pairs


def show(decisions: Decisions | Alignment) -> None:
    """Each decision as a sentence, then the sum of them and what the model said."""
    from rich.markup import escape

    for sentence in decisions.sentences():
        results.print(escape(sentence), soft_wrap=True)
    results.print(escape(decisions.summary()), soft_wrap=True)
    results.print(
        "The proofs were checked without the solver." if decisions.check() else "[red]A proof failed its check.[/red]"
    )
    told = getattr(decisions, "verifications", None) or [getattr(decisions, "verification", None)]
    for outcome in told:
        if outcome is not None:
            results.print("Other rows, put into the model: " + outcome.sentence(), soft_wrap=True)
