"""Train an identifiable transformer on labelled texts: data in, model folder out."""

# torch and transformers leave these functions without types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from whence.errors import InputError
from whence.identifiable.configuration_identifiable import IdentifiableConfig
from whence.identifiable.data import Labelled
from whence.identifiable.modeling_identifiable import IdentifiableForSequenceClassification
from whence.identifiable.training.batches import Encoded, Pad, encode, split
from whence.identifiable.training.card import card
from whence.identifiable.training.variants import overrides
from whence.identifiable.training.vocabulary import tokenizer_of, train_tokenizer
from whence.model.identity import hash_tokenizer
from whence.model.quiet import quietly
from whence.results.files import whole_files
from whence.results.progress import Say
from whence.results.run_folder import MODEL_FILES, RunFolder, run_folder
from whence.results.run_identity import RunIdentity, hash_texts
from whence.results.short_repr import short_repr


@dataclass(frozen=True)
class Settings:
    """How to train. `model`: further fields of `IdentifiableConfig` (hidden_size, num_hidden_layers, key_size, …)."""

    variant: str = "tied"
    epochs: float = 10
    batch_size: int = 32
    learning_rate: float = 5e-4
    weight_decay: float = 0.01
    warmup: float = 0.1  # of all steps
    max_length: int = 128
    vocab_size: int = 8000
    tokenizer: str | None = None  # a model whose tokenizer is taken; None: one is trained on the texts
    validation: float = 0.1  # of the training texts, set aside
    patience: int = 3  # epochs without a better validation accuracy before it stops; 0: never
    seed: int = 0
    checkpoint_steps: int | None = None  # None: a checkpoint and an evaluation after every epoch
    model: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "learning_rate", "max_length"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name}={getattr(self, name)} must be more than 0.")
        if not 0 < self.validation < 1:
            raise InputError(f"validation={self.validation} is the share of training texts set aside: between 0 and 1.")
        overrides(self.variant, **self.model)


@dataclass(frozen=True)
class Trained:
    """A trained model, its tokenizer, and its metrics (as in metrics.json)."""

    __repr__ = short_repr

    model: IdentifiableForSequenceClassification
    tokenizer: Any
    metrics: dict[str, Any]
    folder: Path


def train(
    data: Labelled,
    test: Labelled | None = None,
    *,
    out: str | Path,
    settings: Settings | None = None,
    quiet: bool = True,
    say: Say | None = None,
) -> Trained:
    """Train a text classifier whose attention can be read; writes a model folder with metrics.json and a model card.

    `data`: labelled texts, of which a share is set aside for validation and early stopping. `test`: scored once, at
    the end, with the best checkpoint. `out`: the folder; if it holds checkpoints of the same run, training goes on
    from the last whole one and ends with the weights that an uninterrupted run ends with. Another run's folder is
    refused with the difference named; a finished run is given back as it is.

    >>> import tempfile
    >>> from whence.identifiable.training.demo import demo_data
    >>> small = Settings(epochs=1, model={"hidden_size": 16, "num_attention_heads": 2})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = train(demo_data(200), out=folder, settings=small)
    >>> made.metrics["parameters"] > 0
    True
    """
    settings = settings or Settings()
    say = say or (lambda _: None)
    data.check_trainable()
    classes = data.classes
    if test is not None:
        test.check_known(classes)
        if not len(test):
            raise InputError(f"{test.source} holds no texts to test on.")
    run = run_folder(out, _identity(settings, data, test), state=("checkpoints/checkpoint-*", *MODEL_FILES))
    folder = run.path
    if run.finished:
        say(f"The run in {str(folder)!r} is finished: nothing was done.")
        return _finished(folder)

    train_part, valid_part = split(data, settings.validation, settings.seed)
    tokenizer = (
        tokenizer_of(settings.tokenizer)
        if settings.tokenizer
        else train_tokenizer(train_part.texts, settings.vocab_size, settings.max_length)
    )
    numbers = {label: i for i, label in enumerate(classes)}
    parts, truncated = {}, 0
    for name, part in (("train", train_part), ("validation", valid_part), ("test", test)):
        if part is not None:
            parts[name], cut = encode(tokenizer, part, numbers, settings.max_length)
            truncated += cut
    if truncated:
        say(f"{truncated} texts are longer than {settings.max_length} tokens and were cut (--max-length).")
    if data.empty:
        say(f"{data.empty} empty texts were left out.")

    trainer = _trainer(folder, settings, tokenizer, classes, parts, quiet)
    from whence.identifiable.training.trainer import resume_point

    begun = time.perf_counter()
    start = resume_point(folder / "checkpoints")
    if start is not None:
        say(f"Going on from {start.name}.")
    with quietly():
        trainer.train(resume_from_checkpoint=str(start) if start else None)
        seconds = time.perf_counter() - begun
        model = trainer.model
        metrics = _metrics(settings, data, parts, classes, truncated, model, trainer, seconds)
        if trainer.is_world_process_zero():
            _write(run, model, tokenizer, metrics)
    model.eval()
    return Trained(model, tokenizer, metrics, folder)


