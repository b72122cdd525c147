"""The code blocks of a Markdown page, and how what they print is compared with what the page shows.

A `python` block is run; those of one page share their names, in the order of the page. A `text` block that follows
it shows what it prints. A `sh` block is run too. Before a block may stand `<!-- not run: installs … -->` (only what
installs or sets up the machine is not run) or `<!-- needs: NAME -->`, an embedded model that `whence get` fetches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]+?) -->\n+|<!-- needs: (?P<needs>[^\n]+?) -->\n+)?"
    r"^(?P<fence>```+)(?P<kind>\w*)[^\n]*\n(?P<code>.*?)^(?P=fence)\s*?$",
    re.MULTILINE | re.DOTALL,
)
_NUMBER = re.compile(r"[-+−]?(?:\d+\.\d*|\.\d+|\d+)(?:e[-+]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Snippet:
    """One block: its code, what it should print (None: not shown), why it is not run (None: it is), the model it needs."""

    kind: str
    code: str
    line: int
    printed: str | None
    reason: str | None
    needs: str | None = None


def snippets(page: Path) -> list[Snippet]:
    """Every block of the page that is Python or shell, with the output shown after it."""
    text = page.read_text()
    blocks = list(_BLOCK.finditer(text))
    found = []
    for i, block in enumerate(blocks):
        if block["kind"] not in ("python", "sh", "bash", "console", "shell", "py"):
            continue
        following = blocks[i + 1] if i + 1 < len(blocks) else None
        adjacent = following is not None and not text[block.end() : following.start()].strip()
        shown = following["code"] if following is not None and adjacent and following["kind"] == "text" else None
        line = text.count("\n", 0, block.start()) + 1
        found.append(Snippet(block["kind"], block["code"], line, shown, block["reason"], block["needs"]))
    return found


def differs(printed: str, shown: str) -> str | None:
    """Where the two differ, or None. "…" alone on a line stands for any lines.

    Words must be the same. Numbers may differ by two units of the last digit shown; where both are below 1e-4 they are
    rounding errors, and only have to be that small.
    """
    chunks = re.split(r"^\s*…\s*$", shown, flags=re.MULTILINE)
    ours = printed.split()
    start = 0
    for number, chunk in enumerate(chunks):
        words = chunk.split()
        if not words:
            continue
        places = range(start, len(ours) - len(words) + 1) if number else [start]
        at = next((p for p in places if all(map(_alike, ours[p : p + len(words)], words))), None)
        if at is None or len(ours) < at + len(words):
            return f"the page shows\n{chunk.strip()}\nand it printed\n{printed.strip()}"
        start = at + len(words)
    if not shown.rstrip().endswith("…") and start != len(ours):
        return f"it printed more than the page shows: {' '.join(ours[start:])[:300]}"
    return None


def _alike(ours: str, shown: str) -> bool:
    if _NUMBER.sub("#", ours) != _NUMBER.sub("#", shown):
        return False
    return all(map(_close, _NUMBER.findall(ours), _NUMBER.findall(shown)))


def _close(ours: str, shown: str) -> bool:
    a, b = (float(n.replace("−", "-")) for n in (ours, shown))
    if a == b or max(abs(a), abs(b)) < 1e-4:
        return True
    if "." not in shown:
        return False
    digits = len(shown.lower().partition("e")[0].partition(".")[2])
    exponent = int(shown.lower().partition("e")[2] or 0)
    return abs(a - b) <= 2.001 * 10.0 ** (exponent - digits)
