"""`whence mix TEXT --method alti --layer all`: which tokens is each hidden token made of?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli._app import Debug, Json, Options, Quiet, options_of, results, working
from whence.cli._model import ModelChoice, takes_model
from whence.cli._output import Format, chosen_format, put_out
from whence.errors import InputError

if TYPE_CHECKING:
    from whence.mixing.alti_logit import LogitContributions
    from whence.mixing.mixture import Mixture

HTA = "hidden-token-attribution"


@takes_model()
def command(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text; - reads it from standard input.")],
    method: Annotated[
        str, typer.Option("--method", help=f"alti, norms, rollout, decompx, {HTA}, …: see whence methods.")
    ] = "alti",
    layer: Annotated[str, typer.Option("--layer", "-l", help="A layer counted from 0, 'last', or 'all'.")] = "last",
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="Shares of each layer's own input, not followed back to the embeddings.")
    ] = False,
    top: Annotated[int, typer.Option("--top", help="How many sources to show for each token.")] = 3,
    words: Annotated[bool, typer.Option("--words", help="Gather sub-words into words.")] = False,
    target: Annotated[str | None, typer.Option("--target", help="What an encoder–decoder's decoder reads.")] = None,
    attention: Annotated[str | None, typer.Option("--attention", help="encoder or decoder.")] = None,
    mode: Annotated[str | None, typer.Option("--mode", help=f"{HTA}: auto, exact or probes.")] = None,
    option: Options = None,
    save: Annotated[Path | None, typer.Option("--save", help="Also write the result to this safetensors file.")] = None,
    as_json: Json = False,
    format_: Format = "table",
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 (acted on as it is parsed)
    *,
    source: ModelChoice,
) -> None:
    """Show where each hidden token came from: its own share, and the tokens that gave it the most.

    Shares are followed back to the input embeddings, layer by layer, unless --per-layer is given.
    """
    how = chosen_format(format_, as_json)
    if top < 1:
        raise InputError(f"--top {top} shows nothing; give 1 or more.")
    with working(f"Reading {source.model}", quiet):
        found = source.trace(text, target)
    with working(f"Following the tokens by {method}", quiet):
        given = {"attention": attention, "mode": mode}
        chosen_options = {name: value for name, value in given.items() if value is not None} | options_of(option)
        mixed = _mixed(found, method, chosen_options, per_layer)
    if save is not None:
        mixed.save(save)
    if not hasattr(mixed, "own_share"):  # a logit's parts are not shares
        put_out(how, table=lambda: _show_logit(mixed), data=mixed.to_dict, frame=mixed.to_frame)
        return
    mixed = mixed.words() if words else mixed
    selected = mixed.select(layer=_layers(layer, mixed.layers))
    put_out(
        how,
        table=lambda: show(selected, top),
        data=lambda: {**selected.to_dict(), "own_share": selected.own_share().to_dict("records")},
        frame=selected.to_frame,
    )


def _mixed(result: Any, method: str, options: dict[str, Any], per_layer: bool) -> Any:
    from whence import method_table
    from whence.mixing.contributions import BY_LAYER, contributions

    entry = method_table.method(method)
    if entry.gives not in BY_LAYER:
        scores = entry.gives == "scores"
        raise InputError(
            f"--method {entry.name} does not say what each hidden token is made of, layer by layer"
            + (", but scores the inputs for one prediction: whence attribute does that." if scores else ".")
            + f" See: whence methods {entry.name}"
        )
    mixed = contributions(result, entry.name, **options)
    if entry.contrast:
        return mixed
    if per_layer and mixed.provenance.settings.get("origin") == "embeddings":
        raise InputError(f"{entry.name} is always from the embeddings: leave --per-layer out.")
    return mixed if per_layer else mixed.rollout()


def _layers(wanted: str, have: tuple[int, ...]) -> list[int]:
    if wanted == "all":
        return list(have)
    if wanted == "last":
        return [have[-1]]
    try:
        return [int(part) for part in wanted.split(",")]
    except ValueError:
        raise InputError(
            f"--layer {wanted!r} is not a layer: give a number, several with commas, 'last' or 'all'."
        ) from None


def show(mixed: Mixture, top: int) -> None:
    """A table per layer, and the own-token share by layer."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    shares = mixed.own_share()
    for number in mixed.layers:
        rows = mixed.sources(number, top)
        table = Table(title=f"Layer {number}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        table.add_column("", justify="right")
        table.add_column("token")
        table.add_column("own", justify="right")
        table.add_column("comes from")
        for hidden, group in rows.groupby("hidden", sort=True):
            given = ", ".join(
                f"{escape(str(t))} {s:.2f}" for t, s in zip(group["input_token"], group["share"], strict=True)
            )
            first = group.iloc[0]
            table.add_row(str(hidden), escape(str(first["hidden_token"])), f"{first['own']:.2f}", given)
        results.print(table)
    table = Table(
        "layer", "own share, median", "quartiles", "not their own largest, %", box=SIMPLE_HEAD, pad_edge=False
    )
    for row in shares.to_dict("records"):
        quartiles = f"{row['q25']:.2f} – {row['q75']:.2f}"
        table.add_row(str(row["layer"]), f"{row['median']:.2f}", quartiles, f"{row['not_largest']:.0f}")
    results.print(table)
    settings = mixed.provenance.settings
    origin = "the input embeddings" if settings.get("origin") == "embeddings" else "each layer's own input"
    how = f" ({settings['mode']}, {settings['way']})" if "way" in settings else ""
    results.print(f"{mixed.provenance.method} of {mixed.provenance.model}{how}: shares of {origin}.", soft_wrap=True)


def _show_logit(contributions: LogitContributions) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "token", "pushed the logit by", box=SIMPLE_HEAD, pad_edge=False)
    for i, (token, score) in enumerate(zip(contributions.tokens, contributions.by_input().tolist(), strict=True)):
        table.add_row(str(i), escape(token), f"{score:+.3f}")
    results.print(table)
    settings, extra = contributions.provenance.settings, contributions.extra
    results.print(
        f"Logit {float(extra['logit'][0]):.3f} of token {settings['target']} at position {settings['position']}: the rest is "
        f"{float(extra['feedforward'].sum()):+.3f} from feed-forward layers and {float(extra['bias'][0]):+.3f} from biases.",
        soft_wrap=True,
    )
