"""docs/SUPPORT.md: which families are read, in which way, what was proved of each, and why the others are refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from conformance.sweep import Verdict
from whence.errors import WhenceError
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
- **(d)** the model's outputs with the recorder = its outputs without it, under the implementation it would use itself;
- **(e)** pushed: a random step added to the head outputs moves the state after attention as the projection says, and
  nothing else;
- **(f)** held: with all attention held at its values, moving one token moves no other token's state in any layer.

A second, different input is then traced, and the states rebuilt from that trace alone must agree to 1e-4 too.
What fails (b) or (c) still gives attention, values and head outputs; measures that need the missing part refuse with
the reason below. What fails (f) mixes tokens outside the attention that was read: attention, identifiability, certificates
and each layer's own contributions stay, and whatever follows tokens through layers by way of attention refuses (rollout,
ALTI+, ALTI-logit, DecompX). `whence doctor MODEL` makes the same checks on your own model.

**{families} families: {abde} with (a), (b), (d) and (e); {every} with (c) and (f) too; {refused} refused; {skipped} not
built, being the same text model under another name.**

| family | class | way in | wiring | a | b | c | d | e | f | reason |
|---|---|---|---|---|---|---|---|---|---|---|
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
        abde=sum(all(v.holds[c] for c in "abde") for v in built),
        every=sum(all(v.holds.values()) for v in built),
        refused=sum(v.proof is None for v in built),
        skipped=len(skipped),
    )
    text += "\n".join(lines)
    text += "\n\n## Lost against four checks\n\n" + LOST_HEAD + "\n".join(lost(verdicts)) + "\n"
    text += "\n## Real weights\n\n" + REAL_HEAD + "\n".join(real_rows()) + "\n"
    text += "\n## Not built\n\n" + "\n".join(f"- {v.family.name}: {v.reason}" for v in skipped) + "\n"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


LOST_HEAD = """The first reader of this project had the checks (a) to (d) and no intervention, and ticked more than is true. These
are the families that had all four ticks there and do not have all six now, or had (a), (b), (d) and do not have (a), (b),
(d), (e): what fails, and why.

"""
FIRST_READER = Path(__file__).with_name("first_reader.txt")


def lost(verdicts: Sequence[Verdict]) -> list[str]:
    """A line for each family that the first reader ticked and this one does not, with what fails and why."""
    lines, now = [], {v.family.name: v for v in verdicts}
    for row in FIRST_READER.read_text(encoding="utf-8").splitlines():
        name, _, ticks = row.partition(" ")
        if name == "#" or not {*"abd"} <= {*ticks}:
            continue
        verdict = now.get(name)
        if verdict is None or not verdict.built:
            why = "this transformers has no such family" if verdict is None else verdict.reason
            lines.append(f"- {name}: not built: {why}")
            continue
        asked = "abcdef" if "c" in ticks else "abde"
        failed = [check for check in asked if not verdict.holds[check]]
        if failed:
            lines.append(f"- {name}: ({') ('.join(failed)}): {' '.join(verdict.reason.split())}")
    return lines


REAL_HEAD = """Trained models, read as they are; the largest error over all layers of each check.

| model | class | way in | wiring | (a) | (b) | (c) | (d) | (e) | (f) |
|---|---|---|---|---|---|---|---|---|---|
"""
SHARED = Path(__file__).resolve().parents[2] / "shared" / "models"


def real_rows() -> list[str]:
    """The embedded models, and those beside the project where there are any."""
    places = [m.name for m in catalogue.MODELS]
    if SHARED.is_dir():
        places += sorted(str(p) for p in SHARED.iterdir() if (p / "config.json").exists())
    rows = []
    for place in places:
        try:
            model = load(place)
            proof = doctor(model).proof
        except (WhenceError, ValueError) as problem:  # a tokenizer alone, or a model with no sentence to be proved on
            rows.append(f"| {Path(place).name} | | not tried: {' '.join(str(problem).split())} |" + " |" * 7)
            continue
        kinds = ", ".join(dict.fromkeys(s.wiring.kind for s in proof.sites if s.wiring is not None))
        worst = [max((getattr(s, f"error_{c}") or 0.0) for s in proof.sites) for c in "abce"]
        errors = " | ".join(f"{e:.1e}" for e in (*worst[:3], proof.error_d, worst[3], proof.error_f or 0.0))
        rows.append(f"| {model.name} | {type(model.model).__name__} | {proof.capture} | {kinds} | {errors} |")
    return rows


def _row(verdict: Verdict) -> str:
    ticks = " | ".join("✓" if held else "–" for held in verdict.holds.values())
    way = verdict.proof.capture if verdict.proof is not None else "refused"
    reason = verdict.reason.replace("|", "\\|").replace("\n", " ")
    return f"| {verdict.family.name} | {verdict.family.class_name} | {way} | {verdict.kinds} | {ticks} | {reason} |"
