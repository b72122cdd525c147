"""`whence convert MODEL`: a pretrained encoder whose attention becomes unique, its keys tied to its values."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli._app import Debug, Json, Quiet, messages, results
from whence.cli._model import ModelArgument, ModelChoice, takes_model
from whence.cli._output import Format, chosen_format, frame_of, put_out

if TYPE_CHECKING:
    from whence.identifiable.conversion.convert_decoder import ConvertedDecoder
    from whence.identifiable.conversion.probes import Probe
    from whence.identifiable.conversion.result import Converted
    from whence.reading.texts import Texts

CHECKPOINT = "distillation.safetensors"


@takes_model(without=("pair",))
def command(
    texts: Annotated[
        str, typer.Option("--texts", help="Texts to fit and distil on: CSV, TSV, JSONL, Parquet, plain lines.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the converted model.")],
    name: ModelArgument = None,
    text: Annotated[str | None, typer.Option("--text", help="The column of the texts.")] = None,
    pair: Annotated[
        str | None, typer.Option("--pair", help="The column of second texts, which are texts of their own here.")
    ] = None,
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
    experimental: Annotated[
        bool, typer.Option("--experimental", help="Convert a decoder too; a Llama changes its class.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Decides the texts of every step.")] = 0,
    as_json: Json = False,
    format_: Format = "table",
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 (acted on as it is parsed)
    *,
    source: ModelChoice,
) -> None:
    """Convert a pretrained encoder so that its attention is unique at every length.

    Every key projection becomes the value projection times a fitted matrix, and the model is distilled back to the
    original's hidden states on texts of all lengths. The result is plain weights of the original's class, with
    fidelity.json and a model card. Stopped, the same command goes on from its checkpoint; another command is refused.
    """
    how = chosen_format(format_, as_json)
    from whence.identifiable.conversion.convert import tie_keys
    from whence.identifiable.conversion.refusal import refuse_unfit
    from whence.model.identity import model_hashes
    from whence.model.load import load
    from whence.reading.texts import read_texts
    from whence.results.run_folder import MODEL_FILES, NAME, run_folder
    from whence.results.run_identity import RunIdentity, hash_texts

    loaded = source.named(name).load()
    refuse_unfit(loaded, experimental=experimental)  # before the texts are read
    probes = [] if probe is None else [_probe(probe, text, label, seed)]
    fitting = _non_empty(read_texts(texts, text, pair=pair), quiet)
    measured = None if held_out is None else _non_empty(read_texts(held_out, text, pair=pair), quiet)
    beginning = None if start is None else load(start)
    options: dict[str, Any] = {
        "steps": steps, "learning_rate": learning_rate, "tokens": tokens, "max_length": max_length,
        "embedding_weight": embedding_weight, "seed": seed, "experimental": experimental,
    }  # fmt: skip
    if source.truncate:  # named only where it is asked for: runs without it are the same as ever
        options["truncate"] = True
    hashes = {**model_hashes(loaded), "texts": hash_texts(fitting)}
    if measured is not None:
        hashes["held-out texts"] = hash_texts(measured)
    if beginning is not None:
        hashes["start"] = beginning.weights_hash
    hashes |= {f"probe {one.name}": hash_texts([*one.train, *one.test]) for one in probes}
    run = run_folder(out, RunIdentity("convert", hashes, options), state=(CHECKPOINT, *MODEL_FILES))
    if run.finished:
        messages.print(f"The run in {str(out)!r} is finished: nothing was done.")
        (out / CHECKPOINT).unlink(missing_ok=True)
        if how != "table":
            _put_out(how, json.loads((out / "fidelity.json").read_text(encoding="utf-8")), out)
        return
    made = tie_keys(
        loaded,
        fitting,
        held_out=measured,
        probes=probes,
        start=beginning,
        checkpoint=out / CHECKPOINT,
        progress=False if quiet else _step_lines,
        say=None if quiet else messages.print,
        **options,
    )
    made.save(out)
    run.finish([p.name for p in sorted(out.iterdir()) if p.is_file() and p.name not in (NAME, CHECKPOINT)])
    (out / CHECKPOINT).unlink(missing_ok=True)
    if how == "table":
        _show(made)
    else:
        _put_out(how, made.to_dict(), out)


def _put_out(how: str, converted: dict[str, Any], out: Path) -> None:
    """As JSON, or as a frame: a line for each length, before and after distillation; of a Llama its perplexities."""
    rows = (
        [converted["perplexity"]]
        if "perplexity" in converted
        else [
            {"after_distillation": name == "after", **row}
            for name in ("before", "after")
            for row in converted[name]["lengths"]
        ]
    )
    put_out(how, table=lambda: None, data=lambda: converted | {"folder": str(out)}, frame=lambda: frame_of(rows))


def _show(converted: Converted | ConvertedDecoder) -> None:
    from whence.identifiable.conversion.convert_decoder import ConvertedDecoder
    from whence.identifiable.conversion.result import fidelity_table

    if isinstance(converted, ConvertedDecoder):
        for sentence in converted.sentences():
            results.print(sentence, markup=False, highlight=False, soft_wrap=True)
        return
    results.print(fidelity_table(converted.before, converted.after), markup=False, highlight=False, soft_wrap=True)
    for name, (before, after) in converted.after.probes.items():
        results.print(f"probe {name}: original {100 * before:.1f}, converted {100 * after:.1f}", highlight=False)
    for sentence in converted.statement.sentences():
        results.print(f"- {sentence}", markup=False, highlight=False)


def _probe(file: str, text: str | None, label: str, seed: int) -> Probe:
    """A fifth of the labelled texts to test on, the rest to fit the probe to."""
    import random

    from whence.identifiable.conversion.probes import Probe
    from whence.identifiable.data import read_labelled

    rows = list(zip((data := read_labelled(file, text, label)).texts, data.labels, strict=True))
    random.Random(seed).shuffle(rows)
    cut = max(1, len(rows) // 5)
    return Probe(Path(file).stem, rows[cut:], rows[:cut])


def _non_empty(read: Texts, quiet: bool) -> list[str]:
    texts = (*read.texts, *(read.pairs or ()))
    non_empty = [text for text in texts if text.strip()]
    if len(non_empty) < len(texts) and not quiet:
        messages.print(f"{len(texts) - len(non_empty)} empty texts were left out.")
    return non_empty


def _step_lines(what: str, step: float, steps: float) -> None:
    """A line every twentieth of the way: a log keeps them, as it would not a bar."""
    if step % max(1, steps // 20) == 0 or step == steps:
        sys.stderr.write(f"step {step:g} of {steps:g}: {what}\n")
