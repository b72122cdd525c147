"""Sun & Marasović (Findings of ACL 2021) run again: raw and effective attention on special tokens, before and after fine-tuning.

    python studies/sun_marasovic.py

MiniLM as it comes and fine-tuned on SST-2 (the classifier of studies/faithfulness.py), and bert-tiny, which is here fine-tuned
alone. Writes docs/studies/sun-marasovic.md.
"""

from __future__ import annotations

import torch
from _classifiers import folder
from _corpora import imdb
from _papers import SHARED, Subject, cell, cut_to, table, write_page

from whence.surveys.intervals import mean_over_texts
from whence.surveys.result import Survey

TEXTS, TIMES = 200, 4
NAMES = {"start": "[CLS]", "end": "[SEP]", "punctuation": "punctuation", "rest": "words"}


def surveyed(subject: Subject) -> Survey:
    """Reviews of four widths of a head: long enough that raw and effective attention differ."""
    width = subject.shape[2]
    reviews = list(dict.fromkeys(t for t, _ in (*imdb().test, *imdb().train) if len(t.split()) >= TIMES * width))[
        :TEXTS
    ]
    texts = [cut_to(subject.model.tokenizer, review, TIMES * width) for review in reviews]
    return subject.survey("token-types", texts, without=("certainty", "alti", "tokens"))


def lines(survey: Survey) -> list[list[str]]:
    rows = []
    for layer, part in survey.heads.groupby("layer"):
        cells = [cell(mean_over_texts(part, f"{side}_{kind}")) for kind in NAMES for side in ("raw", "effective")]
        rows.append([str(layer), *cells])
    return rows


def main() -> None:
    torch.set_num_threads(1)
    models = [("MiniLM, as it comes", Subject("minilm")), ("MiniLM, fine-tuned on SST-2", Subject(str(folder(0))))]
    if SHARED["bert-tiny"].is_dir():
        models.append(("bert-tiny, fine-tuned on SST-2", Subject("bert-tiny")))
    surveys = {name: surveyed(subject) for name, subject in models}
    head = ["layer", *(f"{name}, {side}" for name in NAMES.values() for side in ("raw", "effective"))]
    tables = [f"{name} ({len(s.texts)} reviews of up to {s.texts['length'].max()} tokens):\n\n{table(head, lines(s))}"
              for name, s in surveys.items()]  # fmt: skip
    verdicts = []
    for name, survey in surveys.items():
        heads = survey.heads
        raw, effective = (mean_over_texts(heads, f"{side}_end") for side in ("raw", "effective"))
        word = (
            "agrees"
            if effective["high"] < raw["low"]
            else "not separated"
            if effective["low"] <= raw["high"]
            else "differs"
        )
        verdicts.append(
            f"{name}: effective attention goes to [SEP] less **{word}** ({cell(raw)} raw, {cell(effective)} effective)."
        )
        raw, effective = (mean_over_texts(heads, f"{side}_rest") for side in ("raw", "effective"))
        word = (
            "agrees"
            if effective["low"] > raw["high"]
            else "not separated"
            if effective["high"] >= raw["low"]
            else "differs"
        )
        verdicts.append(f"{name}: and to words more **{word}** ({cell(raw)} raw, {cell(effective)} effective).")
    before, after = surveys[models[0][0]].heads, surveys[models[1][0]].heads
    for kind, name in NAMES.items():
        moved = {}
        for side in ("raw", "effective"):
            both = before.assign(late=after[f"{side}_{kind}"].to_numpy())
            moved[side] = mean_over_texts(both.assign(change=both["late"] - both[f"{side}_{kind}"]), "change")
        verdicts.append(
            f"Fine-tuning moves attention to {name} by {moved['raw']['mean']:+.3f} (95 % {moved['raw']['low']:+.3f} to "
            f"{moved['raw']['high']:+.3f}) raw and {moved['effective']['mean']:+.3f} ({moved['effective']['low']:+.3f} to "
            f"{moved['effective']['high']:+.3f}) effective, all layers and heads together, text by text."
        )
    body = f"""
Sun and Marasović, *Effective Attention Sheds Light On Interpretability* (Findings of ACL 2021): effective attention is bound
less to
the separator token and to other features of pre-training than raw attention, so that it tells more of the task. The paper has
BERT-base before and after fine-tuning on GLUE. Here: MiniLM as it comes and fine-tuned on SST-2 (seed 0 of the
[faithfulness study](faithfulness.md)), on film reviews cut to four widths of a head, since up to one width raw and effective
attention are the same. Of bert-tiny only the fine-tuned weights are here. 95 % intervals over texts. Masses of effective
attention
need not sum to 1, and may be negative.

{chr(10).join("- " + line for line in verdicts)}

{(chr(10) * 2).join(tables)}

Effective attention is the smallest matrix with the same output. That it leaves [SEP] says that weight there is, in part, of no
consequence to the head's output; it does not say that what is left is an explanation.
"""
    write_page("sun-marasovic", "Sun & Marasović 2021, run again", "sun_marasovic.py", body)


if __name__ == "__main__":
    main()
