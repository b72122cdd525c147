"""Study: is a token still itself, layer by layer? Writes docs/studies/token-identifiability.md and its figures.

    python studies/token_identifiability.py            measure what is missing, then write the page
    python studies/token_identifiability.py --only X   measure X alone (so that several run side by side)
    python studies/token_identifiability.py --write    write the page from what has been measured

MRPC pairs, MiniLM (encoder) and SmolLM2 (decoder), beside the published BERT-base curves of Brunner et al. (2020).
Every result is kept under $WHENCE_WORK (default ~/.cache/whence/studies). One thread.
"""

from __future__ import annotations

import argparse
import io
import itertools
import re
import textwrap
from typing import Any

import _corpora as corpora
import pandas as pd
import torch

import whence
from whence.results.files import write_atomically
from whence.tokens.result import TokenIdentifiability

FOLDER = corpora.WORK / "token_identifiability"
DOCS = corpora.ROOT / "docs" / "studies"
MRPC = corpora.DATA / "mrpc" / "msr_paraphrase_train.txt"
ALL = ("naive", "linear", "mlp", "ridge", "procrustes")
RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "minilm": ("minilm", 400, {"maps": ALL}),
    "minilm-vocabulary": (
        "minilm", 400,
        {"maps": ("naive", "linear", "ridge"), "layers": [0, 2, 4, 6], "parts": ("whole",), "pool": "vocabulary"},
    ),
    "smollm2": (
        "smollm2", 300, {"maps": ALL, "layers": [0, 1, 8, 16, 24, 30]},
    ),
}  # fmt: skip

# Read off the paper's plots, ±0.003, layers 1 … 12 of BERT-base on MRPC.
PUBLISHED = {
    ("linear", "cosine"): (1.00, 1.00, 1.00, 1.00, 1.00, 0.998, 0.995, 0.993, 0.989, 0.977, 0.950, 0.94),
    ("mlp", "cosine"): (1.00, 1.00, 1.00, 1.00, 1.00, 0.998, 0.995, 0.993, 0.989, 0.977, 0.950, 0.94),
    ("mlp", "l2"): (1.00, 1.00, 1.00, 0.998, 0.989, 0.979, 0.966, 0.952, 0.930, 0.881, 0.825, 0.82),
    ("linear", "l2"): (1.00, 1.00, 0.99, 0.99, 0.98, 0.968, 0.947, 0.924, 0.895, 0.818, 0.771, 0.734),
    ("naive", "cosine"): (1.00, 0.995, 0.982, 0.965, 0.90, 0.82, 0.735, 0.615, 0.55, 0.41, 0.21, 0.49),
    ("naive", "l2"): (1.00, 0.995, 0.989, 0.970, 0.893, 0.80, 0.70, 0.53, 0.41, 0.28, 0.135, 0.18),
}


