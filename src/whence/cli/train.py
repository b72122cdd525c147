"""`whence train`: a text classifier whose attention weights are unique, from a file of labelled texts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli._app import Debug, Json, Quiet, messages, results, watched
from whence.cli._output import Format, chosen_format, frame_of, put_out
from whence.errors import InputError

if TYPE_CHECKING:
    from whence.identifiable.data import Labelled
    from whence.identifiable.training.fit import Trained


DEFAULTS: dict[str, dict[str, Any]] = {
    "classification": {
        "variant": "tied", "epochs": 10, "batch_size": 32, "learning_rate": 5e-4, "vocab_size": 8000, "layers": 1,
        "positions": "learned",
    },
    "lm": {
        "variant": "rope-tied", "epochs": 1, "batch_size": 16, "learning_rate": 2e-3, "vocab_size": 4000, "layers": 4,
        "positions": None,
    },
}  # fmt: skip
"""What is not given, by task."""


def command(
    data: Annotated[
        str | None,
        typer.Option("--data", help="Texts, with labels for a classifier: CSV, TSV, JSONL, Parquet, text, data set."),
    ] = None,
    task: Annotated[
        str, typer.Option("--task", help="classification, or lm: a causal language model, from plain text.")
    ] = "classification",
    test: Annotated[str | None, typer.Option("--test", help="Texts to score at the end, in the same form.")] = None,
    text: Annotated[str | None, typer.Option("--text", help="The column of the texts.")] = None,
    label: Annotated[str, typer.Option("--label", help="The column of the labels; any values.")] = "label",
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The model folder. Run again, it goes on where it stopped.")
    ] = Path("identifiable-model"),
    variant: Annotated[
        str | None,
        typer.Option(
            "--variant",
            help="concat, small-key, add, tied (default), shared, uniform; lm: rope, rope-rotary-values, rope-tied "
            "(default), alibi, alibi-tied, none-tied, uniform.",
        ),
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Train on sentences that whence generates; about a minute.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Train every variant with several seeds and write the table.")
    ] = False,
    variants: Annotated[
        str | None, typer.Option("--variants", help="With --compare: which, separated by commas.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="With --compare: how many seeds.", min=1)] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Decides the split, the initial weights and the order.")] = 0,
    epochs: Annotated[float | None, typer.Option("--epochs", help="At most so many; 10, lm: 1.")] = None,
    patience: Annotated[
        int, typer.Option("--patience", help="Epochs without improvement before it stops; 0: never.")
    ] = 3,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Texts in a step, per process; 32, lm: 16 blocks.")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", help="Highest, after warm-up; 5e-4, lm: 2e-3.")
    ] = None,
    max_length: Annotated[
        int, typer.Option("--max-length", help="Tokens; longer texts are cut, and counted; lm: of a block.")
    ] = 128,
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", help="Of the tokenizer that is trained; 8000, lm: 4000.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="A model whose tokenizer to take instead of training one.")
    ] = None,
    hidden_size: Annotated[int, typer.Option("--hidden-size", help="Width of the model.")] = 128,
    layers: Annotated[int | None, typer.Option("--layers", help="How many; 1, lm: 4.", min=1)] = None,
    heads: Annotated[int, typer.Option("--heads", help="Attention heads.", min=1)] = 4,
    key_size: Annotated[int | None, typer.Option("--key-size", help="Per head.")] = None,
    value_size: Annotated[int | None, typer.Option("--value-size", help="Per head.")] = None,
    positions: Annotated[
        str | None, typer.Option("--positions", help="learned (default), none or bias; lm: rope, alibi, bias or none.")
    ] = None,
    norm: Annotated[str, typer.Option("--norm", help="post or pre.")] = "post",
    checkpoint_steps: Annotated[
        int | None, typer.Option("--checkpoint-steps", help="A checkpoint every so many steps, not every epoch.")
    ] = None,
    skip_empty: Annotated[
        bool, typer.Option("--skip-empty", help="Leave empty texts out instead of refusing them.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option("--threads", help="Processor threads; else torch's own choice, and 1 for --demo.", min=1),
    ] = None,
    as_json: Json = False,
    format_: Format = "table",
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 (acted on as it is parsed)
) -> None:
    """Train a text classifier, or with --task lm a language model, whose attention weights are unique.

    Writes a folder that loads with transformers, metrics.json, and a model card that says what is unique and why.
    Stopped at any moment, the same command goes on from the last checkpoint and ends with the same weights. On several
    processes: accelerate launch --num_processes 2 -m whence train …; without accelerators:
    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 -m whence train …
    """
    how = chosen_format(format_, as_json)
    if task not in DEFAULTS:
        raise InputError(f"--task {task} is not known; there are {' and '.join(DEFAULTS)}.")
    if demo == (data is not None):
        kind = "labelled texts" if task == "classification" else "text"
        raise InputError(f"Give {kind} with --data FILE, or --demo to see it work without any (not both).")
    import torch

    from whence.identifiable.training.fit import Settings, train

    if threads is not None or demo:  # the demo's model is so small that several threads only wait for each other
        torch.set_num_threads(threads or 1)
    given = {
        "variant": variant, "epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate,
        "vocab_size": vocab_size, "layers": layers, "positions": positions,
    }  # fmt: skip
    chosen = DEFAULTS[task] | {name: value for name, value in given.items() if value is not None}
    shape: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_hidden_layers": chosen["layers"],
        "num_attention_heads": heads,
        "intermediate_size": 2 * hidden_size,
        "key_size": key_size,
        "value_size": value_size,
        "position_embedding_type": chosen["positions"],
    }
    if task == "lm":
        from whence.cli._train_lm import train_lm

        train_lm(
            data, test, text, out, chosen, shape, max_length=max_length, tokenizer=tokenizer, seed=seed,
            checkpoint_steps=checkpoint_steps, compare=compare and (variants or True), seeds=seeds, how=how,
            quiet=quiet,
        )  # fmt: skip
        return
    settings = Settings(
        chosen["variant"], chosen["epochs"], chosen["batch_size"], chosen["learning_rate"], max_length=max_length,
        vocab_size=chosen["vocab_size"], tokenizer=tokenizer, patience=patience, seed=seed,
        checkpoint_steps=checkpoint_steps, model=shape | {"norm": norm},
    )  # fmt: skip
    train_set, test_set = _texts(data, test, text, label, skip_empty)
    if compare:
        _compare(train_set, test_set, out, settings, variants, seeds, how, quiet)
        return
    say = (lambda _: None) if quiet else messages.print
    trained = train(train_set, test_set, out=out, settings=settings, quiet=not watched(quiet), say=say)
    if os.environ.get("RANK", "0") == "0":  # one process speaks for all
        _show(trained, out, how)


def _texts(
    data: str | None, test: str | None, text: str | None, label: str, skip_empty: bool
) -> tuple[Labelled, Labelled | None]:
    """What to train on and what to test on; without `data`, sentences that whence generates."""
    from whence.identifiable.data import read_labelled
    from whence.identifiable.training.demo import demo_data

    if data is None:
        return demo_data(), demo_data(1000, seed=1)
    return (
        read_labelled(data, text, label, skip_empty=skip_empty),
        read_labelled(test, text, label, skip_empty=skip_empty, split="test") if test else None,
    )


def _show(trained: Trained, out: Path, how: str) -> None:
    data = trained.metrics | {"folder": str(out)}
    put_out(how, table=lambda: _say(trained, out), data=lambda: data, frame=lambda: frame_of([data]))


def _say(trained: Trained, out: Path) -> None:
    metrics = trained.metrics
    tested = metrics["test_accuracy"] is not None
    shown = f"{'test' if tested else 'validation'} accuracy {metrics['test_accuracy' if tested else 'validation_accuracy']:.4f}"
    results.print(f"{out}: {shown}, {metrics['parameters']:,} parameters, {metrics['seconds']:.0f} s")
    for sentence in trained.model.identifiability_statement().sentences():
        results.print(f"- {sentence}", markup=False, highlight=False)


def _compare(
    data: Any, test: Any, out: Path, settings: Any, variants: str | None, seeds: int, how: str, quiet: bool
) -> None:
    from whence.identifiable.training.compare import compare
    from whence.identifiable.training.variants import VARIANTS

    chosen = [v.strip() for v in variants.split(",")] if variants else list(VARIANTS)
    say = None if quiet else messages.print
    found = compare(data, test, out=out, variants=chosen, seeds=range(seeds), settings=settings, say=say)

    def table() -> None:
        results.print(found.table(), markup=False, highlight=False, soft_wrap=True)

    put_out(how, table=table, data=found.to_dict, frame=found.to_frame)
