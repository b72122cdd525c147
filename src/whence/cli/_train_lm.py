"""`whence train --task lm`: from a text file to a small causal language model whose attention is unique."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence.cli._app import messages, results, watched
from whence.cli._output import frame_of, put_out

if TYPE_CHECKING:
    from whence.identifiable.training.language_model import LanguageModel


def train_lm(
    data: str | None, test: str | None, text: str | None, out: Path, options: dict[str, Any], fields: dict[str, Any], *,
    max_length: int, tokenizer: str | None, seed: int, checkpoint_steps: int | None, compare: str | bool, seeds: int,
    how: str, quiet: bool,
) -> None:  # fmt: skip
    """`data` None: the demo. `compare`: True for every variant, or their names separated by commas."""
    from whence.identifiable.training.compare_language_models import compare_language_models
    from whence.identifiable.training.documents import demo_documents, read_documents
    from whence.identifiable.training.language_model import LanguageModelSettings, train_language_model
    from whence.identifiable.training.variants import DECODER_VARIANTS

    if data is None:
        documents = demo_documents()
        options = options | {
            "vocab_size": min(options["vocab_size"], 400),
            "epochs": max(options["epochs"], 8),
            "layers": 2,
        }
        fields = fields | {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
        max_length = min(max_length, 32)
    else:
        documents = read_documents(data, text, validation=test)
    settings = LanguageModelSettings(
        options["variant"], options["epochs"], options["batch_size"], options["learning_rate"], context=max_length,
        vocab_size=options["vocab_size"], tokenizer=tokenizer, seed=seed, checkpoint_steps=checkpoint_steps or 200,
        model=fields,
    )  # fmt: skip
    if compare:
        names = [v.strip() for v in compare.split(",")] if isinstance(compare, str) else list(DECODER_VARIANTS)
        said = None if quiet else messages.print
        found = compare_language_models(
            documents, out=out, variants=names, seeds=range(seeds), settings=settings, say=said
        )

        def table() -> None:
            results.print(found.table(), markup=False, highlight=False, soft_wrap=True)

        put_out(how, table=table, data=found.to_dict, frame=found.to_frame)
        return
    say = (lambda _: None) if quiet else messages.print
    trained = train_language_model(documents, out=out, settings=settings, quiet=not watched(quiet), say=say)
    if os.environ.get("RANK", "0") != "0":  # one process speaks for all
        return
    told = trained.metrics | {"folder": str(out)}
    put_out(how, table=lambda: _say(trained, out), data=lambda: told, frame=lambda: frame_of([told]))


def _say(trained: LanguageModel, out: Path) -> None:
    metrics = trained.metrics
    results.print(
        f"{out}: {metrics['validation_bits_per_byte']:.4f} bits per byte, {metrics['parameters']:,} parameters, "
        f"{metrics['tokens_seen']:,} tokens seen, {metrics['seconds']:.0f} s"
    )
    for sentence in trained.model.identifiability_statement().sentences():
        results.print(f"- {sentence}", markup=False, highlight=False)