def measure(names: list[str]) -> None:
    """Each run that has no result yet."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names:
        model, pairs, options = RUNS[name]
        path = FOLDER / f"{name}.safetensors"
        print(f"measuring {name} …", flush=True)
        texts = whence.read_texts(MRPC, "#1 String", pair="#2 String", format="tsv", limit=pairs)
        whence.token_identifiability(whence.load(model), texts, progress=tell, **options).save(path)


def tell(stage: str, done: int, total: int) -> None:
    if done == total:
        print(f"  {stage}: {total} done", flush=True)


# -- the page ----------------------------------------------------------------------------------------------------------


def table(rows: list[list[str]], header: list[str]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def number(rate: float) -> str:
    return "–" if rate != rate else f"{rate:.3f}"


def rates(result: TokenIdentifiability, *, part: str = "whole", target: int = 0) -> str:
    """Rates with the half-width of their interval, a column per hidden state."""
    rows = []
    for name in result.maps:
        for distance in result.distances:
            values = result.rate(name, distance, part=part, target=target)
            if bool(values.isnan().all()):
                continue
            low, high = result.interval(name, distance, part=part, target=target)
            cells = [
                number(v) + ("" if h - lo < 5e-4 else f" ±{(h - lo) / 2:.3f}")
                for v, lo, h in zip(values.tolist(), low.tolist(), high.tolist(), strict=True)
            ]
            rows.append([f"{name}, {distance}", *cells])
    return table(rows, ["map, distance", *map(str, result.layers)])


def beside(result: TokenIdentifiability) -> str:
    """MiniLM's layer l of 6 beside BERT-base's layer 2l of 12."""
    rows = []
    for (name, distance), curve in PUBLISHED.items():
        ours = dict(zip(result.layers, result.rate(name, distance).tolist(), strict=True))
        rows.append([f"{name}, {distance}, MiniLM", *(number(ours[layer]) for layer in range(1, 7))])
        rows.append([f"{name}, {distance}, BERT-base", *(number(curve[2 * layer - 1]) for layer in range(1, 7))])
    return table(rows, ["map, distance, model", *(f"{k}/6 of depth" for k in range(1, 7))])


def matrix(result: TokenIdentifiability, name: str, distance: str) -> str:
    values = result.transfer(name, distance).tolist()
    rows = [[str(layer), *map(number, row)] for layer, row in zip(result.layers, values, strict=True)]
    return table(rows, ["trained on ↓, tested on →", *map(str, result.layers)])


def groups(result: TokenIdentifiability, layer: int) -> str:
    wanted = [("naive", "cosine"), ("linear", "cosine"), ("linear", "l2")]
    rows = []
    for by in ("kind", "piece", "frequency", "position", "length"):
        frame = result.breakdown(by)
        frame = frame[(frame["layer"] == layer) & (frame["target"] == 0)]
        for group in dict.fromkeys(frame[by]):
            lines = frame[frame[by] == group]
            cells = [_cell(lines, name, distance) for name, distance in wanted]
            rows.append([by, str(group), f"{lines['tokens'].iloc[0]:,}", *cells])
    return table(rows, ["by", "group", "tokens", *(", ".join(pair) for pair in wanted)])


def _cell(lines: pd.DataFrame, name: str, distance: str) -> str:
    one = lines[(lines["map"] == name) & (lines["distance"] == distance)].iloc[0]
    return f"{one['rate']:.3f} ({one['low']:.3f}–{one['high']:.3f})"


def figure(name: str, draw: Any, columns: int, width: float = 5.6) -> str:
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(width * columns, 4.8), layout="constrained")
    draw(drawing.subplots(1, columns, squeeze=False)[0])
    file = f"token-identifiability-{name}.png"
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=100, metadata={"Software": None})
    write_atomically(DOCS / file, buffer.getvalue())
    return f"![{name}]({file})"


def draw_encoder(encoder: TokenIdentifiability) -> Any:
    from whence.tokens.plots import COLOURS, LINES

    def draw(axes: Any) -> None:
        encoder.plot(ax=axes[0])
        for (name, distance), curve in PUBLISHED.items():
            depth = [k / 12 for k in range(1, 13)]
            axes[1].plot(depth, curve, LINES[distance], color=COLOURS[name], marker=".", label=f"{name}, {distance}")
        axes[1].set(
            title="BERT-base, as published", xlabel="depth (layer / 12)", ylim=(-0.02, 1.03), xlim=(-0.03, 1.03)
        )
        axes[1].legend(fontsize="small")

    return draw


def draw_decoder(decoder: TokenIdentifiability) -> Any:
    def draw(axes: Any) -> None:
        decoder.plot(ax=axes[0])
        decoder.plot(ax=axes[1], target=1)

    return draw


def draw_parts(encoder: TokenIdentifiability, decoder: TokenIdentifiability) -> Any:
    styles = {"whole": "-", "direction": "--", "norm": ":"}

    def draw(axes: Any) -> None:
        for ax, result in zip(axes, (encoder, decoder), strict=True):
            for part, style in styles.items():
                for name, colour in (("linear", "#1f77b4"), ("mlp", "#d62728")):
                    values = result.rate(name, "cosine", part=part).tolist()
                    ax.plot(result.layers, values, style, color=colour, marker=".", label=f"{name}, {part}")
            ax.axhline(result.chance, color="black", linewidth=0.8, label="chance")
            ax.set(title=f"{result.provenance.model}: cosine", xlabel="hidden state", ylim=(-0.02, 1.03))
            ax.legend(fontsize="small")

    return draw


def draw_transfer(encoder: TokenIdentifiability, decoder: TokenIdentifiability) -> Any:
    def draw(axes: Any) -> None:
        for ax, result in zip(axes, (encoder, decoder), strict=True):
            result.plot_transfer("linear", "cosine", ax=ax)

    return draw


def control(result: TokenIdentifiability) -> str:
    low, high = (float(value) for value in result.extra["control"].aminmax())
    return f"{low:.4f}–{high:.4f} (chance {result.chance:.4f}, with ties {result.report['chance_with_ties']:.4f})"


def write() -> None:
    """The page, from the kept results."""
    load = TokenIdentifiability.load
    encoder, words, decoder = (load(FOLDER / f"{name}.safetensors") for name in RUNS)
    DOCS.mkdir(parents=True, exist_ok=True)
    pictures = {
        "encoder": figure("minilm", draw_encoder(encoder), 2),
        "decoder": figure("smollm2", draw_decoder(decoder), 2),
        "parts": figure("parts", draw_parts(encoder, decoder), 2),
        "transfer_figure": figure("transfer", draw_transfer(encoder, decoder), 2),
    }
    page = PAGE.format(
        sizes="\n".join(f"- {r.provenance.model}: {' '.join(r.remarks())}" for r in (encoder, decoder)),
        encoder_rates=rates(encoder),
        beside=beside(encoder),
        decoder_rates=rates(decoder),
        decoder_next=rates(decoder, target=1),
        direction=rates(encoder, part="direction"),
        norm=rates(encoder, part="norm"),
        decoder_direction=rates(decoder, part="direction"),
        decoder_norm=rates(decoder, part="norm"),
        transfer=matrix(encoder, "linear", "cosine"),
        decoder_transfer=matrix(decoder, "linear", "cosine"),
        words=rates(words),
        words_chance=f"{words.chance:.6f}",
        majority=f"{words.report['majority']:.3f}",
        groups=groups(encoder, encoder.layers[-1]),
        decoder_groups=groups(decoder, decoder.layers[-1]),
        encoder_control=control(encoder),
        decoder_control=control(decoder),
        findings=findings(encoder, words, decoder),
        **pictures,
    )
    write_atomically(DOCS / "token-identifiability.md", page.encode())
    print(f"wrote {DOCS.relative_to(corpora.ROOT) / 'token-identifiability.md'}")


def wrapped(block: str) -> str:
    """A paragraph or a list item in lines of 118."""
    indent = "  " if block.startswith("- ") else ""
    return textwrap.fill(" ".join(block.split()), 118, subsequent_indent=indent, break_on_hyphens=False)


class Cells:
    """`cells["linear cosine 6"]`, `cells["mlp l2 last direction"]`, `cells["linear cosine last next"]`: rates, as text."""

    def __init__(self, result: TokenIdentifiability) -> None:
        self.result = result

    def __getitem__(self, key: str) -> str:
        name, distance, where, *more = key.split()
        places = {"last": -1, "middle": len(self.result.layers) // 2}
        place = places[where] if where in places else self.result.layers.index(int(where))
        part = next((word for word in more if word != "next"), "whole")
        return number(float(self.result.rate(name, distance, part=part, target=int("next" in more))[place]))


def findings(encoder: TokenIdentifiability, words: TokenIdentifiability, decoder: TokenIdentifiability) -> str:
    """What agrees with the paper, what differs, and why; every number is taken from the results."""
    matrix_ = encoder.transfer("linear", "cosine")
    text = FINDINGS.format(
        e=Cells(encoder),
        d=Cells(decoder),
        w=Cells(words),
        late_low=number(float(matrix_[-1, :-1].min())),
        late_high=number(float(matrix_[-1, :-1].max())),
        early=number(float(matrix_[encoder.layers.index(1), -1])),
        chance=number(encoder.chance),
        decoder_chance=number(decoder.chance),
        ties=f"{decoder.report['ties']:.0%}",
        tied_chance=number(decoder.report["chance_with_ties"]),
        middle=decoder.layers[len(decoder.layers) // 2],
        vocabulary=f"{round(1 / words.chance):,}",
        majority=number(words.report["majority"]),
    )
    blocks = re.split(r"\n(?=- )|\n\n", text.strip())
    lines = [wrapped(block) for block in blocks]
    joined = lines[0]
    for before, line in itertools.pairwise(lines):
        joined += ("\n" if before.startswith("- ") and line.startswith("- ") else "\n\n") + line
    return f"\n{joined}\n"


FINDINGS = """
**Agrees.**

