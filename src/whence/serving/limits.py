"""How much one server does for its callers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Beyond these a request gets a 4xx answer (or 503) that says which limit it met."""

    body: int = 256 * 1024
    """Bytes of a request."""
    text: int = 20_000
    """Characters of a text."""
    tokens: int = 1024
    """Tokens of a text."""
    jobs: int = 8
    """Jobs that run or wait at once."""
    workers: int = 2
    """Jobs that run at once."""
    seconds: float = 300.0
    """How long one job may take."""
    traces: int = 16
    """Traces kept in memory; the one not used for longest goes first."""
    results: int = 512
    """Finished jobs that can still be asked for."""
