"""What the documentation says of methods and papers, made from the method table: `python scripts/method_docs.py [--check]`.

Each page keeps its made part between two marks; a test compares the pages with what is made here.
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from whence.method_table import COSTS, DETERMINED, QUESTIONS, methods

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "made from the method table by scripts/method_docs.py: begin", "made from the method table: end"


@dataclass(frozen=True)
class Paper:
    """One paper of docs/papers.toml. `authors`: "Given Family; …", in the paper's order."""

    name: str
    authors: str
    title: str
    venue: str
    url: str

    @property
    def year(self) -> int:
        return int(self.name[-4:])


PAPERS = {name: Paper(name, **about) for name, about in tomllib.loads((ROOT / "docs/papers.toml").read_text()).items()}


def own() -> list:
    """whence's own entries, in the table's order; what other packages added is not ours to document."""
    return [m for m in methods() if m.location.startswith("whence.")]


def tables() -> str:
    """Every method, question by question: for docs/methods.md."""
    parts = []
    for question, words in QUESTIONS.items():
        lines = [
            f"### {words}",
            "",
            "| method | what it gives | source | cost | needs | options |",
            "|---|---|---|---|---|---|",
        ]
        for m in own():
            if m.question == question:
                cells = (
                    f"`{m.name}`",
                    m.summary,
                    m.paper,
                    m.cost,
                    ", ".join(m.needs) or "a trace",
                    ", ".join(m.options) or "–",
                )
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("\n".join(lines))
    parts.append("Costs: " + "; ".join(f"*{name}*: {words}" for name, words in COSTS.items()) + ".")
    kinds = {
        kind: [f"`{m.name}`" for m in own() if m.determined == kind and m.gives != "measure"]
        for kind in DETERMINED
        if kind
    }
    parts.append("\n".join(f"- {DETERMINED[kind]}: {', '.join(names)}." for kind, names in kinds.items()))
    return "\n\n".join(parts)


def behind(paper: Paper) -> str:
    """The methods that rest on a paper."""
    return ", ".join(f"`{m.name}`" for m in own() if paper.name in m.papers)


def citations() -> str:
    """The reference list of the README."""
    return "\n".join(f"- [{p.name}]({p.url}), *{p.title}* ({p.venue}): {behind(p)}." for p in PAPERS.values())


def reference() -> str:
    """The reference page of the objects behind the table."""
    return "\n".join(f"::: {m.location.replace(':', '.')}" for m in own())


def cff() -> str:
    """The references of CITATION.cff."""
    lines = ["references:"]
    for p in PAPERS.values():
        lines += [
            "  - type: conference-paper" if p.venue != "arXiv" else "  - type: article",
            f'    title: "{p.title}"',
            "    authors:",
        ]
        for name in p.authors.split("; "):
            given, _, family = name.rpartition(" ")
            lines.append(f"      - {{family-names: {family}, given-names: {given}}}")
        lines += [
            f"    year: {p.year}",
            f"    {'conference: {name: ' + p.venue + '}' if p.venue != 'arXiv' else 'journal: arXiv'}",
        ]
        lines.append(f'    url: "{p.url}"')
    return "\n".join(lines)


PAGES = {
    "docs/methods.md": ("<!-- {} -->", tables),
    "README.md": ("<!-- {} -->", citations),
    "docs/reference/methods.md": ("<!-- {} -->", reference),
    "CITATION.cff": ("# {}", cff),
}


def made(page: str) -> tuple[str, str]:
    """The page as it is, and as it should be."""
    mark, content = PAGES[page]
    text = (ROOT / page).read_text()
    head, begin, rest = text.partition(mark.format(BEGIN))
    _, end, tail = rest.partition(mark.format(END))
    if not begin or not end:
        raise SystemExit(
            f"{page} has no part for the method table: two lines, {mark.format(BEGIN)} and {mark.format(END)}."
        )
    return text, f"{head}{begin}\n{content()}\n{end}{tail}"


def main() -> int:
    stale = 0
    for page in PAGES:
        before, after = made(page)
        if before != after:
            stale += 1
            print(f"{page} differs from the method table" if "--check" in sys.argv else f"{page} written")
            if "--check" not in sys.argv:
                (ROOT / page).write_text(after)
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