- A learned map recovers nearly every token from the first half of the encoder (layer 3, linear, cosine: {e[linear cosine 3]};
  BERT-base at the same depth: .998), and the rate falls only towards the end, to {e[linear cosine last]}.
- The order of the curves is the published one. Cosine is above L2 for the same map (last layer, linear
  {e[linear cosine last]} against {e[linear l2 last]}; MLP {e[mlp cosine last]} against {e[mlp l2 last]}), learned maps
  are above the naive one ({e[naive cosine last]}, {e[naive l2 last]}), and the MLP adds more to L2 than to
  cosine (layer 5: {e[linear l2 5]} to {e[mlp l2 5]}, {e[linear cosine 5]} to {e[mlp cosine 5]}).
- Identity lives in the angle. With the direction alone the linear map does as well as with the whole state
  ({e[linear cosine last direction]} against {e[linear cosine last]}), and L2 even gains ({e[linear l2 last direction]} against
  {e[linear l2 last]}): the length of the last state only misleads it. With the norm alone even the MLP recovers
  {e[mlp cosine last norm]} (chance {chance}).
- Late maps work on early layers, early maps fail on late ones: the linear map of the last layer recovers
  {late_low}–{late_high} on the layers before it, that of layer 1 only {early} on the last (BERT-base: at least .917, and .68).

