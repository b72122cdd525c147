"""A survey as one HTML page that needs nothing else: the paragraph, the figures, verdicts, failures, what was run."""

from __future__ import annotations

import html
import importlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence.results.files import write_atomically
from whence.results.plotting import new_axes
from whence.surveys.card import badge, paragraph
from whence.surveys.figures import available

if TYPE_CHECKING:
    from whence.surveys.result import Survey

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .7rem; text-align: left; border-bottom: 1px solid #8884 }
figure { display: inline-block; margin: .5rem; background: #fff }
"""
FAILURES = 50


def write_document(survey: Survey, path: str | os.PathLike[str]) -> Path:
    """Write the report of a survey."""
    return write_atomically(path, document(survey).encode())


def document(survey: Survey) -> str:
    """The report as HTML."""
    title = f"{survey.settings['model']} on {survey.settings['corpus']}: {len(survey.texts)} texts"
    parts = [f"<h1>{html.escape(title)}</h1>", badge(survey), f"<p>{html.escape(paragraph(survey))}</p>"]
    parts += [f"<figure>{_picture(survey, name)}</figure>" for name in available(survey)]
    if "certain" in survey.heads.columns:
        epsilon = survey.settings["epsilon"]
        parts.append(
            f"<h2>May each head be read?</h2><p>Certain to {epsilon:g}; rows pooled, intervals over texts.</p>"
        )
        parts.append(_table(survey.verdict().round(3).to_dict("records")))
    failed = survey.failed[["text", "reason"]]
    parts.append(f"<h2>Texts that could not be measured: {len(failed)}</h2>")
    if len(failed):
        more = f"<p>The first {FAILURES} of them.</p>" if len(failed) > FAILURES else ""
        parts.append(more + _table(failed.head(FAILURES).to_dict("records")))
    run = {**survey.settings, **survey.identity.hashes, **survey.identity.versions}
    parts += ["<h2>What was run</h2>", _table([{"setting": k, "value": v} for k, v in run.items()])]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


def _picture(survey: Survey, name: str) -> str:
    ax = new_axes((5.6, 3.6))
    mpl = importlib.import_module("matplotlib")
    with mpl.rc_context({"svg.hashsalt": "whence", "svg.fonttype": "none"}):  # the same survey gives the same page
        survey.plot(name, ax=ax)
        drawn = io.StringIO()
        ax.figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


def _table(rows: Sequence[Mapping[Any, Any]]) -> str:
    if not rows:
        return ""
    heads = "".join(f"<th>{html.escape(str(name))}</th>" for name in rows[0])
    lines = ("".join(f"<td>{html.escape(str(value))}</td>" for value in row.values()) for row in rows)
    return f"<table><tr>{heads}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
