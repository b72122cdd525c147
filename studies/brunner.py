"""Brunner et al. (ICLR 2020) run again: raw against effective attention, and how much of a token is left in its state.

    python studies/brunner.py [--models minilm bert-tiny stories15M smollm2]

Surveys of at least 200 texts for each model, kept under ~/.cache/whence/studies. Writes docs/studies/brunner.md.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from _papers import TIMES, Subject, cell, mrpc_pairs, short_sentences, subjects, table, write_page

from whence.mixing.summaries import DISTANCES
from whence.surveys.figures import NOT_LARGEST, OWN_SHARE
from whence.surveys.layer_columns import distance_name, offset_name
from whence.surveys.result import Survey

PUBLISHED_R = {1.0: "1.00", 1.1: ".71–.80", 1.25: ".60–.65", 1.6: "~.50", 2.0: ".40–.53"}
TEXTS, LONGEST = 200, {"smollm2": 16}
"""Hidden token attribution: sentences, and the length of the longest (elsewhere 32); larger ones take hours."""


def r_by_length(subject: Subject, survey: Survey) -> dict[float, Any]:
    """r of raw and effective attention by length in widths of a head; a text is of the nearest of the lengths asked for."""
    width = subject.shape[2]
    frame = survey.heads.assign(times=[min(TIMES, key=lambda t: abs(t * width - n)) for n in survey.heads["length"]])
    from whence.surveys.intervals import mean_over_texts

    return {float(t): mean_over_texts(part, "r") for t, part in frame.groupby("times")}


def attribution(subject: Subject) -> Survey:
    texts: list[Any] = short_sentences(subject.model.tokenizer, TEXTS, LONGEST.get(subject.name, 32))
    return subject.survey("attribution", texts, measures=("hta",), without=("certainty",))


def raw_and_effective(models: list[Subject]) -> tuple[str, list[str]]:
    rows, verdicts = [], []
    for subject in models:
        found = r_by_length(subject, subject.by_length())
        rows.append([subject.title, subject.shape[2], *(cell(found[t]) if t in found else "–" for t in TIMES)])
        short, double = found[0.5], found[2.0]
        word = "agrees" if short["low"] >= 0.99 else "differs"
        verdicts.append(f"{subject.title}: r = 1 below the width of a head **{word}** ({cell(short)}).")
        if double["low"] <= 0.53 and double["high"] >= 0.40:
            word = "agrees"
        else:
            word = "differs: it is " + ("higher" if double["mean"] > 0.53 else "lower")
        verdicts.append(f"{subject.title}: r of .40–.53 at twice the width **{word}** ({cell(double)}).")
    rows.append(["BERT-base, published", 64, *(PUBLISHED_R.get(t, "–") for t in TIMES)])
    return table(["model", "d_v", *(f"{t:g} d_v" for t in TIMES)], rows), verdicts


def by_type(subject: Subject) -> str:
    survey = subject.by_length()
    width = subject.shape[2]
    long = survey.heads[survey.heads["length"] > 1.9 * width]
    rows = []
    from whence.surveys.intervals import mean_over_texts

    for layer, part in long.groupby("layer"):
        cells = [cell(mean_over_texts(part, f"{side}_{kind}")) for kind in ("start", "end", "punctuation")
                 for side in ("raw", "effective")]  # fmt: skip
        rows.append([layer + 1, *cells])
    head = [
        "layer",
        *(f"{k}, {s}" for k in ("[CLS] or start", "[SEP] or end", "punctuation") for s in ("raw", "effective")),
    ]
    return table(head, rows)


def type_verdicts(subject: Subject) -> list[str]:
    """The published claim: late attention to [SEP] all but vanishes when it is made effective (.48–.57 to ~.03)."""
    survey = subject.by_length()
    long = survey.heads[survey.heads["length"] > 1.9 * subject.shape[2]]
    each = long.groupby("layer")[["raw_end", "effective_end"]].mean()
    if not float(each["raw_end"].max()):
        return [f"{subject.title} has no special token at the end: the claim about [SEP] cannot be tried."]
    top = each["raw_end"].idxmax()
    raw, effective = (float(each.loc[top, f"{side}_end"]) for side in ("raw", "effective"))
    if raw < 0.1:
        return [f"{subject.title} hardly attends to [SEP] ({raw:.2f} at most): the claim about it cannot be tried."]
    share = effective / raw
    word = "agrees" if share <= 0.2 else "differs in size" if share < 0.8 else "differs"
    told = f"at its peak (layer {top + 1}) {raw:.2f} raw, {effective:.2f} effective (published, layers 5–10: .48–.57 and ~.03)"
    return [f"{subject.title}: effective attention takes most of the weight from [SEP] **{word}**: {told}."]


def own_shares(models: list[Subject]) -> tuple[str, list[str]]:
    parts, verdicts = [], []
    for subject in models:
        survey = attribution(subject)
        own, beaten = survey.mean("hta_own_median", "layer"), survey.share_of_tokens("hta_beaten")
        alti, alti_beaten = survey.mean("alti_own_median", "layer"), survey.share_of_tokens("alti_beaten")
        rows = [
            [int(o["layer"]) + 1, *(percent(x, k) for x, k in ((o, "mean"), (b, "share"), (a, "mean"), (c, "share")))]
            for (_, o), (_, b), (_, a), (_, c) in zip(
                *(f.iterrows() for f in (own, beaten, alti, alti_beaten)), strict=True
            )
        ]
        n = survey.texts["length"]
        parts.append(
            f"{subject.title}, {int(survey.texts['reason'].isna().sum())} sentences of {n.min()}–{n.max()} tokens (16 probes; "
            f"mean standard error of an own share {float(survey.layers['hta_own_error'].mean()):.3f}):\n\n"
            + table(["after layer", "own share %, HTA", "P̃ %, HTA", "own share %, ALTI", "P̃ %, ALTI"], rows)
        )
        first, last = 100 * own["mean"].iloc[0], 100 * own["mean"].iloc[-1]
        word = "agrees" if last < first else "differs"
        verdicts.append(
            f"{subject.title}: the own share falls with depth **{word}** ({first:.1f} to {last:.1f} %; published "
            f"{OWN_SHARE[0]} to {OWN_SHARE[-1]} %)."
        )
        p = 100 * beaten["share"]
        word = "agrees" if p.iloc[-1] > 5 and p.iloc[0] < 5 else "differs"
        verdicts.append(
            f"{subject.title}: late tokens are often not their own largest part, early ones are **{word}** "
            f"(P̃ {p.iloc[0]:.1f} to {p.iloc[-1]:.1f} %; published {NOT_LARGEST[0]} to {NOT_LARGEST[-1]} %)."
        )
    return "\n\n".join(parts), verdicts


def percent(row: Any, value: str) -> str:
    return cell({k: 100 * float(row[k]) for k in (value, "low", "high")}, value, 1)


def places(models: list[Subject]) -> str:
    """Offsets relative to the token before; distance groups, each normalised over layers as in the paper."""
    parts = []
    for subject in models:
        frame = attribution(subject).layers
        base = float(frame["hta_before_1"].mean())
        offsets = {k: float(frame[f"hta_{offset_name(k)}"].mean()) / base for k in (-1, 1, -2, 2, -5, 5, -10, 10)}
        groups = frame.groupby("layer")[[f"hta_{distance_name(i)}" for i in range(len(DISTANCES))]].mean()
        groups = 100 * groups / groups.sum()
        rows = [
            [name, *(f"{v:.0f}" for v in groups[f"hta_{distance_name(i)}"])] for i, (name, _, _) in enumerate(DISTANCES)
        ]
        shown = " ".join(f"{k:+d}: {v:.2f}," for k, v in offsets.items() if v == v and v > 0).rstrip(",")
        parts.append(
            f"{subject.title}. Share of one token by offset, that before as 1: {shown} (published: +1 .8, −2 .53, +2 .41–.44, "
            "±5 .16–.21).\n\n" + table(["neighbour", *(f"layer {i + 1}" for i in range(len(groups)))], rows)
        )
    return "\n\n".join(parts)


def naive(models: list[Subject]) -> str:
    rows = []
    for subject in models:
        encoder = not subject.causal
        pairs: list[Any] = mrpc_pairs(TEXTS)
        texts = pairs if encoder else [" ".join(pair) for pair in pairs]
        survey = subject.survey("pairs", texts, without=("certainty",))
        for metric in ("cosine", "l2"):
            found = survey.share_of_tokens(f"tokens_{metric}")
            chosen = found.iloc[[0, len(found) // 4, len(found) // 2, 3 * len(found) // 4, len(found) - 1]]
            rows.append([subject.title, metric, *(cell(row, "share", 3) for _, row in chosen.iterrows())])
    rows.append(["BERT-base, published", "cosine", "1.00", ".982–.965", ".82", ".55–.41", ".49"])
    rows.append(["BERT-base, published", "l2", "1.00", ".989–.970", ".80", ".41–.28", ".18"])
    return table(["model", "distance", "first layer", "a quarter", "half", "three quarters", "last"], rows)


def main() -> None:
    models = subjects(__doc__ or "")
    pd.options.display.width = 200
    lengths, verdicts = raw_and_effective(models)
    encoders = [s for s in models if not s.causal]
    verdicts += [line for s in encoders for line in type_verdicts(s)]
    shares, more = own_shares(models)
    verdicts += more
    body = f"""
