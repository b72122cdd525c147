"""`whence convert MODEL`: a pretrained encoder whose attention becomes unique, its keys tied to its values."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from whence.cli._app import Debug, Json, Quiet, messages, print_json, results
from whence.errors import InputError


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="An embedded model, a local folder or a hub id.")],
    texts: Annotated[
        str, typer.Option("--texts", help="Texts to fit and distil on: CSV, TSV, JSONL, Parquet, plain lines.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the converted model.")],
    text: Annotated[str | None, typer.Option("--text", help="The column of the texts.")] = None,
    steps: Annotated[int, typer.Option("--steps", help="Steps of distillation; 0: closed form only.", min=0)] = 400,
    held_out: Annotated[
        str | None, typer.Option("--held-out", help="Texts to measure on; else a tenth of --texts.")
    ] = None,
    probe: Annotated[
        str | None, typer.Option("--probe", help="Labelled texts for a linear probe, original against converted.")
    ] = None,
    label: Annotated[str, typer.Option("--label", help="The column of the probe's labels.")] = "label",
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="Highest, after warm-up.")] = 3e-4,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens in a step.", min=1)] = 1024,
    max_length: Annotated[
        int | None, typer.Option("--max-length", help="Longest text; else the model's own maximum.")
    ] = None,
    start: Annotated[
        str | None, typer.Option("--start", help="An earlier conversion of the same model to go on from.")
    ] = None,
    embedding_weight: Annotated[
        float, typer.Option("--embedding-weight", help="How much the embedding of a text counts beside its states.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Decides the texts of every step.")] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 (acted on as it is parsed)
) -> None:
    """Convert a pretrained encoder so that its attention is unique at every length.

    Every key projection becomes the value projection times a fitted matrix, and the model is distilled back to the
    original's hidden states on texts of all lengths. The result is plain weights of the original's class, with
    fidelity.json and a model card. Stopped, the same command goes on from its checkpoint.
    """
    import random

    from whence.identifiable.conversion.convert import tie_keys
    from whence.identifiable.conversion.probes import Probe
    from whence.identifiable.conversion.refusal import refuse_unfit
    from whence.identifiable.conversion.result import fidelity_table
    from whence.identifiable.data import read_labelled
    from whence.model.load import load
    from whence.reading.texts import read_texts

    if out.exists() and not out.is_dir():
        raise InputError(f"{str(out)!r} is a file; give a folder.")
    loaded = load(model)
    refuse_unfit(loaded)  # before the texts are read
    probes = []
    if probe is not None:
        rows = list(zip((data := read_labelled(probe, text, label)).texts, data.labels, strict=True))
        random.Random(seed).shuffle(rows)
        cut = max(1, len(rows) // 5)
        probes = [Probe(Path(probe).stem, rows[cut:], rows[:cut])]
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / "distillation.pt"
    made = tie_keys(
        loaded,
        _non_empty(read_texts(texts, text).texts, quiet),
        steps,
        held_out=None if held_out is None else _non_empty(read_texts(held_out, text).texts, quiet),
        probes=probes,
        learning_rate=learning_rate,
        tokens=tokens,
        max_length=max_length,
        start=start,
        embedding_weight=embedding_weight,
        seed=seed,
        checkpoint=checkpoint,
        progress=None if quiet else _progress(steps),
        say=None if quiet else messages.print,
    )
    made.save(out)
    checkpoint.unlink(missing_ok=True)
    if as_json:
        print_json(made.to_dict() | {"folder": str(out)})
        return
    results.print(fidelity_table(made.before, made.after), markup=False, highlight=False, soft_wrap=True)
    for name, (before, after) in made.after.probes.items():
        results.print(f"probe {name}: original {100 * before:.1f}, converted {100 * after:.1f}", highlight=False)
    for sentence in made.statement.sentences():
        results.print(f"- {sentence}", markup=False, highlight=False)


def _non_empty(found: tuple[str, ...], quiet: bool) -> list[str]:
    kept = [text for text in found if text.strip()]
    if len(kept) < len(found) and not quiet:
        messages.print(f"{len(found) - len(kept)} empty texts were left out.")
    return kept


def _progress(steps: int) -> Any:
    every = max(1, steps // 20)

    def show(step: int, loss: float) -> None:
        if step % every == 0 or step == steps:
            sys.stderr.write(f"step {step} of {steps}, loss {loss:.3f}\n")

    return show
