"""Mixing against its textbook versions, side by side in one process: `python benchmarks/mixing.py`.

ALTI:   the head-expanded formula ((head, n, n, d) vectors, as public implementations have it) against whence's; peak memory
        of each in a process of its own; forward + ALTI + rollout against the forward pass alone; norms and GlobEnc on
        top; many texts in one call against one call for each.
HTA:    a backward pass per output number (timed on a sample of outputs in every layer, and scaled) against exact folded
        forward mode, against whence's fallback for models that cannot be folded, and against 16 probes.
Zero:   value zeroing and DecompX against their authors' own loops, written again from their descriptions.

One thread; seconds are processor time, the smaller of the repeats.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from attribution import backward_loop
from torch import Tensor

import whence
import whence.mixing.jacobian.sweep as sweeping
from whence.mixing.contributions import contributions
from whence.reading.trace import Layer, Trace

KEPT = ("attention", "values", "outputs", "states")  # what ALTI and its kin read


def seconds(function: Callable[[], Any], repeats: int = 3) -> float:
    """Processor time of the fastest of `repeats` runs."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def inputs_of(n: int) -> dict[str, Tensor]:
    ids = torch.randint(1000, 28000, (1, n), generator=torch.Generator().manual_seed(n))
    ids[0, 0], ids[0, -1] = 101, 102
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def traced(model: whence.Model, n: int) -> Trace:
    found = whence.trace(model, inputs_of(n))
    return found if isinstance(found, Trace) else found[0]


# -- ALTI ----------------------------------------------------------------------------------------------------------


def textbook_layer(layer: Layer) -> Tensor:
    """ALTI of one post-norm layer as its authors' code does it: every head's vector for every pair, then the sum."""
    transformed = torch.einsum("hkv,hvd->hkd", layer.values, layer.projection.weight)
    weighted = torch.einsum("hqk,hkd->hqkd", layer.attention, transformed)
    summed = weighted.sum(0)
    n = summed.shape[0]
    residual = torch.zeros_like(summed)
    residual[torch.arange(n), torch.arange(n)] = layer.block_input
    parts = summed + residual
    norm = layer.wiring.norm
    assert norm is not None
    parts = norm.linear(parts) / norm.scale(layer.before_norm)[:, None]
    y = layer.after_attention
    distance = torch.nn.functional.pairwise_distance(y[:, None], parts, p=1, eps=0.0)
    closer = (y.norm(p=1, dim=-1)[:, None] - distance).clamp(min=0)
    return closer / closer.sum(-1, keepdim=True)


def textbook(trace: Trace) -> Tensor:
    layers = torch.stack([textbook_layer(layer) for layer in trace.of()])
    joint = [layers[0]]
    for layer in layers[1:]:
        joint.append(layer @ joint[-1])
    return torch.stack(joint)


def ours(trace: Trace) -> Tensor:
    return contributions(trace, "alti").rollout().values


def _status(name: str) -> float:
    """A line of /proc/self/status, in MB."""
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(name))
    return float(line.split()[1]) / 1e3


def child(what: str, n: int) -> None:
    """Peak memory beyond the loaded model and its trace, in MB (Linux)."""
    torch.set_num_threads(1)
    model = whence.load()
    trace = traced(model, n)
    ours(traced(model, 16))  # libraries and buffers that any first call brings
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # so that nothing is served from memory that the trace has left behind
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = _status("VmRSS")
    textbook(trace) if what == "textbook" else ours(trace)
    print(_status("VmHWM") - before)


def peak(what: str, n: int) -> float:
    command = [sys.executable, str(Path(__file__)), "--child", what, "--lengths", str(n)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1])


def compare_alti(model: whence.Model, lengths: list[int], repeats: int) -> None:
    print("\nALTI, all layers and rollout, on a finished trace")
    print(f"{'n':>5} {'textbook s':>11} {'whence s':>9} {'ratio':>7} {'largest difference':>19}")
    for n in lengths:
        trace = traced(model, n)
        theirs = seconds(lambda t=trace: textbook(t), 1 if n > 128 else 2)
        mine = seconds(lambda t=trace: ours(t), repeats)
        apart = float((textbook(trace) - ours(trace)).abs().max()) if n <= 128 else float("nan")
        print(f"{n:>5} {theirs:>11.3f} {mine:>9.4f} {theirs / mine:>6.0f}x {apart:>19.1e}", flush=True)
    longest = max(lengths)
    theirs, mine = peak("textbook", longest), peak("ours", longest)
    print(f"peak memory at n = {longest}: textbook {theirs:.0f} MB, whence {mine:.0f} MB: 1/{theirs / mine:.0f}")
    whole_way(model, lengths, repeats)
    several_texts(model, repeats)


