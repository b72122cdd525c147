"""The page in one file: its modules, its style and its data, with nothing left to fetch.

A file opened from disk cannot import modules, so they are wrapped into one script: each module becomes a function
that returns what it exports. A Content-Security-Policy with the script's own hash allows that script alone to run and
nothing at all to be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from functools import lru_cache
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any

from whence.reporting.document import Document

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w/.-]+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?:async )?(?:function\*?|const|let|class) (\w+)", re.MULTILINE)
MAIN = "main"


def source(name: str) -> str:
    """The text of one file of the page."""
    return (files("whence") / "page" / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def bundled_script() -> str:
    """All modules as one script, each after those that it imports."""
    order: list[str] = []
    _visit(MAIN, order, ())
    return '"use strict";\n' + "\n".join(_wrapped(name) for name in order)


def _visit(name: str, order: list[str], above: tuple[str, ...]) -> None:
    if name in above:
        raise RuntimeError(f"the page's modules import each other in a circle: {' → '.join((*above, name))}")
    if name in order:
        return
    for _, path in _IMPORT.findall(source(f"{name}.js")):
        _visit(_resolved(name, path), order, (*above, name))
    order.append(name)


def _resolved(name: str, path: str) -> str:
    return str(PurePosixPath(name).parent / path).removeprefix("./")


def _variable(name: str) -> str:
    return "_" + re.sub(r"\W", "_", name)


def _wrapped(name: str) -> str:
    text = source(f"{name}.js")
    exports = _EXPORT.findall(text)

    def bind(match: re.Match[str]) -> str:
        return f"const {{{match[1]}}} = {_variable(_resolved(name, match[2]))};\n"

    body = _IMPORT.sub(bind, text)
    body = re.sub(r"^export ", "", body, flags=re.MULTILINE)
    return f"const {_variable(name)} = (() => {{\n{body}\nreturn {{{', '.join(exports)}}};\n}})();"


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def _inside_script(text: str) -> str:
    """Text that cannot end the script element it stands in, nor open a comment there."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def policy_of(script: str) -> str:
    """The Content-Security-Policy that lets this script run, and nothing be fetched."""
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; form-action 'none'; base-uri 'none'"
    )


def safe_json(data: Any) -> str:
    """JSON that can stand in a script element."""
    return _inside_script(json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False))


def title_of(document: Document) -> str:
    """The beginning of the text, and the model."""
    text = " ".join(str(document.manifest.get("text") or "").split())
    return f"{text[:60]}{'…' if len(text) > 60 else ''} · {document.manifest['model']} · whence"


def standalone(document: Document) -> str:
    """One HTML file that needs nothing else."""
    script, style = bundled_script(), source("style.css")
    if "</script" in script.lower() or "</style" in style.lower():
        raise RuntimeError("the page's own sources may not contain a closing script or style tag.")
    policy, manifest = policy_of(script), safe_json(document.manifest)
    blocks = "\n".join(
        f'<script type="text/plain" data-block="{html.escape(key)}">{base64.b64encode(block).decode()}</script>'
        for key, block in document.blocks.items()
    )
    return (
        "<!doctype html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{html.escape(title_of(document))}</title>\n"
        f"<style>{style}</style>\n</head>\n<body>\n"
        '<div id="whence"><noscript>This report draws itself with a script that it carries; allow scripts to see it.'
        "</noscript></div>\n"
        f'<script type="application/json" id="whence-manifest">{manifest}</script>\n'
        f"{blocks}\n"
        f'<script type="module">{script}</script>\n'
        "</body>\n</html>\n"
    )
