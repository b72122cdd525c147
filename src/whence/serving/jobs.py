"""Long work as jobs: queued, run by a few threads, watched, cancelled, and never computed twice for the same content."""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from whence.errors import WhenceError
from whence.results.progress import Step
from whence.serving.limits import Limits

log = logging.getLogger("whence.serving")

FINISHED = ("done", "failed", "cancelled")

Work = Callable[[Step], Any]


CLIENT: ContextVar[str] = ContextVar("whence-client", default="")
"""The address that the request under way came from; "": not from a network."""


class Full(Exception):
    """As many jobs as the server takes are running or waiting, or as many as it takes of one client."""


class _Stopped(Exception):
    """Raised inside a job's thread, at its next step, when it was cancelled or ran out of time."""


@dataclass
class Job:
    """One piece of work; `state` is queued, running, done, failed or cancelled."""

    id: str
    kind: str
    client: str = ""
    state: str = "queued"
    progress: float = 0.0
    message: str = "Waiting"
    result: Any = None
    error: str | None = None
    size: int = 0  # bytes of the result as JSON
    cancelled: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def finished(self) -> bool:
        return self.state in FINISHED

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "kind": self.kind,
            "state": self.state,
            "progress": self.progress,
            "message": self.message,
            "result": self.result,
            "error": self.error,
        }


class Jobs:
    """The jobs of one server. The same key gets the same job while it runs and its result afterwards."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._by_key: dict[str, str] = {}
        self._pool = ThreadPoolExecutor(limits.workers, thread_name_prefix="whence-job")

    def submit(self, kind: str, key: str, work: Work) -> Job:
        """The job of this key: the one that is there, or a new one. `Full` where no more are taken."""
        with self._lock:
            known = self._jobs.get(self._by_key.get(key, ""))
            if known is not None and known.state not in ("failed", "cancelled"):
                self._jobs.move_to_end(known.id)
                return known
            client = CLIENT.get()
            under_way = [job.client for job in self._jobs.values() if not job.finished]
            if len(under_way) >= self.limits.jobs:
                raise Full(f"This server is busy with {self.limits.jobs} jobs")
            if client and under_way.count(client) >= self.limits.client_jobs:
                raise Full(f"This server does {self.limits.client_jobs} jobs of one client at once")
            job = Job(uuid.uuid4().hex, kind, client)
            self._jobs[job.id] = job
            self._by_key[key] = job.id
            self._trim()
        self._pool.submit(self._run, job, work)
        return job

    def _trim(self) -> None:
        """Let the oldest finished jobs go while there are too many, or their results are too large."""
        total = sum(job.size for job in self._jobs.values())
        for job in [j for j in self._jobs.values() if j.finished]:
            if len(self._jobs) <= self.limits.results and total <= self.limits.result_bytes:
                break
            total -= job.size
            del self._jobs[job.id]
        self._by_key = {key: i for key, i in self._by_key.items() if i in self._jobs}

    def get(self, job_id: str) -> Job | None:
        with self._lock:
            return self._jobs.get(job_id)

    def forget_finished(self, key: str) -> None:
        """Compute this key again when it is asked for next, unless it is being computed now."""
        with self._lock:
            known = self._jobs.get(self._by_key.get(key, ""))
            if known is not None and known.finished:
                del self._by_key[key]

    def cancel(self, job: Job) -> None:
        """Stop it at its next step; one that has not begun never does."""
        job.cancelled.set()
        if job.state == "queued":
            job.state, job.message = "cancelled", "Cancelled"

    def _run(self, job: Job, work: Work) -> None:
        if job.cancelled.is_set():
            job.state, job.message = "cancelled", "Cancelled"
            return
        begin = time.monotonic()

        def step(what: str, done: float, total: float = 1.0, /) -> None:
            job.message, job.progress = what, min(max(done / total, 0.0), 1.0)
            if job.cancelled.is_set():
                raise _Stopped("Cancelled")
            if time.monotonic() - begin > self.limits.seconds:
                raise _Stopped(f"It took longer than {self.limits.seconds:g} s, which is the limit of this server.")

        job.state, job.message = "running", "Working"
        try:
            job.result = work(step)
            job.size = len(json.dumps(job.result))
            job.progress, job.message, job.state = 1.0, "Done", "done"
        except _Stopped as stopped:
            job.error = str(stopped)
            job.state = "cancelled" if job.cancelled.is_set() else "failed"
            job.message = str(stopped)
        except WhenceError as problem:
            job.error, job.message, job.state = str(problem), "Failed", "failed"
        except Exception:  # a job must end as failed whatever happens in it; the log has the traceback
            log.exception("job failed", extra={"data": {"job": job.id, "kind": job.kind}})
            job.error, job.message, job.state = (
                "It failed in an unexpected way; the server's log says how.",
                "Failed",
                "failed",
            )
        taken = round(time.monotonic() - begin, 3)
        log.info("job", extra={"data": {"job": job.id, "kind": job.kind, "state": job.state, "seconds": taken}})

    @property
    def waiting(self) -> int:
        with self._lock:
            return sum(not job.finished for job in self._jobs.values())

    def close(self) -> None:
        """Cancel what runs, take nothing more. A job ends at its next step, which may be a while."""
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            if not job.finished:
                self.cancel(job)
        self._pool.shutdown(wait=False, cancel_futures=True)
