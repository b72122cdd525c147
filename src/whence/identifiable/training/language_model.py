"""Train an identifiable decoder on plain text: a file in, a model folder out."""

# torch and transformers leave these functions without types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import json
import math
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from whence.errors import InputError
from whence.identifiable.configuration_identifiable_decoder import IdentifiableDecoderConfig
from whence.identifiable.modeling_identifiable_decoder import IdentifiableForCausalLM
from whence.identifiable.training.documents import Documents, Packed, pack
from whence.identifiable.training.variants import decoder_overrides
from whence.identifiable.training.vocabulary import tokenizer_of, train_byte_tokenizer
from whence.model.identity import hash_tokenizer
from whence.model.quiet import quietly
from whence.results.files import whole_files
from whence.results.progress import Say
from whence.results.run_folder import MODEL_FILES, RunFolder, run_folder
from whence.results.run_identity import RunIdentity, hash_texts
from whence.results.short_repr import short_repr


@dataclass(frozen=True)
class LanguageModelSettings:
    """How to train. `model`: further fields of `IdentifiableDecoderConfig` (hidden_size, num_hidden_layers, …)."""

    variant: str = "rope-tied"
    epochs: float = 1
    batch_size: int = 16
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    warmup: float = 0.05  # of all steps
    context: int = 128  # tokens in a block
    vocab_size: int = 4000
    tokenizer: str | None = None  # a model whose tokenizer is taken; None: one is trained on the texts
    seed: int = 0
    checkpoint_steps: int = 200
    model: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "learning_rate", "context", "checkpoint_steps"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name}={getattr(self, name)} must be more than 0.")
        decoder_overrides(self.variant, **self.model)


@dataclass(frozen=True)
class LanguageModel:
    """A trained language model, its tokenizer, and its metrics (as in metrics.json)."""

    __repr__ = short_repr

    model: IdentifiableForCausalLM
    tokenizer: Any
    metrics: dict[str, Any]
    folder: Path


def train_language_model(
    documents: Documents,
    *,
    out: str | Path,
    settings: LanguageModelSettings | None = None,
    quiet: bool = True,
    say: Say | None = None,
) -> LanguageModel:
    """Train a causal language model whose attention can be read; writes a model folder with metrics.json and a card.

    Stopped at any moment, the same call goes on from the last whole checkpoint and ends with the same weights.

    >>> import tempfile
    >>> from whence.identifiable.training.documents import demo_documents
    >>> small = LanguageModelSettings(vocab_size=300, model={"hidden_size": 16, "num_hidden_layers": 1})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = train_language_model(demo_documents(100), out=folder, settings=small)
    >>> made.metrics["validation_bits_per_byte"] > 0
    True
    """
    from whence.identifiable.training.trainer import resume_point

    settings, say = settings or LanguageModelSettings(), say or (lambda _: None)
    run = run_folder(out, _identity(settings, documents), state=("checkpoints/checkpoint-*", *MODEL_FILES))
    folder = run.path
    if run.finished:
        say(f"The run in {str(folder)!r} is finished: nothing was done.")
        return _finished(folder)
    tokenizer = (
        tokenizer_of(settings.tokenizer)
        if settings.tokenizer
        else train_byte_tokenizer(documents.train, settings.vocab_size, settings.context)
    )
    blocks = pack(documents.train, tokenizer, settings.context)
    held_out = pack(documents.validation, tokenizer, settings.context)
    say(f"{blocks.tokens:,} tokens to train on, {held_out.tokens:,} to measure on, {len(blocks):,} blocks.")
    trainer = _trainer(folder, settings, build(settings, tokenizer), blocks, quiet)
    start = resume_point(folder / "checkpoints")
    if start is not None:
        say(f"Going on from {start.name}.")
    begun = time.perf_counter()
    with quietly():
        trainer.train(resume_from_checkpoint=str(start) if start else None)
        seconds = time.perf_counter() - begun
        model = trainer.model.eval()
        metrics = _metrics(settings, documents, blocks, held_out, model, trainer, seconds)
        if trainer.is_world_process_zero():
            _write(run, model, tokenizer, metrics)
    return LanguageModel(model, tokenizer, metrics, folder)


def build(settings: LanguageModelSettings, tokenizer: Any) -> IdentifiableForCausalLM:
    """The untrained model; its initial weights depend on the seed alone."""
    config = IdentifiableDecoderConfig(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        max_position_embeddings=max(settings.context + 1, 2048),
        **decoder_overrides(settings.variant, **settings.model),
    )
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        return IdentifiableForCausalLM(config)


@torch.no_grad()
def nats(model: torch.nn.Module, blocks: Packed, batch_size: int = 32) -> float:
    """The sum of −log p of every token that the blocks predict, in float64."""
    total = 0.0
    device = next(model.parameters()).device
    for start in range(0, len(blocks), batch_size):
        ids, labels = (t[start : start + batch_size].to(device) for t in (blocks.ids, blocks.labels))
        logits = model(ids[:, :-1], use_cache=False).logits.double()
        total += float(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        )
    return total


