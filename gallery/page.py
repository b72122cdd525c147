"""What the pages share: where they go, tables, pictures and the command that shows the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "gallery"
LETTERS = {"certified": "C", "refuted": "R", "open": "O"}


def write(name: str, title: str, *parts: str) -> Path:
    """One page; parts are paragraphs."""
    path = FOLDER / f"{name}.md"
    FOLDER.mkdir(parents=True, exist_ok=True)
    note = f"<!-- Made by: python -m gallery {name}. Do not edit by hand. -->"
    path.write_text(
        "\n\n".join([f"# {title}", note, *(p.strip() for p in parts if p.strip())]) + "\n", encoding="utf-8"
    )
    return path


def table(head: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell).replace("|", r"\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def picture(name: str, axes: Any, alt: str) -> str:
    """The figure of some Axes as a file beside the page, and the line that shows it."""
    import matplotlib as mpl

    FOLDER.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": name}):  # the same numbers, the same bytes
        axes.figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
    return f"![{alt}]({name}.svg)"


def command(text: str, needs: str | None = None, *, installs: str | None = None) -> str:
    """A command to copy; the tests of the documentation run it where the model that it needs is there.

    `installs`: it is not run, for it installs that.
    """
    note = f"needs: {needs}" if installs is None else f"not run: installs {installs}"
    return f"<!-- {note} -->\n```sh\n{text}\n```"
