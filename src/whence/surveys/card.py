"""What a survey says in a model card: the facts, one paragraph, and a badge."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from whence.attention.verdict import VERDICTS

if TYPE_CHECKING:
    from whence.surveys.result import Survey


def facts(survey: Survey) -> dict[str, Any]:
    """Plain numbers: the run, how many texts failed, certainty by length, verdicts on heads, and the means by layer."""
    settings, texts = survey.settings, survey.texts
    facts: dict[str, Any] = {
        "model": settings["model"],
        "corpus": settings["corpus"],
        "texts": len(texts),
        "measured": int(texts["reason"].isna().sum()),
        "failed": len(survey.failed),
        "truncated": int(texts["truncated"].sum()),
        "complete": survey.complete,
        "d_v": settings["d_v"],
        "weights": survey.identity.hashes.get("weights"),
        "texts_hash": survey.identity.hashes.get("texts"),
        "settings": settings,
    }
    if not facts["measured"]:
        return facts
    if "certain" in survey.heads.columns:
        facts["unique_up_to"] = unique_up_to(survey)
        facts["certain_by_length"] = survey.certain("group").to_dict("records")
        verdicts = survey.verdict()["verdict"].value_counts()
        facts["heads"] = {name: int(verdicts.get(name, 0)) for name in VERDICTS}
    if "alti_own" in survey.layers.columns:
        facts["own_share"] = survey.mean("alti_own", "layer").to_dict("records")
        facts["not_largest"] = survey.share_of_tokens("alti_beaten").to_dict("records")
    return facts


def unique_up_to(survey: Survey) -> int | None:
    """The largest length up to which every row of every head of every text was unique; None: not even the shortest."""
    each = survey.heads.groupby("length")["rows"].sum().sort_index()
    loose = each.index[each > 0]
    short = each.index if not len(loose) else each.index[each.index < loose[0]]
    return int(short.max()) if len(short) else None


def paragraph(survey: Survey) -> str:
    """The paragraph that `--card` writes."""
    found = facts(survey)
    name, corpus = found["model"], found["corpus"]
    parts = [
        f"Attention of {name} on {corpus} ({found['measured']} of {found['texts']} texts measured"
        + (f", {found['truncated']} cut to fit" if found["truncated"] else "")
        + ("" if found["complete"] else ", survey not finished")
        + f"), heads of {found['d_v']}."
    ]
    if "heads" not in found:
        return parts[0] + " Whether rows are certain was not measured."
    up_to = found["unique_up_to"]
    parts.append(
        f"Every row was unique up to {up_to} tokens." if up_to else "Not even the shortest text had only unique rows."
    )
    epsilon = found["settings"]["epsilon"]
    for row in found["certain_by_length"]:
        interval = f", 95 % interval {row['low']:.0%} to {row['high']:.0%}" if row["low"] == row["low"] else ""
        if row["share"] == row["share"]:
            parts.append(
                f"At {row['group']} tokens {row['share']:.1%} of readings were unique or certain to {epsilon:g} "
                f"({row['texts']} texts{interval})."
            )
    told = ", ".join(f"{number} {verdict}" for verdict, number in found["heads"].items() if number)
    parts.append(f"Heads by verdict over the corpus: {told}.")
    return " ".join(parts)


def badge_text(survey: Survey) -> str:
    """One line: heads of 32: unique up to 33 tokens; at 65–128 tokens 40 % of readings certain on CORPUS (n texts)."""
    found = facts(survey)
    begin = f"heads of {found['d_v']}"
    if "heads" not in found:
        return f"{begin}: certainty not measured on {found['corpus']}"
    up_to = found["unique_up_to"]
    said = f"{begin}: unique up to {up_to} tokens" if up_to else f"{begin}: never unique"
    loose = [row for row in found["certain_by_length"] if row["share"] == row["share"]]
    near = next((row for row in loose if row["group"] == "65–128"), loose[-1] if loose else None)
    if near is None:
        return said
    return (
        f"{said}; at {near['group']} tokens {near['share']:.0%} of readings certain on {found['corpus']} "
        f"({near['texts']} texts)"
    )


def badge(survey: Survey) -> str:
    """The badge as SVG."""
    text = badge_text(survey)
    left, width = 74, 90 + 6 * len(text)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{html.escape(text)}">'
        f'<rect width="{left}" height="20" fill="#444"/><rect x="{left}" width="{width - left}" height="20" fill="#2a6f97"/>'
        f'<g fill="#fff" font-family="sans-serif" font-size="11"><text x="8" y="14">attention</text>'
        f'<text x="{left + 8}" y="14">{html.escape(text)}</text></g></svg>'
    )
