"""Token identifiability: where the time goes. The forward pass is done once; the rest is matrix products.

    python benchmarks/tokens.py [--pairs 400] [--threads 1] [--model minilm]

Every hidden state of the model × {naive, linear, mlp} × {cosine, L2}, on pairs of sentences of MRPC's length (MRPC itself
where ../shared/data/mrpc is there; else pairs made of as many common words). Beside it: what one forward pass per layer
and map would have cost. Seconds are the processor's, so that a busy machine does not change the shares.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import whence
from whence.tokens.closed_form import moments, ridge
from whence.tokens.training import Training, train

ROOT = Path(__file__).resolve().parent.parent
MRPC = Path(os.environ.get("WHENCE_DATA", ROOT.parent / "shared" / "data")) / "mrpc" / "msr_paraphrase_train.txt"
WORDS = (  # noqa: SIM905
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one "
    "you were her all she there would their we him been has when who will more no if out so said what up its about into "
    "than them can only other new some could time these two may then do first any my now such like our over man me even "
    "most made after also did many before must through back years where much your way well down should because each just"
).split()
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::addmm_", "aten::matmul")


def pairs(n: int) -> list[tuple[str, ...]]:
    if MRPC.exists():
        return whence.read_texts(MRPC, "#1 String", pair="#2 String", format="tsv", limit=n).sequences
    source = random.Random(0)
    return [tuple(" ".join(source.choices(WORDS, k=source.randint(12, 32))) for _ in range(2)) for _ in range(n)]


def product_share(width: int) -> float:
    """The share of training that is matrix products, by the profiler, on states of that width."""
    x, y = torch.randn(8192, width), torch.randn(8192, width)
    found = moments(x, y)
    start = ridge(found, (1e-3,))[0]
    total = products = 0.0
    for kind in ("linear", "mlp"):
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            train(kind, (x, y), (x[:1024], y[:1024]), "cosine", start, 1e-3, found, Training(epochs=3), 0)
        events = seen.key_averages()
        total += sum(e.self_cpu_time_total for e in events)
        products += sum(e.self_cpu_time_total for e in events if e.key in PRODUCTS)
    return products / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="minilm")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = whence.load(options.model)
    texts = pairs(options.pairs)
    whence.token_identifiability(
        model, texts[:8], maps=("naive",), bootstrap=1
    )  # proofs are made before the clock runs
    start, processor = time.perf_counter(), time.process_time()
    result = whence.token_identifiability(model, texts, parts=("whole",), targets=(0,))
    total, spent = time.perf_counter() - start, time.process_time() - processor
    seconds = dict(result.report["processor_seconds"])
    seconds["rest (tokenising, splitting, counting)"] = spent - sum(seconds.values())
    cells = len(result.layers) * 2 * 2
    print(
        f"{options.model}, {len(texts)} pairs, {sum(result.report[s] for s in ('train', 'validation', 'test')):,} tokens, "
        f"hidden states 0 … {result.layers[-1]} × {{naive, linear, mlp}} × {{cosine, L2}}, {options.threads} thread(s)"
    )
    for stage, spent_on in sorted(seconds.items(), key=lambda pair: -pair[1]):
        print(f"  {stage:40s} {spent_on:8.1f} s  {spent_on / spent:6.1%}")
    print(
        f"  {'total, seconds of the processor':40s} {spent:8.1f} s   (on the wall {total:.1f} s; {cells} trained maps)"
    )
    again = cells * seconds["forward"]
    print(f"  forward once {seconds['forward']:.1f} s; once per layer and trained map {again:.0f} s: {cells}x")
    width = whence.trace(model, texts[0][0], keep=("states",)).states.shape[-1]
    print(f"  matrix products within training: {product_share(width):.0%}")


if __name__ == "__main__":
    main()