@contextmanager
def eager(model: whence.Model) -> Iterator[None]:
    """The model's own eager attention, which is what a trace must run: fused kernels never show their weights."""
    own = model.model.config._attn_implementation
    model.model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.model.set_attn_implementation(own)


def whole_way(model: whence.Model, lengths: list[int], repeats: int) -> None:
    print("\nThe whole way: forward + ALTI + rollout against the forward pass alone; norms and GlobEnc on top")
    print(
        f"(plain: {model.model.config._attn_implementation} attention, as loaded; eager: as a trace must run it; opened: eager,"
    )
    print(
        "attentions and hidden states handed out, which is what any ALTI starts from; adds: norms and GlobEnc, and with"
    )
    print("their rollouts too)")
    names = (("n", 5), ("plain s", 9), ("eager s", 9), ("opened s", 9), ("trace s", 9), ("whole s", 9), ("of plain", 9))
    names += (("of eager", 9), ("of opened", 10), ("all three s", 12), ("adds", 6), ("rolled out", 11), ("adds", 6))
    print(" ".join(f"{name:>{width}}" for name, width in names))
    for n in lengths:
        inputs = inputs_of(n)

        def forward(i: Any = inputs) -> None:
            with torch.no_grad():
                model.model(**i)

        def opened(i: Any = inputs) -> Any:
            with torch.no_grad():
                return model.model(**i, output_attentions=True, output_hidden_states=True)

        def traced_alone(i: Any = inputs) -> Trace:
            trace = whence.trace(model, i, keep=KEPT)
            return trace if isinstance(trace, Trace) else trace[0]

        def whole(run: Callable[[], Trace] = traced_alone) -> None:
            ours(run())

        def more(run: Callable[[], Trace] = traced_alone, rolled: bool = False) -> None:
            for name, mixed in contributions(run(), ["alti", "norms", "globenc"]).items():
                if rolled or name == "alti":
                    mixed.rollout()

        more()
        best = [float("inf")] * 7
        for _ in range(repeats):  # in turns, so that whatever else the machine does falls on all of them
            found = [seconds(forward, 1)]
            with eager(model):
                found += [seconds(forward, 1), seconds(opened, 1)]
            found += [seconds(f, 1) for f in (traced_alone, whole, more, lambda run=more: run(rolled=True))]
            best = [min(pair) for pair in zip(best, found, strict=True)]
        plain, closed, open_, alone, alti, three, rolled = best
        print(
            f"{n:>5} {plain:>9.4f} {closed:>9.4f} {open_:>9.4f} {alone:>9.4f} {alti:>9.4f} {alti / plain:>8.2f}x "
            f"{alti / closed:>8.2f}x {alti / open_:>9.2f}x {three:>12.4f} {three / alti - 1:>6.0%} {rolled:>11.4f} "
            f"{rolled / alti - 1:>6.0%}",
            flush=True,
        )


def several_texts(model: whence.Model, repeats: int, count: int = 32) -> None:
    print(f"\nALTI, norms and GlobEnc of {count} texts: one call on all of them against one call on each")
    print(f"{'n':>5} {'one by one s':>13} {'together s':>11} {'ratio':>6} {'largest difference':>19}")
    names = ["alti", "norms", "globenc"]
    for n in (8, 16, 32, 64, 128):
        traces = []
        for i in range(count):
            inputs = inputs_of(max(4, n - i % 3))  # not quite of one length
            inputs["input_ids"] = inputs["input_ids"].roll(i)
            trace = whence.trace(model, inputs, keep=KEPT)
            traces.append(trace if isinstance(trace, Trace) else trace[0])
        alone = [contributions(trace, names) for trace in traces]
        together = contributions(traces, names)  # type: ignore[call-overload]
        apart = max(
            float((together[name][i].values - one[name].values).abs().max())
            for i, one in enumerate(alone)
            for name in names
        )
        each = seconds(lambda t=traces: [contributions(trace, names) for trace in t], repeats)
        once = seconds(lambda t=traces: contributions(t, names), repeats)
        print(f"{n:>5} {each:>13.4f} {once:>11.4f} {each / once:>5.1f}x {apart:>19.1e}", flush=True)


