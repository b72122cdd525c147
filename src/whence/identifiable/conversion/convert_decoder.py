"""From a pretrained decoder with rotary positions to one whose attention is unique: another class, distilled."""

# torch and transformers leave these functions without types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whence.errors import InputError
from whence.identifiable.conversion.checkpoint import History
from whence.identifiable.conversion.distillation import Schedule, distil
from whence.identifiable.conversion.result import save_converted
from whence.identifiable.conversion.rotary import logit_loss, perplexity, same_model, tied_start, trainable
from whence.identifiable.conversion.windows import WindowedTexts, batch
from whence.identifiable.decoder_statement import DecoderStatement
from whence.model.load import Model
from whence.results.progress import Progress, Say
from whence.results.provenance import Provenance
from whence.results.short_repr import short_repr

FITTING_BATCHES = 32  # for the output projections
WORTH_USING = 1.15
"""A converted model whose perplexity is more than this many times the original's is not called fit for use."""


@dataclass(frozen=True)
class ConvertedDecoder:
    """An identifiable decoder made from another, with its perplexity on held-out texts.

    original, before, after: of the original, of the closed form, and after distillation.
    """

    __repr__ = short_repr

    model: Model
    original: float
    before: float
    after: float
    statement: DecoderStatement
    history: History
    provenance: Provenance
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """How many times the original's perplexity that of the converted model is."""
        return self.after / self.original

    def sentences(self) -> list[str]:
        """What became of the model, in words."""
        verdict = "fit for use by that" if self.ratio <= WORTH_USING else "do not use it in the original's place"
        return [
            (
                f"Perplexity on {self.settings['held_out']} held-out texts: {self.original:.2f} original, {self.before:.2f} with "
                f"the old key as key and value, {self.after:.2f} after {len(self.history.losses)} steps of distillation: "
                f"{self.ratio:.2f} times the original's ({WORTH_USING:g} or less wanted): {verdict}."
            ),
            *str(self.statement).splitlines(),
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "provenance": self.provenance.to_dict(),
            "settings": self.settings,
            "perplexity": {"original": self.original, "before": self.before, "after": self.after, "ratio": self.ratio},
            "steps": len(self.history.losses),
            "cpu_seconds": self.history.cpu_seconds,
            "statement": self.statement.to_dict(),
        }

    def save(self, folder: str | Path) -> Path:
        """Weights of `IdentifiableForCausalLM`, tokenizer, fidelity.json and a model card."""
        card = [f"# {self.provenance.model}, keys tied to values (experimental)", "", *self.sentences(), ""]
        return save_converted(folder, self.model, self.to_dict(), "\n".join(card))


def tie_rotary_keys(
    model: Model,
    corpus: WindowedTexts,
    measured: WindowedTexts,
    schedule: Schedule,
    *,
    checkpoint: Path | None,
    progress: Progress,
    say: Say,
    settings: dict[str, Any],
) -> ConvertedDecoder:
    """`tie_keys` for a Llama: the old key becomes key and value, the output projections are fitted, the rest distilled."""
    free = same_model(model)
    say("fitting the output projections")
    tied = tied_start(free, (batch(corpus, schedule.tokens, schedule.seed + 1, i) for i in range(FITTING_BATCHES)))
    original, before = perplexity(model.model, measured), perplexity(tied, measured)
    say(f"perplexity {original:.2f} original, {before:.2f} before distillation; distilling for {schedule.steps} steps")
    trainable(tied)
    history = (
        distil(tied, free, corpus, schedule, checkpoint=checkpoint, objective=logit_loss, progress=progress)
        if schedule.steps
        else History()
    )
    tied.requires_grad_(True)
    return ConvertedDecoder(
        Model(tied, model.tokenizer, None, f"{model.name}, keys tied"),
        original,
        before,
        perplexity(tied.eval(), measured),
        tied.identifiability_statement(),
        history,
        Provenance(model.name, "tie_keys", settings, source=model),
        settings,
    )


def refuse_encoder_options(probes: Sequence[Any], start: Any) -> None:
    """What the conversion of a decoder into another class does not have."""
    if probes or start is not None:
        given = "probes" if probes else "start"
        raise InputError(f"{given} was given, but a decoder with rotary positions is converted without; leave it out.")
