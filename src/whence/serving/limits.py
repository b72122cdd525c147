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
    truncate: bool = False
    """Cut a text that is longer than the model reads; else it is refused."""
    jobs: int = 8
    """Jobs that run or wait at once."""
    client_jobs: int = 6
    """Those of one client (an address) among them: there is always room for another client's."""
    workers: int = 2
    """Jobs that run at once."""
    seconds: float = 300.0
    """How long one job may take."""
    trace_bytes: int = 1 << 30
    """Bytes of traces kept in memory, with their blocks; the one not used for longest goes first."""
    results: int = 512
    """Finished jobs that can still be asked for."""
    result_bytes: int = 64 << 20
    """Bytes of their results."""
    arrival: float = 20.0
    """Seconds that a request may take to arrive, headers and body."""
    waiting: int = 256
    """Connections of one client that have not sent a whole request; beyond it the oldest is closed."""
    client_connections: int = 512
    """Connections of one client, half of what the server takes; beyond it one that waits is closed, or else the newest."""