Brunner et al., *On Identifiability in Transformers* (ICLR 2020), measured BERT-base. The same measures on the models that are at
hand, on texts of our choice (IMDB reviews cut to length; sentences and pairs of MRPC), each figure with the 95 % interval
over texts. Layers are counted from 1 where the paper does, from 0 in whence's own results.

## Against what was published

{chr(10).join("- " + line for line in verdicts)}

"Differs" is about other models on other texts: it says that the figure does not carry over, not that it was wrong.

## Raw and effective attention, by length

Pearson r over all weights of a head, mean over heads, layers and texts. Lengths are in widths of a head (d_v), because that is
where the null space begins.

{lengths}

## What attention goes to

Texts longer than 1.9 d_v.

{chr(10).join(f"{s.title}:{chr(10)}{chr(10)}{by_type(s)}{chr(10)}" for s in encoders)}

Published, BERT-base: to [SEP], layers 5–10, raw .48–.57 and effective ~.03; to punctuation, layers 11 and 12, raw .50 and .57,
effective .11 and .07; to [CLS], layers 2 and 3, raw ~.25 and effective .08–.10.

## How much of a token is left in its state

Hidden token attribution (16 probes at every token; the paper computes it exactly) and, beside it, ALTI. Medians of a text,
means over
texts.

{shares}

Published, BERT-base, layers 1–12: own share {", ".join(map(str, OWN_SHARE))} %; P̃ {", ".join(map(str, NOT_LARGEST))} %.

## Where the rest comes from

Each group of neighbours normalised over layers: every line sums to 100, as in the paper.

{places(models)}

## Can the token still be told, without a map?

Nearest input embedding of the same text (pairs of MRPC; a decoder reads the two sentences one after the other). With maps that
are
fitted: [Is a token still itself?](token-identifiability.md)

{naive(models)}
"""
    write_page("brunner", "Brunner et al. 2020, run again", "brunner.py", body)


if __name__ == "__main__":
    main()