**Differs, and why.**

- MiniLM loses more at the end than BERT-base (linear, cosine {e[linear cosine last]} against .94). It was trained so
  that the mean of its last states is the sentence's embedding: every state is drawn to what the sentence says. The
  breakdown shows where: punctuation and frequent words lose their own identity, rare words and pieces of words keep it.
- The published naive cosine rate rises again in BERT's last layer (.21 to .49). In MiniLM naive L2 falls from
  {e[naive l2 5]} to {e[naive l2 last]} over the last layer while naive cosine hardly moves ({e[naive cosine 5]} to
  {e[naive cosine last]}): the last state changes its length more than its direction.
- SmolLM2 is not in the paper. Its states leave the space of the embeddings at once: the naive rate is {d[naive cosine 1]} after
  one layer, where the linear map still has {d[linear cosine 1]}. A causal model need not keep the present token: at the
  last layer the linear map recovers {d[linear cosine last]}, and the next token is recovered from the same states in
  {d[linear cosine last next]} of the cases (at the embeddings {d[linear cosine 0 next]}: what the present word alone
  says of the next). For the next token the naive map is as good as a fitted one at layer 24 ({d[naive cosine 24 next]} against
  {d[linear cosine 24 next]}): SmolLM2 reads and writes with one table of embeddings, and its state has already turned towards
  the token to come.
