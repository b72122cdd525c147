"""A report of a run as one HTML file that needs nothing else: verdict, table, curves, worst texts."""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import TYPE_CHECKING

from whence.faithful.plot import COLOURS
from whence.results.files import write_atomically

if TYPE_CHECKING:
    from whence.faithful.result import Faithfulness

WIDTH, HEIGHT = 560, 300
WORST = 10
STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .7rem; text-align: right }
th:first-child, td:first-child { text-align: left }
tr { border-bottom: 1px solid #8884 }
.key span { display: inline-block; margin-right: 1rem }
.key i { display: inline-block; width: 1rem; height: .25rem; vertical-align: middle; margin-right: .3rem }
.text { text-align: left; max-width: 34rem }
svg text { font-size: 11px; fill: currentColor }
"""


def write_document(result: Faithfulness, path: str | os.PathLike[str]) -> Path:
    """Write the report of a run."""
    return write_atomically(path, document(result).encode())


def document(result: Faithfulness) -> str:
    """The report as HTML."""
    title = f"Which explanation is faithful? {result.model}, {len(result.paired)} texts"
    parts = [f"<h1>{html.escape(title)}</h1>", "<h2>Verdict</h2><ul>"]
    parts += [f"<li>{html.escape(sentence)}</li>" for sentence in result.verdict()]
    parts.append("</ul>")
    if result.paired:
        parts += ["<h2>Table</h2>", _table(result), "<h2>Removal curves</h2>"]
        parts += [_curves(result, operator) for operator in result.operators]
        parts += ["<h2>Where the best method is worst</h2>", _worst(result)]
    parts += ["<h2>What was run</h2>", _settings(result)]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


def _table(result: Faithfulness) -> str:
    names = {"delta": "Δ", "low": "from", "high": "to", "comp": "comp", "suff": "suff", "flip": "flip", "wins": "wins",
             "naopc": "NAOPC", "naopc_beam": "NAOPC, at most"}  # fmt: skip
    heads = "".join(f"<th>{name}</th>" for name in ("method", "signed", "removed by", *names.values()))
    rows = []
    for row in result.table().to_dict("records"):
        signed = {True: "yes", False: "no"}.get(row["signed"], "")
        numbers = "".join(f"<td>{row[k]:.3f}</td>" if row[k] == row[k] else "<td>–</td>" for k in names)
        rows.append(
            f"<tr><td>{html.escape(row['method'])}</td><td>{signed}</td><td>{row['operator']}</td>{numbers}</tr>"
        )
    said = "Δ is the area between the two removal curves: 0 for a random order, larger is better; from–to is its 95 % interval."
    return f"<p>{said}</p><table><tr>{heads}</tr>{''.join(rows)}</table>"


def _curves(result: Faithfulness, operator: str) -> str:
    frame = result.curves()
    frame = frame[frame["operator"] == operator]
    low, high = frame["output"].min(), frame["output"].max()
    lines, key = [], []
    for k, method in enumerate(frame["method"].unique()):
        colour = "#9a9ea6" if method == "random" else COLOURS[k % len(COLOURS)]
        key.append(f'<span><i style="background:{colour}"></i>{html.escape(method)}</span>')
        for direction, dash in (("most important first", ""), ("least important first", ' stroke-dasharray="4 3"')):
            one = frame[(frame["method"] == method) & (frame["removed"] == direction)]
            points = " ".join(
                f"{40 + s * (WIDTH - 50):.1f},{10 + (high - o) / max(high - low, 1e-9) * (HEIGHT - 40):.1f}"
                for s, o in zip(one["share"], one["output"], strict=True)
            )
            lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>')
    marks = "".join(
        f'<text x="2" y="{14 + (high - v) / max(high - low, 1e-9) * (HEIGHT - 40):.0f}">{v:.2f}</text>'
        for v in (low, (low + high) / 2, high)
    )
    below = f'<text x="{WIDTH // 2}" y="{HEIGHT - 4}" text-anchor="middle">share of units removed ({operator})</text>'
    drawn = "".join(lines) + marks + below
    picture = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="removal curves">{drawn}</svg>'
    )
    said = "Solid: most important units first (low is good). Dashed: least important first (high is good)."
    return f'<figure>{picture}<figcaption class="key">{"".join(key)}<br>{said}</figcaption></figure>'


def _worst(result: Faithfulness) -> str:
    best = next(m for m in result.table()["method"] if m != "random")
    frame = result.per_text()
    mean = frame[frame["method"] == best].groupby(["number", "text"])["delta"].mean().sort_values().head(WORST)
    rows = "".join(
        f"<tr><td class=text>{html.escape(text[:300])}</td><td>{d:.3f}</td></tr>" for (_, text), d in mean.items()
    )
    return f"<table><tr><th>text</th><th>Δ of {html.escape(best)}</th></tr>{rows}</table>"


def _settings(result: Faithfulness) -> str:
    rows = {**result.settings, "weights": result.identity.hashes.get("weights"), **result.identity.versions}
    lines = "".join(
        f"<tr><td>{html.escape(str(k))}</td><td class=text>{html.escape(str(v))}</td></tr>" for k, v in rows.items()
    )
    return f"<table>{lines}</table>"
