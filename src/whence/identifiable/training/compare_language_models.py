"""All variants of the decoder, several seeds, the same budget: is the identifiable one as good, and what does it cost?"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence.errors import InputError
from whence.identifiable.training.compare import paired
from whence.identifiable.training.documents import Documents
from whence.identifiable.training.language_model import LanguageModelSettings, train_language_model
from whence.identifiable.training.variants import DECODER_VARIANTS, decoder_overrides
from whence.results.files import write_atomically
from whence.results.short_repr import short_repr

if TYPE_CHECKING:
    import pandas as pd

STANDARD = "rope"


@dataclass(frozen=True)
class LanguageModelComparison:
    """The metrics of every run, by variant in the order of the seeds."""

    __repr__ = short_repr

    runs: dict[str, tuple[dict[str, Any], ...]]
    seeds: tuple[int, ...]

    def bits(self, variant: str) -> list[float]:
        """Validation bits per byte, by seed."""
        return [float(run["validation_bits_per_byte"]) for run in self.runs[variant]]

    def to_frame(self) -> pd.DataFrame:
        """One line per run: the variant, the seed and its metrics."""
        import pandas as pd

        return pd.DataFrame(
            [
                {"variant": variant, "seed": seed, **metrics}
                for variant, runs in self.runs.items()
                for seed, metrics in zip(self.seeds, runs, strict=True)
            ]
        )

    def table(self) -> str:
        """Markdown. Less is better; the difference is paired by seed, with Student's 95 % interval."""
        lines = [
            (
                f"| variant | bits per byte, mean of {len(self.seeds)} seeds | difference to {STANDARD} (95 %) | parameters | "
                "cache, numbers a token | unique up to, from head / block | tokens/s |"
            ),
            "|---|---|---|---|---|---|---|",
        ]
        for variant, runs in self.runs.items():
            bits = self.bits(variant)
            gap = ""
            if STANDARD in self.runs and variant != STANDARD:
                mean, half = paired(bits, self.bits(STANDARD))
                gap = f"{mean:+.4f} ± {half:.4f}" if half == half else f"{mean:+.4f} (one seed)"
            unique = (
                "–"
                if variant == "uniform"
                else f"{runs[0]['unique_from_head_up_to']} / {runs[0]['unique_from_block_up_to']}"
            )
            speed = sum(run["tokens_seen"] / max(run["seconds"], 1e-9) for run in runs) / len(runs)
            lines.append(
                f"| {variant} | {sum(bits) / len(bits):.4f} | {gap} | {runs[0]['parameters']:,} | "
                f"{runs[0]['cache_numbers_per_token']:,} | {unique} | {speed:,.0f} |"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {"seeds": list(self.seeds), "runs": {name: list(runs) for name, runs in self.runs.items()}}


def compare_language_models(
    documents: Documents,
    *,
    out: str | Path,
    variants: Sequence[str] = tuple(DECODER_VARIANTS),
    seeds: Sequence[int] = (0, 1, 2),
    settings: LanguageModelSettings | None = None,
    say: Callable[[str], None] | None = None,
) -> LanguageModelComparison:
    """Train every variant with every seed; writes compare.md and compare.json. A finished run is not done again."""
    settings = settings or LanguageModelSettings()
    if not variants or not seeds:
        raise InputError("a comparison needs at least one variant and one seed.")
    for variant in variants:
        decoder_overrides(variant)
    folder = Path(out).expanduser()
    done: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    for seed in seeds:
        for variant in variants:
            place = folder / f"{variant}-{seed}"
            if not (place / "metrics.json").exists():
                train_language_model(
                    documents, out=place, settings=replace(settings, variant=variant, seed=seed), say=say
                )
            metrics = json.loads((place / "metrics.json").read_text(encoding="utf-8"))
            done[variant].append(metrics)
            if say is not None:
                say(f"{variant}, seed {seed}: {metrics['validation_bits_per_byte']:.4f} bits per byte")
    comparison = LanguageModelComparison({variant: tuple(runs) for variant, runs in done.items()}, tuple(seeds))
    write_atomically(folder / "compare.json", json.dumps(comparison.to_dict(), indent=1).encode())
    write_atomically(folder / "compare.md", (comparison.table() + "\n").encode())
    return comparison
