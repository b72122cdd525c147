"""`whence doctor MODEL`: how was this model read, and can the reading be trusted?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli._app import FAILED, Debug, Json, Quiet, messages, results, working
from whence.cli._model import ModelArgument, ModelChoice, takes_model
from whence.cli._output import Format, chosen_format, frame_of, put_out
from whence.errors import InputError

if TYPE_CHECKING:
    from whence.attention.uniqueness import Uniqueness
    from whence.model.load import Model
    from whence.reading.wiring.doctor import Diagnosis


@takes_model()
def command(
    name: ModelArgument = None,
    text: Annotated[str | None, typer.Option("--text", help="Prove it on this text.")] = None,
    as_json: Json = False,
    format_: Format = "table",
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 (acted on as it is parsed)
    *,
    source: ModelChoice,
) -> None:
    """Read a model's attention and prove the reading, layer by layer.

    (a) attention · values is the head output; (b) the heads through the output projection are the block's output;
    (c) residual and norms give the state after attention; (d) the model's outputs are the same with the recorder as
    without; (e) pushed head outputs move the state as the projection says; (f) with attention held no token moves
    another. Exit code 1, with the reason, where the reading cannot be trusted.

    Then: does a theorem say that its attention is unique? By keys and values on a text, or by a second row.
    """
    how = chosen_format(format_, as_json)
    chosen = source.named(name)
    if chosen.pair is not None and text is None:
        raise InputError("--pair is a second text: give the first with --text.")
    with working(f"Reading {chosen.model}", quiet):
        from whence.reading.wiring.doctor import doctor

        loaded = chosen.load()
        report = doctor(loaded, text if chosen.pair is None else (text, chosen.pair), truncate=chosen.truncate)
    unique: Uniqueness | str | None = None
    if report.trusted:
        with working("Looking for a theorem, or for a second row", quiet):
            unique = _unique(loaded)

    def data() -> dict[str, Any]:
        said = {"reason": unique} if isinstance(unique, str) else None if unique is None else unique.to_dict()
        return report.to_dict() | {"uniqueness": said}

    put_out(how, table=lambda: show(report, unique), data=data, frame=lambda: frame_of(report.to_dict()["layers"]))
    if not report.trusted:
        if how == "table":
            messages.print("The reading cannot be trusted as a whole: " + " ".join(report.reasons), soft_wrap=True)
        raise typer.Exit(FAILED)


def _unique(model: Model) -> Uniqueness | str:
    """What `whence.uniqueness` says, or why it says nothing."""
    from whence.attention.uniqueness import uniqueness
    from whence.errors import WhenceError

    try:
        return uniqueness(model, search=2)
    except WhenceError as problem:
        return str(problem)


def show(report: Diagnosis, unique: Uniqueness | str | None) -> None:
    """The proof as a table and a sentence, and what is known of uniqueness."""
    show_proof(report)
    if unique is not None:
        lines = [f"Not known: {unique}"] if isinstance(unique, str) else unique.sentences()
        results.print("\nIs its attention unique?", markup=False)
        for line in lines:
            results.print(f"- {line}", markup=False, highlight=False, soft_wrap=True)


CHECKS = (
    "Errors: (a) attention · values against the head outputs, (b) these through the projection against the attention block's "
    "output, (c) residual and norms against the next state, (e) a head's output pushed, against what the projection says."
)


def show_proof(report: Diagnosis) -> None:
    """The proof as a table and a sentence."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    proof = report.proof
    with_modules = results.width >= 110
    title = f"How {report.provenance.model} was read ({proof.capture})"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("layer", "heads", "mask", "wiring"):
        table.add_column(name, no_wrap=True)
    for name in ("(a)", "(b)", "(c)", "(e)"):
        table.add_column(name, justify="right", no_wrap=True, min_width=7)  # an error without its exponent is none
    if with_modules:
        table.add_column("module", no_wrap=True, overflow="ellipsis")
    for site in proof.sites:
        heads = f"{site.heads} × {site.head_size}" + ("" if site.heads == site.groups else f" ({site.groups} kv)")
        wiring = "not proved" if site.proved_wiring is None else site.proved_wiring.kind
        errors = [_error(e, proof.tolerance) for e in (site.error_a, site.error_b, site.error_c, site.error_e)]
        mask = "causal" if site.causal else "cross" if site.stack == "cross" else "full"
        row = [f"{site.stack} {site.layer}", heads, mask, wiring, *errors]
        table.add_row(*row, *([site.module] if with_modules else []))
    results.print(table)
    results.print(CHECKS, style="dim")
    results.print(
        f"(d) outputs with the recorder against outputs without it: {_error(proof.error_d, proof.tolerance)} "
        f"(tolerance {proof.tolerance:.0e})"
    )
    for reason in report.reasons:
        if not reason.startswith("(f)"):
            results.print(f"Refused: {reason}", soft_wrap=True)
    if report.trusted:
        rest = "" if proof.holds["c"] else " Measures that need residual and norms will refuse it."
        results.print(f"[green]This model was read right.[/green]{rest}")
    results.print(f"(f) {report.following}", soft_wrap=True)


def _error(error: float | None, tolerance: float) -> str:
    if error is None:
        return "[yellow]–[/yellow]"
    colour = "green" if error <= tolerance else "red"
    return f"[{colour}]{error:.1e}[/{colour}]"