# -- hidden token attribution --------------------------------------------------------------------------------------


@contextmanager
def unfolded() -> Iterator[None]:
    """whence as it treats a model whose blocks it cannot fold."""
    kept = sweeping._folds
    sweeping._folds = lambda *_: iter([([], "switched off")])  # type: ignore[assignment]
    try:
        yield
    finally:
        sweeping._folds = kept


@contextmanager
def unread() -> Iterator[None]:
    """whence as it treats a model whose blocks it cannot write down: folded from the model's own forward mode."""
    kept = sweeping.read_blocks
    sweeping.read_blocks = lambda *args: {  # type: ignore[assignment]
        place: replace(reading, maps=None) for place, reading in kept(*args).items()
    }
    try:
        yield
    finally:
        sweeping.read_blocks = kept


def fallback(trace: Trace, tokens: int) -> float:
    """Seconds for every direction through the model's own forward mode, from those of `tokens` input tokens."""
    with unfolded():
        sweep = sweeping.prepare(trace, trace.model, trace.of(), 2 * 10**9, 0)  # type: ignore[arg-type]
        n, width = trace.of().layers[0].block_input.shape
        size = sweeping.columns(sweep, n, width, 2 * 10**9)
        eye = torch.eye(width)

        def some() -> None:
            for token in range(tokens):
                for first in range(0, width, size):
                    piece = eye[first : first + size]
                    for moved in sweep(piece, torch.full((len(piece),), token), False):
                        moved.square().sum((-1, -2))

        return seconds(some, 1) / tokens * n


def compare_hta(model: whence.Model, lengths: list[int], sample: int) -> None:
    print(
        f"\nHidden token attribution, all layers. The backward loop from {sample} outputs per layer, and forward mode without"
    )
    print(
        "folding from one input token, both scaled; generic: folded from the model's own forward mode, as for any other model"
    )
    names = (("n", 5), ("backward s", 11), ("exact s", 8), ("ratio", 6), ("generic s", 10), ("ratio", 6))
    names += (("unfolded s", 11), ("ratio", 6), ("16 probes s", 12), ("ratio", 6))
    print(" ".join(f"{name:>{width}}" for name, width in names))
    for n in lengths:
        trace = traced(model, n)
        loop = backward_loop(trace, sample)
        probes = seconds(lambda t=trace: whence.hidden_token_attribution(t, "probes", 16), 2)
        other = fallback(trace, 1)
        with unread():
            generic = seconds(lambda t=trace: whence.hidden_token_attribution(t, "exact"), 1)
        exact = seconds(lambda t=trace: whence.hidden_token_attribution(t, "exact"), 1)
        print(
            f"{n:>5} {loop:>11.0f} {exact:>8.1f} {loop / exact:>5.1f}x {generic:>10.1f} {loop / generic:>5.1f}x "
            f"{other:>11.1f} {loop / other:>5.1f}x "
            f"{probes:>12.2f} {loop / probes:>5.0f}x",
            flush=True,
        )


def zeroing_loop(model: whence.Model, trace: Trace) -> None:
    """The authors' way, from its description: for every layer and token the layer alone is run on its own input, with
    that token's value set to zero in all heads, one token at a time; then 1 − cos with the layer's output, rows / sums."""
    for layer, block in zip(trace.of(), model.model.encoder.layer, strict=True):
        n, scores = len(trace.tokens), []
        value = block.attention.self.value
        for j in range(n):

            def without(_module: Any, _args: Any, output: Tensor, at: int = j) -> Tensor:
                output[:, at] = 0.0
                return output

            handle = value.register_forward_hook(without)
            changed = block(layer.block_input[None])
            handle.remove()
            changed = changed[0] if isinstance(changed, tuple) else changed
            scores.append(1 - torch.nn.functional.cosine_similarity(changed.reshape(n, -1), layer.block_output, dim=-1))
        matrix = torch.stack(scores, 1)
        matrix / matrix.sum(-1, keepdim=True)


