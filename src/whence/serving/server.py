"""Running the application: one socket, structured logs, and an end that lets open answers finish."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
import uvicorn

from whence.faithful.result import Faithfulness
from whence.model.load import Model, load
from whence.serving.app import create_app
from whence.serving.connections import patient_protocol
from whence.serving.limits import Limits
from whence.serving.logs import start_logging
from whence.surveys.result import Survey

GRACE = 3  # seconds that open answers get when the server stops


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` and `port`; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def run(
    models: Sequence[str], at: socket.socket, *, limits: Limits | None = None, hosts: frozenset[str] = frozenset(),
    any_address: bool = False, token: str | None = None, runs: Sequence[Faithfulness | Survey] = (),
    load: Callable[[str], Model] = load, pair: str | None = None, quiet: bool = False,
) -> None:  # fmt: skip
    """Serve until interrupted; streams end at once, other answers within a few seconds, jobs are not waited for."""
    start_logging(quiet=quiet)
    bounds = limits or Limits()
    # Jobs run side by side: together they take the cores once, not each of them all of them.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // bounds.workers))
    holder: list[uvicorn.Server] = []
    names = frozenset(_bracketed(host) for host in hosts)
    app = create_app(
        models, limits=bounds, hosts=names, any_address=any_address, token=token, runs=runs, load=load, pair=pair,
        stopping=lambda: bool(holder and holder[0].should_exit),
    )  # fmt: skip
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=GRACE,
        # Longer than clients keep an idle connection (5 s in httpx): else both ends close at once and a request is lost.
        timeout_keep_alive=round(bounds.arrival),
        server_header=False,
        http=patient_protocol(bounds),
        ws="none",
        h11_max_incomplete_event_size=16 * 1024,
        limit_concurrency=1024,
        backlog=1024,
    )
    holder.append(uvicorn.Server(config))
    with suppress(KeyboardInterrupt):  # uvicorn raises the signal again when everything is closed
        holder[0].run(sockets=[at])
    if app.state.jobs.waiting:
        # A job's thread may be in the middle of a long computation, and Python would wait for its end.
        logging.shutdown()
        os._exit(0)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
