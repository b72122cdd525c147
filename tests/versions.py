"""Which versions the tests run on: the locked ones, whose every word is tested, or the lowest that are allowed."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

LOCK = Path(__file__).parents[1] / "requirements.lock"


@cache
def older_than_locked(package: str) -> bool:
    """Whether the installed package is older than the one that requirements.lock names."""
    locked = re.search(rf"^{re.escape(package)}==(\S+)", LOCK.read_text(), re.MULTILINE)
    assert locked is not None, f"requirements.lock has no {package}"
    return Version(version(package)) < Version(locked[1])