def build(settings: Settings, tokenizer: Any, classes: Sequence[str]) -> IdentifiableForSequenceClassification:
    """The untrained model; its initial weights depend on the seed alone."""
    fields = overrides(settings.variant, **settings.model)
    config = IdentifiableConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=settings.max_length,
        pad_token_id=tokenizer.pad_token_id,
        id2label=dict(enumerate(classes)),
        label2id={label: i for i, label in enumerate(classes)},
        **fields,
    )
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        return IdentifiableForSequenceClassification(config)


def _trainer(
    folder: Path, settings: Settings, tokenizer: Any, classes: Sequence[str], parts: dict[str, Encoded], quiet: bool
) -> Any:
    from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback, TrainingArguments

    from whence.identifiable.training.trainer import Bar, CarefulTrainer

    strategy = "epoch" if settings.checkpoint_steps is None else "steps"
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=128,
        num_train_epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        warmup_steps=settings.warmup,
        lr_scheduler_type="linear",
        eval_strategy=strategy,
        save_strategy=strategy,
        eval_steps=settings.checkpoint_steps,
        save_steps=settings.checkpoint_steps or 500,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        greater_is_better=True,
        restore_callback_states_from_checkpoint=True,
        logging_strategy="no",
        seed=settings.seed,
        data_seed=settings.seed,
        disable_tqdm=quiet,
        report_to=[],
        dataloader_pin_memory=False,
    )
    trainer = CarefulTrainer(
        model=build(settings, tokenizer, classes),
        args=arguments,
        train_dataset=parts["train"],
        eval_dataset=parts["validation"],
        data_collator=Pad(tokenizer.pad_token_id),
        compute_metrics=_accuracy,
        callbacks=[EarlyStoppingCallback(settings.patience)] if settings.patience else [],
    )
    for talker in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(talker)
    if not quiet:
        trainer.add_callback(Bar)
    return trainer


def _accuracy(predictions: Any) -> dict[str, float]:
    logits, labels = predictions
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


def _metrics(
    settings: Settings,
    data: Labelled,
    parts: dict[str, Encoded],
    classes: Sequence[str],
    truncated: int,
    model: IdentifiableForSequenceClassification,
    trainer: Any,
    seconds: float,
) -> dict[str, Any]:
    best = trainer.evaluate(parts["validation"], metric_key_prefix="validation")
    test = trainer.evaluate(parts["test"], metric_key_prefix="test") if "test" in parts else {}
    statement = model.identifiability_statement()
    attention = sum(p.numel() for layer in model.model.layers for p in layer.attention.parameters())
    return {
        "variant": settings.variant,
        "data": data.source,
        "labels": list(classes),
        "train_texts": len(parts["train"]),
        "validation_texts": len(parts["validation"]),
        "test_texts": len(parts["test"]) if "test" in parts else 0,
        "validation_accuracy": best["validation_accuracy"],
        "test_accuracy": test.get("test_accuracy"),
        "parameters": model.num_parameters(),
        "attention_parameters": attention,
        "unique_from_head_up_to": statement.from_head,
        "unique_from_block_up_to": statement.from_block,
        "truncated": truncated,
        "empty": data.empty,
        "max_length": settings.max_length,
        "epochs": trainer.state.epoch or 0.0,
        "steps": trainer.state.global_step,
        "train_loss": trainer.total_loss / max(1, trainer.state.global_step),
        "seed": settings.seed,
        "seconds": seconds,
        "settings": asdict(settings),
    }


def _write(
    run: RunFolder, model: IdentifiableForSequenceClassification, tokenizer: Any, metrics: dict[str, Any]
) -> None:
    with whole_files(run.path) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        (scratch / "README.md").write_text(card(metrics, model.identifiability_statement()), encoding="utf-8")
        (scratch / "metrics.json").write_text(json.dumps(metrics, indent=2), encoding="utf-8")
        names = [path.name for path in scratch.iterdir()]
    run.finish(names)
    shutil.rmtree(run.path / "checkpoints", ignore_errors=True)  # the folder itself now holds the best of them


def _finished(folder: Path) -> Trained:
    from transformers import AutoTokenizer

    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a kill may have come between the end and the removal
    with quietly():
        model = IdentifiableForSequenceClassification.from_pretrained(folder, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    return Trained(model.eval(), tokenizer, metrics, folder)


def _identity(settings: Settings, data: Labelled, test: Labelled | None) -> RunIdentity:
    """What decides the trained weights and the metrics."""
    hashes = {"training texts": hash_texts(zip(data.texts, data.labels, strict=True))}
    if test is not None:
        hashes["test texts"] = hash_texts(zip(test.texts, test.labels, strict=True))
    if settings.tokenizer is not None:
        hashes["tokenizer"] = hash_tokenizer(tokenizer_of(settings.tokenizer))
    return RunIdentity("train", hashes, asdict(settings))
