"""docs/SUPPORT.md: which families are read, in which way, what was proved of each, and why the others are refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from conformance.sweep import Verdict
from whence.model import catalogue
from whence.model.load import load
from whence.reading.wiring.doctor import doctor

HEAD = """# Which models can be read

Written by `make conformance` with transformers {transformers} and torch {torch}. Every text family of transformers'
auto-mappings (and a few for images and sound) is built small with random weights, every parameter moved off its
starting value, and read. A tick means that the check holds to 1e-4 relative in every attention layer:

- **(a)** attention · values = the head output that the model goes on with;
- **(b)** Σ heads through the output projection + bias = the attention block's output;
- **(c)** residual and norms, put together again, give the state after attention (wiring: post-norm, pre-norm,
  sandwich, parallel);
- **(d)** the model's outputs with the recorder = its outputs without it, under the implementation it would use itself.

A second, different input is then traced, and the states rebuilt from that trace alone must agree to 1e-4 too.
What fails (b) or (c) still gives attention, values and head outputs; measures that need the missing part refuse with
the reason below. `whence doctor MODEL` makes the same checks on your own model.

**{families} families: {abd} with (a), (b) and (d); {c} with (c); {refused} refused; {skipped} not built, being the
same text model under another name.**

| family | class | way in | wiring | a | b | c | d | reason |
|---|---|---|---|---|---|---|---|---|
"""


def write(path: Path, verdicts: Sequence[Verdict]) -> None:
    """The whole page."""
    built = [v for v in verdicts if v.built]
    skipped = [v for v in verdicts if not v.built]
    lines = [_row(v) for v in built]
    text = HEAD.format(
        transformers=transformers.__version__,
        torch=torch.__version__.split("+")[0],
        families=len(built),
        abd=sum(v.holds["a"] and v.holds["b"] and v.holds["d"] for v in built),
        c=sum(v.holds["c"] for v in built),
        refused=sum(v.proof is None for v in built),
        skipped=len(skipped),
    )
    text += "\n".join(lines)
    text += "\n\n## Real weights\n\n" + REAL_HEAD + "\n".join(real_rows()) + "\n"
    text += "\n## Not built\n\n" + "\n".join(f"- {v.family.name}: {v.reason}" for v in skipped) + "\n"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


REAL_HEAD = """Trained models, read as they are; the largest error over all layers of each check.

| model | class | way in | wiring | (a) | (b) | (c) | (d) |
|---|---|---|---|---|---|---|---|
"""
SHARED = Path(__file__).resolve().parents[2] / "shared" / "models"


def real_rows() -> list[str]:
    """The embedded models, and those beside the project where there are any."""
    places = [m.name for m in catalogue.MODELS]
    if SHARED.is_dir():
        places += sorted(str(p) for p in SHARED.iterdir() if (p / "config.json").exists())
    rows = []
    for place in places:
        model = load(place)
        proof = doctor(model).proof
        kinds = ", ".join(dict.fromkeys(s.wiring.kind for s in proof.sites if s.wiring is not None))
        worst = [max((getattr(s, f"error_{c}") or 0.0) for s in proof.sites) for c in "abc"]
        errors = " | ".join(f"{e:.1e}" for e in (*worst, proof.error_d))
        rows.append(f"| {model.name} | {type(model.model).__name__} | {proof.capture} | {kinds} | {errors} |")
    return rows


def _row(verdict: Verdict) -> str:
    ticks = " | ".join("✓" if held else "–" for held in verdict.holds.values())
    way = verdict.proof.capture if verdict.proof is not None else "refused"
    reason = verdict.reason.replace("|", "\\|").replace("\n", " ")
    return f"| {verdict.family.name} | {verdict.family.class_name} | {way} | {verdict.kinds} | {ticks} | {reason} |"
