"""Study: can a trained decoder with rotary positions be given unique attention afterwards?

Writes docs/studies/rope-conversion.md.

    python studies/rope_conversion.py [--steps 400] [--write]

stories15M (Llama, 6 × 288) becomes an `IdentifiableForCausalLM`: its old key is key and value, the output projections are
fitted, and the blocks are distilled on stories sampled from the original. Under $WHENCE_WORK the sampled stories and a
checkpoint are kept; a run that was stopped goes on. One thread.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import _corpora as corpora
import torch

import whence
from whence.identifiable.conversion.convert_decoder import WORTH_USING

WORK = corpora.WORK / "rope_conversion"
PAGE = corpora.ROOT / "docs" / "studies" / "rope-conversion.md"
MODEL = corpora.DATA.parent / "models" / "stories15M"
STORIES, HELD_OUT, TOGETHER, LENGTH = 500, 100, 50, 200


def stories() -> list[str]:
    """Stories that the original tells: sampled at temperature 1, from their beginning, 200 tokens at most."""
    file = WORK / "stories.json"
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    model = whence.load(str(MODEL))
    told: list[str] = []
    torch.manual_seed(0)
    with torch.no_grad():
        while len(told) < STORIES + HELD_OUT:
            begin = torch.full((TOGETHER, 1), model.model.config.bos_token_id)
            ids = model.model.generate(begin, do_sample=True, max_new_tokens=LENGTH, pad_token_id=0)
            told += [t for t in (model.tokenizer.decode(row, skip_special_tokens=True).strip() for row in ids) if t]
            print(f"{len(told)} stories", flush=True)
    file.write_text(json.dumps(told), encoding="utf-8")
    return told


def run(steps: int) -> None:
    told = stories()
    converted = whence.tie_keys(
        str(MODEL),
        told[HELD_OUT:],
        steps,
        held_out=told[:HELD_OUT],
        tokens=512,
        learning_rate=5e-4,
        experimental=True,
        checkpoint=WORK / "distillation.safetensors",
        say=lambda line: print(line, flush=True),
        progress=lambda what, at, all_: print(f"{at:g}/{all_:g} {what}", flush=True) if at % 50 == 0 else None,
    )
    converted.save(WORK / "converted")
    unique = whence.uniqueness(str(WORK / "converted"))
    result = converted.to_dict() | {"uniqueness": str(unique), "stories": len(told) - HELD_OUT}
    (WORK / "result.json").write_text(json.dumps(result, indent=2), encoding="utf-8")


def write() -> None:
    result: dict[str, Any] = json.loads((WORK / "result.json").read_text(encoding="utf-8"))
    found, settings = result["perplexity"], result["settings"]
    good = found["ratio"] <= WORTH_USING
    lines = [
        "# Can a trained RoPE decoder be given unique attention?",
        "",
        "`python studies/rope_conversion.py` samples the stories, converts, and writes this page.",
        "",
        (
            f"stories15M, a Llama of 6 × 288, becomes a `whence.IdentifiableForCausalLM`: the old key is key and value, "
            f"turned alike, and the output turned back. {result['stories']:,} stories sampled from the original, "
            f"{settings['steps']:,} steps of {settings['tokens']} tokens of distillation (next-token distributions and hidden "
            f"states), {result['cpu_seconds'] / 60:.0f} processor minutes, one thread."
        ),
        "",
        f"| | perplexity on {settings['held_out']} held-out stories | times the original's |",
        "|---|---|---|",
        f"| original | {found['original']:.3f} | 1 |",
        f"| old key as key and value, outputs fitted | {found['before']:.3f} | {found['before'] / found['original']:.2f} |",
        f"| distilled | {found['after']:.3f} | {found['ratio']:.2f} |",
        "",
        (
            f"**Wanted: {WORTH_USING:g} times the original's or less. "
            + ("Reached" if good else "Not reached")
            + ".** The conversion stays experimental (`--experimental`) and is refused otherwise."
        ),
        "",
        f"What `whence.uniqueness` says of the converted model: {result['uniqueness']}",
    ]
    PAGE.write_text("\n".join([*lines, ""]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    WORK.mkdir(parents=True, exist_ok=True)
    if not given.write:
        run(given.steps)
    write()


if __name__ == "__main__":
    main()
