"""Runs over many texts as the page shows them: findings in words, charts and tables, the same for every kind of run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whence.errors import InputError
from whence.faithful.plausibility import MEASURES, of_run
from whence.faithful.result import Faithfulness
from whence.reporting.attention import json_value
from whence.surveys.card import badge_text, paragraph
from whence.surveys.figures import Figure, available, figure
from whence.surveys.result import Survey, read_survey

WORST = 10
FAILURES = 50
REMOVED = {"drop": "deleted", "mask": "masked"}
DIRECTIONS = ("most important first", "least important first")
RANDOM = "random"
SETTINGS = {
    "d_v": "size of a head's values", "texts": "hash of the texts", "weights": "hash of the weights",
    "configuration": "hash of the configuration", "tokenizer": "hash of the tokenizer", "shard_size": "texts in a file",
    "rows": "rows judged in a text", "probes": "directions per token", "units": "what is removed",
    "operators": "how it is removed", "random": "random orders", "perturbs": "methods that remove words themselves",
    "ceiling": "search for the best order", "foil": "against another class",
}  # fmt: skip
"""Settings whose own names say little."""


def runs_data(runs: Iterable[Faithfulness | Survey]) -> list[dict[str, Any]]:
    """Every run, each with a name of its own in the address of the page."""
    entries = [run_data(run) for run in runs]
    for number, one in enumerate(entries):
        if any(one["name"] == other["name"] for other in entries[:number]):
            one["name"] = f"{one['name']}-{number + 1}"
            one["title"] = f"{one['title']} {number + 1}"
    return entries


def read_run(path: str | os.PathLike[str]) -> Faithfulness | Survey:
    """What was kept: the folder of a survey, or the file of `whence.faithfulness(save=…)`."""
    if not Path(path).exists():
        raise InputError(
            f"{str(path)!r} is neither a survey's folder nor the file of a comparison: there is no such path."
        )
    return read_survey(path) if Path(path).is_dir() else Faithfulness.load(path)


def run_data(run: Faithfulness | Survey) -> dict[str, Any]:
    """One run: name, title, the question it answers, findings, cards."""
    if isinstance(run, Faithfulness):
        return faithfulness_data(run)
    if isinstance(run, Survey):
        return survey_data(run)
    raise InputError(
        "report takes what whence.trace gives for one text, or a run of whence.faithfulness or whence.survey, not a "
        f"{type(run).__name__}."
    )


# --- faithfulness ----------------------------------------------------------------------------------------------------


def faithfulness_data(result: Faithfulness) -> dict[str, Any]:
    """Verdict, table of methods, removal curves, the texts where the best method is worst, what was run."""
    cards = []
    if result.paired:
        cards = [_methods(result), *(curves_card(result, operator) for operator in result.operators), _worst(result)]
        cards += _plausible(result)
    settings = {**result.settings, "weights": result.identity.hashes.get("weights"), **result.identity.versions}
    return {
        "name": "faithfulness",
        "title": "Faithfulness",
        "about": "Which explanation is faithful?",
        "model": result.model,
        "context": f"{len(result.paired)} texts · {len(result.methods)} methods",
        "findings": list(result.verdict()),
        "cards": [*cards, _settings(settings)],
    }


def _methods(result: Faithfulness) -> dict[str, Any]:
    names = {"delta": "Δ", "low": "from", "high": "to", "comp": "comprehensiveness", "suff": "sufficiency",
             "flip": "share removed until it flips", "wins": "beats random on", "naopc": "NAOPC",
             "naopc_beam": "NAOPC, at most"}  # fmt: skip
    signed = {True: "yes", False: "no"}
    rows = [
        [row["method"], signed.get(row["signed"], ""), REMOVED.get(row["operator"], row["operator"])]
        + [json_value(float(row[name])) for name in names]
        for row in result.table().to_dict("records")
    ]
    note = (
        "Δ is the area between the two removal curves: 0 for a random order, larger is better; from–to is its 95 % interval "
        "over texts. Signed methods can say that a word speaks against the output; compare like with like. Comprehensiveness "
        "is how far the output falls when the most important words go (large is good), sufficiency when only they stay "
        "(small is good). NAOPC is 1 for the best of all orders and 0 for the worst (short texts, where every order is counted); "
        "“at most”: longer texts, where these two were only searched for."
    )
    return table_card("Every method", "methods", ["method", "signed", "words are", *names.values()], rows, note)


def curves_card(result: Faithfulness, operator: str) -> dict[str, Any]:
    """The mean output as words go, most and least important first, for each method and a random order."""
    frame = result.curves()
    frame = frame[frame["operator"] == operator]
    order = [m for m in result.table()["method"].unique() if m in set(frame["method"])]  # the best first
    lines = []
    for number, method in enumerate(order):
        for direction in DIRECTIONS:
            one = frame[(frame["method"] == method) & (frame["removed"] == direction)]
            line = {"name": method, "values": [json_value(float(v)) for v in one["output"]], "pair": number}
            lines.append({**line, "second": direction == DIRECTIONS[1], "published": method == RANDOM})
    watched = "logit(target) − logit(foil)" if result.settings.get("foil") else "p(target)"
    share = frame[frame["method"] == order[0]]["share"].unique()
    return {
        "kind": "chart",
        "id": f"curves-{operator}",
        "title": f"Removal curves, words {REMOVED.get(operator, operator)}",
        "note": "Solid: the most important words go first, low is good. Dashed: the least important go first, high is good.",
        "x": [f"{100 * s:.0f}" for s in share],
        "x_label": "words removed, %",
        "y_label": f"mean {watched}",
        "lines": lines,
        "least": json_value(float(frame["output"].min())) if result.settings.get("foil") else 0.0,
        "most": None,
    }


def _worst(result: Faithfulness) -> dict[str, Any]:
    best = next(m for m in result.table()["method"] if m != RANDOM)
    frame = result.per_text()
    mean = frame[frame["method"] == best].groupby(["number", "text"])["delta"].mean().sort_values().head(WORST)
    rows = [[int(number), str(text)[:300], json_value(float(delta))] for (number, text), delta in mean.items()]
    return table_card("Where the best method is worst", "worst", ["number", "text", f"Δ of {best}"], rows, wraps=True)


# --- surveys ---------------------------------------------------------------------------------------------------------


def _plausible(result: Faithfulness) -> list[dict[str, Any]]:
    """A card where the run has rationales."""
    found = of_run(result)
    if found is None:
        return []
    table = found.table().sort_values("ap", ascending=False)
    rows = [[str(r["method"]), *(float(r[name]) for name in MEASURES)] for r in table.to_dict("records")]
    note = (
        f"{len(found.numbers)} texts with marked and unmarked words. AP is average precision; F1 and IOU at the number of marked "
        "words; MRR the rank of the first. Chance is exact. Plausible is not faithful."
    )
    columns = ["method", "AP", "F1", "IOU", "MRR"]
    return [table_card("Would a person mark the same words?", "plausibility", columns, rows, note)]


def survey_data(survey: Survey) -> dict[str, Any]:
    """The paragraph of the model card, the figures, the verdict on every head, texts that failed, what was run."""
    settings = survey.settings
    cards = [_chart(name, figure(survey, name)) for name in available(survey)] if len(survey.heads) else []
    if "certain" in survey.heads.columns:
        cards.append(_heads(survey))
    failed = survey.failed[["text", "reason"]]
    if len(failed):
        note = f"The first {FAILURES} of {len(failed)}." if len(failed) > FAILURES else None
        rows = [[int(n), str(reason)] for n, reason in failed.head(FAILURES).itertuples(index=False)]
        cards.append(
            table_card(
                f"Texts that could not be measured: {len(failed)}", "failed", ["text", "reason"], rows, note, wraps=True
            )
        )
    run = {**settings, **survey.identity.hashes, **survey.identity.versions}
    return {
        "name": "survey",
        "title": "Survey",
        "about": "What holds on this corpus?",
        "model": settings["model"],
        "context": f"{settings['corpus']} · {len(survey.texts)} texts",
        "findings": [_sentence(badge_text(survey)), *_sentences(paragraph(survey))],
        "cards": [*cards, _settings(run)],
    }


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _sentences(text: str) -> list[str]:
    return [f"{one}." for one in text.removesuffix(".").split(". ")]


def _heads(survey: Survey) -> dict[str, Any]:
    frame = survey.verdict()
    rows = [[json_value(v) if isinstance(v, float) else _cell(v) for v in row] for row in frame.itertuples(index=False)]
    note = (
        f"Certain to ε = {survey.settings['epsilon']:g}. A head is to be read when at least 95 % of its rows that are "
        "neither unique nor flat are certain, not to be read below half; rows are pooled, intervals are over texts. "
        "Layers count from 0."
    )
    return table_card("May each head be read?", "heads", list(frame.columns), rows, note)


def _chart(name: str, drawn: Figure) -> dict[str, Any]:
    """Lines over one list of labels; a line without a point at a label has null there."""
    labels = list(dict.fromkeys(x for line in drawn.lines for x in line.x))
    labels = labels if any(isinstance(x, str) for x in labels) else sorted(labels)
    lines = []
    for line in drawn.lines:

        def spread(values: Sequence[float] | None, at: Sequence[Any] = line.x) -> list[float | None] | None:
            known = None if values is None else dict(zip(at, values, strict=True))
            return None if known is None else [json_value(float(known[x])) if x in known else None for x in labels]

        ends = {"low": spread(line.low), "high": spread(line.high)}
        about = {"pair": line.pair, "second": line.name.endswith("effective"), "published": line.published}
        lines.append({"name": line.name, "values": spread(line.y), **ends, **about})
    measured = any(line.low is not None for line in drawn.lines)
    return {
        "kind": "chart",
        "id": name,
        "title": drawn.title,
        "note": "Bands are 95 % intervals over texts." if measured else None,
        "x": [str(x) for x in labels],
        "x_label": drawn.x_label,
        "y_label": drawn.y_label,
        "lines": lines,
        "least": 0.0,
        "most": drawn.most,
    }


# --- cards -----------------------------------------------------------------------------------------------------------


def table_card(
    title: str, name: str, columns: list[str], rows: list[list[Any]], note: str | None = None, wraps: bool = False
) -> dict[str, Any]:
    """A card with a table; `wraps`: its texts may go over several lines."""
    return {"kind": "table", "id": name, "title": title, "note": note, "columns": columns, "rows": rows, "wraps": wraps}


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    rows = [[SETTINGS.get(str(name), str(name)), _plainly(value)] for name, value in settings.items()]
    return table_card("What was run", "settings", ["setting", "value"], rows, wraps=True)


def _plainly(value: Any) -> str:
    """A setting as a reader writes it: yes and no, lists with commas, a dash for what was left open."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_plainly(one)}" for name, one in value.items()) or "–"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(map(_plainly, value)) or "–"
    return str(value)


def _cell(value: Any) -> Any:
    return value if isinstance(value, (str, int)) and not isinstance(value, bool) else str(value)
