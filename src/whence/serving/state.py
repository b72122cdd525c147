"""What the requests of one server share: its models, traces and jobs, and how a request asks for work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException

from whence.serving.jobs import Full, Job, Jobs
from whence.serving.limits import Limits
from whence.serving.shelf import Entry, Shelf, Traces, content_key


@dataclass(frozen=True)
class ServerState:
    """One server's memory. `stopping` tells streams that the server wants to end."""

    shelf: Shelf
    traces: Traces
    jobs: Jobs
    limits: Limits
    stopping: Callable[[], bool] = lambda: False
    runs: Sequence[dict[str, Any]] = ()
    pair: str | None = None  # the second text that the page begins with

    def entry(self, trace: str) -> Entry:
        """The trace of that key, or a 404."""
        entry = self.traces.get(trace)
        if entry is None:
            raise HTTPException(404, "There is no such trace, or no longer: ask for its text again.")
        return entry

    def job(self, job: str) -> Job:
        """The job of that id, or a 404."""
        known = self.jobs.get(job)
        if known is None:
            raise HTTPException(404, "There is no such job, or no longer.")
        return known

    def submit(self, kind: str, key: str, function: Callable[[Any], Any]) -> dict[str, Any]:
        """The job of that key, begun now if there is none; a 429 where the server has enough to do."""
        try:
            return self.jobs.submit(kind, key, function).to_dict()
        except Full as full:
            raise HTTPException(429, f"{full}: ask again in a moment.", {"Retry-After": "2"}) from None

    def measure(
        self, kind: str, trace: str, request: Any, function: Callable[[Shelf, Entry, Any, Any], Any]
    ) -> dict[str, Any]:
        """A job on a trace. The entry's serial number is part of its key: what was computed on a trace that has gone
        from memory since (its blocks have gone with it) is computed again."""
        entry = self.entry(trace)
        key = content_key(kind, trace, entry.serial, request.model_dump())

        def work(step: Any) -> Any:
            result = function(self.shelf, entry, request, step)
            self.traces.trim()  # the measure may have added blocks to the trace
            return result

        return self.submit(kind, key, work)
