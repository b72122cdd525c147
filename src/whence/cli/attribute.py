"""`whence attribute TEXT --model M --method alti`: which input tokens made the model predict this?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli._app import Debug, Json, Options, Quiet, options_of, results, working
from whence.cli._model import Chat, Continuation, MaxNewTokens, ModelChoice, read, takes_model
from whence.cli._output import Format, chosen_format, put_out
from whence.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from whence.mixing.attribution import Attribution


@takes_model()
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
    continuation: Continuation = None,
    max_new_tokens: MaxNewTokens = None,
    chat: Chat = False,
    by: Annotated[
        str | None, typer.Option("--by", help="Gather an answer's inputs by word, sentence or document.")
    ] = None,
    words: Annotated[bool, typer.Option("--words", help="Gather sub-words into words.")] = False,
    option: Options = None,
    save: Annotated[Path | None, typer.Option("--save", help="Also write the scores to this safetensors file.")] = None,
    as_json: Json = False,
    format_: Format = "table",
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 (acted on as it is parsed)
    *,
    source: ModelChoice,
) -> None:
    """Score each input token for one prediction, by one method or several side by side."""
    how = chosen_format(format_, as_json)
    names = [name.strip() for name in method.split(",") if name.strip()]
    if not names:
        raise InputError("--method names no method: see whence methods.")
    if save is not None and len(names) > 1:
        raise InputError(f"--save writes one result: give one method, not {len(names)}.")
    with working(f"Reading {source.model}", quiet):
        from whence.mixing.attribute import attribute

        loaded = source.load()
        given = read(text)
    with working(f"Explaining by {', '.join(names)}", quiet):
        found = attribute(
            loaded,
            given,
            names,
            target,
            foil=foil,
            text_pair=source.pair,
            position=position,
            continuation=continuation,
            max_new_tokens=max_new_tokens,
            chat=chat or None,
            truncate=source.truncate,
            **options_of(option),
        )
    if save is not None:
        found[names[0]].save(save)
    shown = {name: _gathered(scores, words, by) for name, scores in found.items()}

    def data() -> Any:
        plain_data = {name: scores.to_dict() for name, scores in shown.items()}
        return plain_data[names[0]] if len(names) == 1 else plain_data

    put_out(how, table=lambda: _show(shown, loaded), data=data, frame=lambda: _frame(shown))


def _frame(shown: dict[str, Any]) -> pd.DataFrame:
    import pandas as pd

    frame: pd.DataFrame = pd.concat(
        [scores.to_frame().assign(method=name) for name, scores in shown.items()], ignore_index=True
    )
    return frame


def _gathered(scores: Any, words: bool, by: str | None) -> Any:
    """Words, sentences or documents, where they were asked for."""
    if by is None:
        return scores.words() if words else scores
    if not hasattr(scores, "by"):
        raise InputError("--by gathers the inputs of an answer: give --max-new-tokens or --continuation with it.")
    return scores.by(by)


def _show(attributions: dict[str, Any], model: Any) -> None:
    if any(hasattr(scores, "by") for scores in attributions.values()):
        for name, scores in attributions.items():
            results.print(f"{name} of {scores.provenance.model}: the answer, and the inputs that count most")
            results.print(scores.table(), markup=False, highlight=False, soft_wrap=True)
        return
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
        from whence.reporting.outputs import class_name, token_name

        position = settings.get("position")
        what, label = ("the token", token_name) if _writes(model) else ("the class", class_name)
        called = {k: f"‘{label(model, settings[k])}’" for k in ("target", "foil") if isinstance(settings.get(k), int)}
        rather = "" if settings.get("foil") is None else f" rather than {called.get('foil', settings['foil'])}"
        place = "" if position is None else f" at position {position}"
        explained = f"{what} {called.get('target', settings['target'])}{rather}{place}"
    results.print(f"{first.provenance.model}: {explained}.", soft_wrap=True)


def _writes(model: Any) -> bool:
    """Whether the model's outputs are tokens of its vocabulary, and not classes."""
    return "Classification" not in type(model.model).__name__ and getattr(model.model.config, "vocab_size", 0) > 0


def _groups(attributions: dict[str, Attribution]) -> list[dict[str, Attribution]]:
    """Up to four methods side by side, of the same tokens: what 80 columns hold."""
    groups: list[dict[str, Attribution]] = []
    for name, scores in attributions.items():
        if groups and len(groups[-1]) < 4 and next(iter(groups[-1].values())).tokens == scores.tokens:
            groups[-1][name] = scores
        else:
            groups.append({name: scores})
    return groups