def decompx_loop(model: whence.Model, trace: Trace) -> None:
    """The authors' way, from the description of their code: all vectors (hidden, input, d) through every layer as whole
    tensors. Every head's vectors go through its part of the output projection first, (head, key, input, d), are mixed by
    the attention and then added up over the heads; in the first layer, where each state is still its own token's, the
    values themselves. Biases are shared out by absolute dot products, feed-forward vectors (hidden, input, 4d) of all
    positions are there at once."""

    def shared(parts: Tensor, bias: Tensor) -> Tensor:
        weights = torch.einsum("iud,d->iu", parts, bias).abs()
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-12)
        return parts + torch.matmul(weights[..., None], bias[None])

    def normed(norm: Any, parts: Tensor, state: Tensor) -> Tensor:
        scale = (state.var(-1, unbiased=False) + norm.eps).sqrt()
        centred = (parts - parts.mean(-1, keepdim=True)) / scale[:, None, None]
        return shared(torch.einsum("iud,d->iud", centred, norm.weight), norm.bias)

    first = trace[0].block_input
    n, d = first.shape
    parts = None
    for layer, block in zip(trace.of(), model.model.encoder.layer, strict=True):
        attention, own = layer.attention, block.attention
        heads, size = attention.shape[0], d // attention.shape[0]
        outward = own.output.dense.weight.view(d, heads, size)
        if parts is None:
            sources = torch.einsum("hjv,dhv->hjd", layer.values, outward)
            mixed = torch.einsum("hij,hjd->hijd", attention, sources).sum(0)
            parts, constant = torch.einsum("iu,id->iud", torch.eye(n), first), own.output.dense.bias
        else:
            values = torch.einsum("iud,vd->iuv", parts, own.self.value.weight).view(n, n, heads, size)
            sources = torch.einsum("hjuv,dhv->hjud", values.permute(2, 0, 1, 3), outward)
            mixed = torch.einsum("hij,hjud->hiud", attention, sources).sum(0)
            constant = own.output.dense.weight @ own.self.value.bias + own.output.dense.bias
        parts = normed(own.output.LayerNorm, shared(mixed + parts, constant), layer.before_norm)
        inner = shared(
            torch.einsum("iud,fd->iuf", parts, block.intermediate.dense.weight), block.intermediate.dense.bias
        )
        before = block.intermediate.dense(layer.after_attention)
        inner = inner * (torch.nn.functional.gelu(before) / (before + 1e-12))[:, None]
        out = shared(torch.einsum("iuf,df->iud", inner, block.output.dense.weight), block.output.dense.bias)
        parts = normed(block.output.LayerNorm, out + parts, layer.before_second_norm)
        lengths = parts.norm(dim=-1)
        lengths / lengths.sum(-1, keepdim=True)
        if layer.index == len(trace) - 1:
            torch.testing.assert_close(parts.sum(1), layer.block_output, atol=1e-3, rtol=1e-3)


def compare_loops(model: whence.Model, lengths: list[int], repeats: int) -> None:
    """Value zeroing and DecompX against their authors' own loops, written again from their descriptions."""
    print("\nValue zeroing and DecompX, all layers, against the authors' own loops")
    print(
        f"{'n':>5} {'zeroing loop s':>15} {'whence s':>9} {'ratio':>6} {'DecompX loop s':>15} {'whence s':>9} {'ratio':>6}"
    )
    for n in lengths:
        trace = traced(model, n)
        line = f"{n:>5}"
        for name, loop in (("value-zeroing", zeroing_loop), ("decompx", decompx_loop)):
            with torch.no_grad():
                theirs = min(seconds(lambda t=trace, f=loop: f(model, t), 1) for _ in range(repeats))
            mine = min(seconds(lambda t=trace, m=name: contributions(t, m), 1) for _ in range(repeats))
            line += f" {theirs:>15.2f} {mine:>9.2f} {theirs / mine:>5.2f}x"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--hta-lengths", type=int, nargs="*", default=[32, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sample", type=int, default=12, help="backward passes timed per layer")
    parser.add_argument("--only", choices=("alti", "hta", "zero"))
    parser.add_argument("--child", choices=("textbook", "ours"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.lengths[0])
        return
    torch.set_num_threads(1)
    model = whence.load()
    if options.only in (None, "alti"):
        compare_alti(model, options.lengths, options.repeats)
    if options.only in (None, "zero"):
        compare_loops(model, [n for n in options.lengths if n <= 128], 2)
    if options.only in (None, "hta"):
        compare_hta(model, options.hta_lengths, options.sample)


if __name__ == "__main__":
    main()