def _trainer(folder: Path, settings: LanguageModelSettings, model: Any, blocks: Packed, quiet: bool) -> Any:
    from transformers import PrinterCallback, ProgressCallback, TrainingArguments

    from whence.identifiable.training.trainer import Bar, CarefulTrainer

    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        per_device_train_batch_size=settings.batch_size,
        num_train_epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        warmup_steps=settings.warmup,
        lr_scheduler_type="cosine",
        eval_strategy="no",
        save_strategy="steps",
        save_steps=settings.checkpoint_steps,
        logging_strategy="no",
        seed=settings.seed,
        data_seed=settings.seed,
        disable_tqdm=quiet,
        report_to=[],
        dataloader_pin_memory=False,
    )
    trainer = CarefulTrainer(model=model, args=arguments, train_dataset=blocks, data_collator=_stack)
    for talker in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(talker)
    if not quiet:
        trainer.add_callback(Bar)
    return trainer


def _stack(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def _metrics(
    settings: LanguageModelSettings,
    documents: Documents,
    blocks: Packed,
    held_out: Packed,
    model: IdentifiableForCausalLM,
    trainer: Any,
    seconds: float,
) -> dict[str, Any]:
    loss = nats(model, held_out)
    size = sum(len(text.encode()) for text in documents.validation)
    statement = model.identifiability_statement()
    seen = trainer.state.global_step * settings.batch_size * settings.context
    return {
        "task": "lm",
        "variant": settings.variant,
        "data": documents.source,
        "train_tokens": blocks.tokens,
        "tokens_seen": min(seen, round(settings.epochs * blocks.tokens)),
        "validation_tokens": held_out.tokens,
        "validation_bytes": size,
        "validation_nats_per_token": loss / held_out.tokens,
        "validation_bits_per_byte": loss / math.log(2) / size,
        "parameters": model.num_parameters(),
        "attention_parameters": sum(p.numel() for layer in model.model.layers for p in layer.attention.parameters()),
        "cache_numbers_per_token": statement.cache_numbers,
        "theorem": statement.theorem,
        "unique_from_head_up_to": statement.from_head,
        "unique_from_block_up_to": statement.from_block,
        "output_condition": max(f.output_condition for f in statement.layers),
        "steps": trainer.state.global_step,
        "train_loss": trainer.total_loss / max(1, trainer.state.global_step),
        "seed": settings.seed,
        "seconds": seconds,
        "settings": asdict(settings),
    }


def _write(run: RunFolder, model: IdentifiableForCausalLM, tokenizer: Any, metrics: dict[str, Any]) -> None:
    with whole_files(run.path) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        sentences = model.identifiability_statement().sentences()
        (scratch / "README.md").write_text(_card(metrics, sentences), encoding="utf-8")
        (scratch / "metrics.json").write_text(json.dumps(metrics, indent=2), encoding="utf-8")
        names = [path.name for path in scratch.iterdir()]
    run.finish(names)
    shutil.rmtree(run.path / "checkpoints", ignore_errors=True)


def _finished(folder: Path) -> LanguageModel:
    from transformers import AutoTokenizer

    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a kill may have come between the end and the removal
    with quietly():
        model = IdentifiableForCausalLM.from_pretrained(folder, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return LanguageModel(model.eval(), tokenizer, json.loads((folder / "metrics.json").read_text("utf-8")), folder)


def _card(metrics: dict[str, Any], sentences: list[str]) -> str:
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            "---",
            f"# Identifiable decoder, variant {metrics['variant']}",
            "",
            (
                f"A causal language model with {metrics['parameters']:,} parameters, trained on "
                f"{metrics['tokens_seen']:,} tokens of {metrics['data']}."
            ),
            "",
            "```python",
            "import whence.identifiable                     # makes the architecture known to transformers",
            "from transformers import pipeline",
            'write = pipeline("text-generation", "THIS FOLDER")',
            "```",
            "",
            "## What its attention means",
            "",
            *(f"- {sentence}" for sentence in sentences),
            "",
            "## How well it does",
            "",
            (
                f"- {metrics['validation_bits_per_byte']:.4f} bits per byte on {metrics['validation_bytes']:,} bytes set "
                f"aside ({metrics['validation_nats_per_token']:.4f} nats per token, {metrics['validation_tokens']:,} tokens)."
            ),
            f"- {metrics['steps']} steps, seed {metrics['seed']}, {metrics['seconds']:.0f} s.",
            "",
        ]
    )


def _identity(settings: LanguageModelSettings, documents: Documents) -> RunIdentity:
    """What decides the trained weights and the metrics."""
    hashes = {"training texts": hash_texts(documents.train), "validation texts": hash_texts(documents.validation)}
    if settings.tokenizer is not None:
        hashes["tokenizer"] = hash_tokenizer(tokenizer_of(settings.tokenizer))
    return RunIdentity("train language model", hashes, asdict(settings))
