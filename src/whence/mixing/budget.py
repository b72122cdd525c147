"""Memory that a measure may use at once, as people write it: "2GB", "500 MB", or a number of bytes."""

from __future__ import annotations

import re

from whence.errors import InputError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def as_bytes(memory: str | float) -> int:
    """
    >>> as_bytes("2GB")
    2000000000
    """
    if isinstance(memory, str):
        found = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", memory)
        if found is None or found[2].lower() not in _UNITS:
            raise InputError(f"memory={memory!r} is not an amount of memory; write it as '2GB' or '500MB'.")
        memory = float(found[1]) * _UNITS[found[2].lower()]
    if not memory >= 10**6:
        raise InputError(f"memory={memory!r} is less than 1 MB, too little to work in.")
    return int(memory)
