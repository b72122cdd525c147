"""The examples of docstrings as code: without this, `>>>` would be read as a quotation and `[1][2]` as a link."""

from __future__ import annotations

from typing import Any

import griffe


def fenced(text: str) -> str:
    """Put each run of lines that begins with >>> and goes on to an empty line into a fence of its own."""
    out: list[str] = []
    inside = False
    for line in [*text.split("\n"), ""]:
        if not inside and line.lstrip().startswith(">>>"):
            inside = True
            out += ["", f"{line[: len(line) - len(line.lstrip())]}```pycon"]
        elif inside and not line.strip():
            inside = False
            out.append("```")
        out.append(line)
    return "\n".join(out[:-1] if out[-1] == "" else out)


class Examples(griffe.Extension):
    """Rewrites docstrings as they are collected."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Any module, class, function or attribute."""
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)
