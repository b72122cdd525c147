"""What the study says of published claims: agree, or differs and where. Every word below is chosen by the numbers of the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whence.faithful.result import Faithfulness

UNSIGNED_GRADIENTS = ("gradient", "absolute-input-x-gradient", "absolute-integrated-gradients")
SIGNED_GRADIENTS = ("input-x-gradient", "integrated-gradients")
OTHER_MIXING = ("norms", "globenc", "rollout")
RUNS = {
    "sst2-bert-tiny": "bert-tiny, SST-2",
    "sst2-minilm": "MiniLM, SST-2",
    "imdb-bert-tiny": "bert-tiny, IMDB",
    "imdb-minilm": "MiniLM, IMDB",
}

SEEDS = (
    "ALTI agrees better over training seeds (.910) than gradients (.724, × input .802), norms (.853) and raw "
    "attention (.573); GlobEnc .923 (ten seeds)"
)


def standing(run: Faithfulness, reference: str, method: str) -> str | None:
    """Whether `reference` beats a method, loses to it, or neither, under every operator."""
    frame = run.differences(reference)
    rows = list(frame[frame["method"] == method].itertuples())
    if not rows:
        return None
    if all(r.holm < 0.05 and r.difference < 0 for r in rows):
        return "beats"
    if all(r.holm < 0.05 and r.difference > 0 for r in rows):
        return "loses to"
    return "not separated from"


def _against(
    runs: Mapping[str, Faithfulness], methods: Sequence[str], reference: str = "alti"
) -> tuple[list[str], list[str]]:
    """What is said of each run, and all standings."""
    said, all_of_them = [], []
    for name, words in RUNS.items():
        if name not in runs or reference not in runs[name].methods:
            continue
        by: dict[str, list[str]] = {}
        for method in methods:
            found = standing(runs[name], reference, method)
            if found is not None:
                by.setdefault(found, []).append(method)
                all_of_them.append(found)
        said.append(f"{words}: " + "; ".join(f"{how} {', '.join(many)}" for how, many in by.items()))
    return said, all_of_them


def claims(
    runs: Mapping[str, Faithfulness],
    robust: Any | None,
    controls: Mapping[str, Any],
    determined: Mapping[str, Mapping[str, float]],
) -> list[str]:
    """A table: the claim, what was seen here, and agree / differs."""
    rows = []
    said, found = _against(runs, UNSIGNED_GRADIENTS)
    if said:
        word = "agree" if set(found) == {"beats"} else "differs: it depends on the model and the texts"
        rows.append(
            (
                "ALTI is more faithful than gradient methods (Ferrando et al. 2022), whose gradients are unsigned",
                said,
                word,
            )
        )
    said, found = _against(runs, SIGNED_GRADIENTS)
    if said:
        signed = (
            "agree"
            if set(found) == {"beats"}
            else "differs: "
            + (
                "no signed gradient method is beaten"
                if "beats" not in found
                else "not every signed gradient method is beaten"
            )
        )
        rows.append(("The same, against *signed* gradient methods, which the paper does not run", said, signed))
    said, found = _against(runs, OTHER_MIXING)
    if said:
        word = "agree" if set(found) == {"beats"} else "differs: not on every model"
        rows.append(("ALTI is more faithful than norms, GlobEnc and rollout (Ferrando et al. 2022)", said, word))
    said, found = _against(runs, ("alti", "integrated-gradients", "gradient"), "occlusion")
    if said:
        word = "agree for these" if set(found) == {"beats"} else "differs: not on every model"
        rows.append(
            (
                "Occlusion is the most faithful (Madsen et al. 2024, where masked words were trained on; here they were not)",
                said,
                word,
            )
        )
    if robust is not None:
        rho = {r.method: r.spearman for r in robust.table().itertuples()}
        shown = ("globenc", "alti", "norms", "absolute-input-x-gradient", "gradient", "last-attention")
        numbers = ", ".join(f"{m} {rho[m]:.2f}" for m in shown if m in rho)
        gradients = max(rho[m] for m in UNSIGNED_GRADIENTS if m in rho)
        agree = rho["alti"] > gradients and rho["alti"] > rho["last-attention"]
        rows.append(
            (
                SEEDS,
                [f"MiniLM, {len(robust.runs)} seeds: {numbers}"],
                ("agree" if agree else "differs")
                + (", GlobEnc and norms too" if agree and rho["globenc"] > gradients else ""),
            )
        )
    for name, one in controls.items():
        rows.append(("Attention is not explanation (Jain & Wallace 2019)", [f"{name}: {one['said']}"], one["word"]))
    for name, numbers in determined.items():
        if name.startswith("MiniLM") and "128" in name:
            shown = ", ".join(
                f"{m} {numbers[m]:.2f}" for m in ("effective", "alti", "norms", "rollout") if m in numbers
            )
            order = numbers["effective"] > 0.999 > numbers["alti"] > numbers["norms"] > numbers["rollout"]
            rows.append(
                (
                    "Trial: determinedness at 128 tokens, effective attention 1.00, ALTI .82, norms .70, rollout .46",
                    [f"{name}: {shown}"],
                    "agree in order" if order else "differs in order",
                )
            )
    lines = ["", "## Against what was published", "", "| claim | here | verdict |", "|---|---|---|"]
    return lines + [f"| {claim} | {'<br>'.join(said)} | **{word}** |" for claim, said, word in rows]


def controls_word(found: Mapping[str, Any]) -> dict[str, str]:
    """Jain & Wallace: attention that can be permuted or replaced while the prediction stays, and weak correlations."""
    import numpy as np

    texts = found["texts"]
    row, every = (float(np.median([t[k] for t in texts])) for k in ("permuted_row", "permuted_all"))
    taus = {
        k: float(np.mean([t[k] for t in texts if t[k] is not None]))
        for k in ("attention_gradient", "attention_occlusion", "gradient_occlusion")
    }
    weak = taus["attention_gradient"] < 0.5
    said = (
        f"permuting the read-out row moves p by {row:.3f}, every row by {every:.3f} (medians); τ of attention with gradients "
        f"{taus['attention_gradient']:.2f}, with leave-one-out {taus['attention_occlusion']:.2f}, of those two "
        f"{taus['gradient_occlusion']:.2f}"
    )
    if row < 0.1 and weak:
        word = "agree for the last layer's row" + ("; differs for all layers" if every > 0.1 else "")
    elif row < 0.1:
        word = "agree that the last row may be permuted; differs: τ with gradients is not weak"
    else:
        word = "differs: the prediction depends on the row"
    return {"said": said, "word": word}
