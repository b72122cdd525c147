"""What a conversion gives: the model, its fidelity before and after, and the statement of what is unique."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from whence.identifiable.conversion.checkpoint import History
from whence.identifiable.conversion.fidelity import Fidelity
from whence.identifiable.statement import Statement
from whence.model.load import Model
from whence.model.quiet import quietly
from whence.results.files import make_folder, whole_files
from whence.results.provenance import Provenance
from whence.results.short_repr import short_repr


@dataclass(frozen=True)
class Converted:
    """A converted model with its proof: fidelity before (closed form) and after distillation, and the statement."""

    __repr__ = short_repr

    model: Model
    mixing: tuple[Tensor, ...]  # M of every attention module, (head, d_v, d_k)
    before: Fidelity
    after: Fidelity
    statement: Statement
    tied_residual: float  # measured on a text: the largest share of a key outside span[V, 1]
    history: History
    provenance: Provenance
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "provenance": self.provenance.to_dict(),
            "settings": self.settings,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "tied_residual": self.tied_residual,
            "steps": len(self.history.losses),
            "cpu_seconds": self.history.cpu_seconds,
            "final_loss": self.history.losses[-1] if self.history.losses else None,
            "statement": self.statement.to_dict(),
        }

    def save(self, folder: str | Path) -> Path:
        """Plain weights of the original's own class, tokenizer, fidelity.json and a model card."""
        return save_converted(folder, self.model, self.to_dict(), self.card())

    def card(self) -> str:
        """The model card."""
        lines = [
            f"# {self.provenance.model}, keys tied to values",
            "",
            (
                "Converted by `whence.tie_keys`: every key projection is the value projection times a matrix per head "
                "(W_K = W_V·M, folded in), so the weights load with `from_pretrained` as the original's do."
            ),
            "",
            "## What is unique",
            "",
            *(f"- {sentence}" for sentence in self.statement.sentences()),
            f"- Measured on a text: at most {self.tied_residual:.1e} of a key lies outside span[V, 1].",
            "",
            "## Fidelity to the original, on held-out texts",
            "",
            fidelity_table(self.before, self.after),
        ]
        if self.after.probes:
            lines += ["", "| probe | original | converted |", "|---|---|---|"]
            lines += [f"| {name} | {100 * a:.1f} | {100 * b:.1f} |" for name, (a, b) in self.after.probes.items()]
        lines += [
            "",
            f"Distilled for {len(self.history.losses)} steps, {self.history.cpu_seconds / 60:.1f} CPU minutes.",
            "",
        ]
        return "\n".join(lines)


def save_converted(folder: str | Path, model: Model, fidelity: dict[str, Any], card: str) -> Path:
    """A converted model, its tokenizer, fidelity.json and README.md: all of them, or none."""
    path = make_folder(folder)
    with whole_files(path) as scratch:
        with quietly():
            weights: Any = model.model
            weights.save_pretrained(scratch)
            if model.tokenizer is not None:
                model.tokenizer.save_pretrained(scratch)
        (scratch / "fidelity.json").write_text(json.dumps(fidelity, indent=2), encoding="utf-8")
        (scratch / "README.md").write_text(card, encoding="utf-8")
    return path


def fidelity_table(before: Fidelity, after: Fidelity) -> str:
    """Markdown: one line per length; in each cell the closed form, then the distilled model."""
    rows = [
        "| length | texts | embedding cosine | token cosine | neighbours kept | attention KL (nats) |",
        "|---|---|---|---|---|---|",
    ]
    for b, a in zip(before.lengths, after.lengths, strict=True):
        rows.append(
            f"| {a.length} | {a.texts} | {b.embedding_cosine:.3f} → {a.embedding_cosine:.3f} | {b.state_cosine:.3f} → "
            f"{a.state_cosine:.3f} | {100 * b.neighbours_kept:.0f} % → {100 * a.neighbours_kept:.0f} % | "
            f"{b.attention_kl:.3f} → {a.attention_kl:.3f} |"
        )
    return "\n".join(rows)
