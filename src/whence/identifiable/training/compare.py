"""All variants, several seeds, the same budget: is the identifiable one as accurate, and what does it cost?"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence.errors import InputError
from whence.identifiable.data import Labelled
from whence.identifiable.training.fit import Settings, train
from whence.identifiable.training.variants import VARIANTS, overrides
from whence.results.files import write_atomically
from whence.results.short_repr import short_repr

if TYPE_CHECKING:
    import pandas as pd

STANDARD = "concat"


@dataclass(frozen=True)
class Comparison:
    """The metrics of every run, by variant in the order of the seeds."""

    __repr__ = short_repr

    runs: dict[str, tuple[dict[str, Any], ...]]
    seeds: tuple[int, ...]

    def accuracies(self, variant: str) -> list[float]:
        """On the test texts, or on the validation texts where there are none."""
        return [accuracy_of(run) for run in self.runs[variant]]

    def to_frame(self) -> pd.DataFrame:
        """One line per variant: accuracy in points, difference to the standard one, parameters, uniqueness, time."""
        import pandas as pd

        rows = []
        for variant, runs in self.runs.items():
            values = [100 * a for a in self.accuracies(variant)]
            row: dict[str, Any] = {
                "variant": variant,
                "accuracy": statistics.fmean(values),
                "sd": _sd(values),
                "parameters": runs[0]["parameters"],
                "attention_parameters": runs[0]["attention_parameters"],
                "unique_from_head": runs[0]["unique_from_head_up_to"] if variant != "uniform" else "not attention",
                "unique_from_block": runs[0]["unique_from_block_up_to"] if variant != "uniform" else "not attention",
                "seconds": statistics.fmean([run["seconds"] for run in runs]),
            }
            if STANDARD in self.runs:
                row["difference"], row["interval"] = paired(values, [100 * a for a in self.accuracies(STANDARD)])
            rows.append(row)
        return pd.DataFrame(rows)

    def table(self) -> str:
        """Markdown."""
        lines = [
            (
                f"| variant | accuracy, mean ± sd of {len(self.seeds)} seeds | difference to {STANDARD} (95 %) | "
                "parameters | in attention | "
                "unique up to, from head / block | seconds |"
            ),
            "|---|---|---|---|---|---|---|",
        ]
        for row in self.to_frame().to_dict("records"):
            gap = (
                ""
                if row["variant"] == STANDARD or "difference" not in row
                else f"{row['difference']:+.2f} ± {row['interval']:.2f}"
            )
            unique = "–" if row["variant"] == "uniform" else f"{row['unique_from_head']} / {row['unique_from_block']}"
            lines.append(
                f"| {row['variant']} | {row['accuracy']:.2f} ± {row['sd']:.2f} | {gap} | {row['parameters']:,} | "
                f"{row['attention_parameters']:,} | {unique} | {row['seconds']:.0f} |"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {"seeds": list(self.seeds), "runs": {name: list(runs) for name, runs in self.runs.items()}}


def accuracy_of(metrics: dict[str, Any]) -> float:
    """Test accuracy, or validation accuracy where nothing was tested."""
    found = metrics["test_accuracy"] if metrics["test_accuracy"] is not None else metrics["validation_accuracy"]
    return float(found)


def compare(
    data: Labelled,
    test: Labelled | None = None,
    *,
    out: str | Path,
    variants: Sequence[str] = tuple(VARIANTS),
    seeds: Sequence[int] = (0, 1, 2),
    settings: Settings | None = None,
    quiet: bool = True,
    say: Callable[[str], None] | None = None,
) -> Comparison:
    """Train every variant with every seed; writes compare.md and compare.json. A finished run is not done again."""
    settings = settings or Settings()
    if not variants or not seeds:
        raise InputError("a comparison needs at least one variant and one seed.")
    for variant in variants:
        overrides(variant)
    folder = Path(out).expanduser()
    done: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    for seed in seeds:
        for variant in variants:
            place = folder / f"{variant}-{seed}"
            # A finished run is found finished, and another run's folder refused, by `train` itself.
            train(data, test, out=place, settings=replace(settings, variant=variant, seed=seed), quiet=quiet, say=say)
            metrics = json.loads((place / "metrics.json").read_text(encoding="utf-8"))
            done[variant].append(metrics)
            if say is not None:
                say(f"{variant}, seed {seed}: accuracy {100 * accuracy_of(metrics):.2f}")
    comparison = Comparison({variant: tuple(runs) for variant, runs in done.items()}, tuple(seeds))
    write_atomically(folder / "compare.json", json.dumps(comparison.to_dict(), indent=1).encode())
    write_atomically(folder / "compare.md", (comparison.table() + "\n").encode())
    return comparison


def paired(values: Sequence[float], standard: Sequence[float]) -> tuple[float, float]:
    """The mean of the paired differences and the half-width of its 95 % confidence interval (Student's t)."""
    from scipy import stats

    gaps = [a - b for a, b in zip(values, standard, strict=True)]
    if len(gaps) < 2:
        return statistics.fmean(gaps), float("nan")
    return statistics.fmean(gaps), float(stats.t.ppf(0.975, len(gaps) - 1)) * _sd(gaps) / math.sqrt(len(gaps))


def _sd(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else float("nan")