- With rotary positions equal tokens have equal embeddings ({ties} of SmolLM2's test tokens have such a twin in their sequence),
  and a hit on any of them counts: a blind guess is then right {tied_chance} of the time, not {decoder_chance}.
- Fewer sentences than the paper's, and maps that start from the ridge solution; the perceptron has the linear map beside its
  hidden layer, so that it adds to it. Coordinates that hardly vary are not divided by their own spread: three of MiniLM's last
  layer are constant, and dividing by theirs made its map useless on every other layer.

**Closed form or trained?** Ridge needs one decomposition a layer and no training. Where nearly everything is recovered it is as
good as the trained map (layer 4: {e[ridge cosine 4]} against {e[linear cosine 4]}); at the end training with the cosine
as loss gains over least squares ({e[linear cosine last]} against {e[ridge cosine last]}), with L2 it gains little
({e[linear l2 last]} against {e[ridge l2 last]}). Procrustes, a rotation, says how much of the identity merely turned:
{e[procrustes cosine last]} in MiniLM's last layer. In SmolLM2 it fails on whole states ({d[procrustes cosine middle]} at
layer {middle}) and works on directions ({d[procrustes cosine middle direction]}): the first position of every
sequence has a state more than a hundred times as long as the others, and least squares on whole states sees little else. That the
rotation then beats the free linear map ({d[linear cosine middle direction]}) says that the training tokens are too few
for one: it does not reach tokens that it has not seen (last table), so that SmolLM2's linear rates are lower bounds.

**The word without its sentence.** Among all {vocabulary} tokens of the vocabulary the ridge map still names the right one for
{w[ridge cosine 0]} of the tokens at the embeddings and {w[ridge cosine last]} at the last layer (cosine); always
answering the most frequent token would be right {majority} of the time. The naive map compares states with rows of the
table, which lack position, segment and norm, and is right for {w[naive cosine 0]} and {w[naive cosine last]}. At the
last layer it beats the maps fitted for L2 ({w[naive l2 last]} against {w[linear l2 last]}).
"""


PAGE = """# Is a token still itself?

Token identifiability (Brunner et al., ICLR 2020, section 4): from a hidden state e_i of layer l, is the nearest of the
sequence's input embeddings the token's own, after a map g fitted on other sentences? Measured on MRPC pairs with the two
embedded models, beside the published BERT-base curves. Written, with its figures, by `python studies/token_identifiability.py`
(some minutes).

Setting: split by sentence 70/15/15, no sentence on two sides; maps fitted on the first part, stopped by the second, rates
on the third; ± is half the 95 % bootstrap interval over sentences. Hidden state 0 is the embeddings; for SmolLM2 the last
is before the final norm.

{sizes}

Control: a ridge map for labels shuffled within each sequence recovers {encoder_control}
with MiniLM and {decoder_control} with SmolLM2.

## What was found
{findings}
## MiniLM, layer by layer

{encoder}

{encoder_rates}

### Beside BERT-base

BERT-base has 12 layers and MiniLM 6: layer l is set beside layer 2l. Published values are read off the paper's plots
(±0.003).

{beside}

## SmolLM2: the token itself, and the next one

{decoder}

The token itself:

{decoder_rates}

The next token, from the same states:

{decoder_next}

## Angle or norm?

{parts}

MiniLM, from the direction e/‖e‖ only:

{direction}

MiniLM, from the norm ‖e‖ only:

{norm}

SmolLM2, from the direction only:

{decoder_direction}

SmolLM2, from the norm only:

{decoder_norm}

## Transfer: the map of one layer on every other

{transfer_figure}

MiniLM, linear, cosine:

{transfer}

SmolLM2, linear, cosine:

{decoder_transfer}

## Among the whole vocabulary (MiniLM)

Candidates are the rows of the embedding table; chance {words_chance}, always answering the most frequent token {majority}.

{words}

## Which tokens?

MiniLM, last layer, with intervals:

{groups}

SmolLM2, last layer, the token itself:

{decoder_groups}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="only write the page")
    parser.add_argument("--only", choices=RUNS, help="only measure this one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = [options.only] if options.only else list(RUNS)
    missing = [name for name in wanted if not (FOLDER / f"{name}.safetensors").exists()]
    if missing and not MRPC.exists():
        print("MRPC is not beside the project (../shared/data/mrpc, or $WHENCE_DATA): nothing was measured or written.")
        return
    if missing and options.write:
        print(f"not measured yet: {', '.join(missing)}. Run it without --write.")
        return
    measure(missing)
    if not options.only:
        write()


if __name__ == "__main__":
    main()
