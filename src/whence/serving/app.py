"""The server as an application: the page, its data, and the measures as jobs."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from whence import __version__
from whence.errors import InputError, MissingExtraError
from whence.faithful.result import Faithfulness
from whence.model.load import Model, load
from whence.reporting.runs import runs_data
from whence.serving.jobs import Jobs
from whence.serving.limits import Limits
from whence.serving.shelf import Shelf, Traces
from whence.surveys.result import Survey

try:
    from fastapi import FastAPI, Request, Response
    from fastapi.exceptions import RequestValidationError

    from whence.serving import routes
    from whence.serving.guard import Guard
    from whence.serving.state import ServerState
except ImportError as missing:  # pragma: no cover - the message is all there is to it
    raise MissingExtraError("the server needs FastAPI: pip install 'whence[web]'.") from missing

log = logging.getLogger("whence.serving")

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


def create_app(
    models: Sequence[str | Model] = ("minilm",),
    *,
    limits: Limits | None = None,
    hosts: frozenset[str] = frozenset(),
    any_address: bool = False,
    token: str | None = None,
    runs: Iterable[Faithfulness | Survey] = (),
    load: Callable[[str], Model] = load,
    pair: str | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> FastAPI:
    """The application. `models`: the only ones that can be asked. `hosts`: names it answers to, besides loopback's.

    `any_address`: it also answers to numeric addresses (they cannot be rebound as names can). `token`: what every
    request must carry. `runs`: surveys and comparisons of explanations that it shows. `load`: how a model is loaded by
    its name. `pair`: the second text that the page begins with. `stopping`: tells streams that the server wants to end.
    """
    bounds = limits or Limits()
    state = ServerState(
        Shelf(models, load), Traces(bounds.trace_bytes), Jobs(bounds), bounds, stopping, runs_data(runs), pair
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        log.info("started", extra={"data": {"models": state.shelf.names}})
        yield
        state.jobs.close()
        log.info("stopped")

    app = FastAPI(title="whence", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.jobs, app.state.shelf, app.state.traces = state.jobs, state.shelf, state.traces
    app.add_exception_handler(InputError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.include_router(routes.page_routes())
    for made in (routes.status_routes, routes.trace_routes, routes.measure_routes, routes.job_routes):
        app.include_router(made(state))
    app.add_middleware(Guard, hosts=LOOPBACK | hosts, limits=bounds, any_address=any_address, token=token)
    return app


async def _refused(_: Request, problem: Exception) -> Response:
    return _refusal(str(problem))


async def _invalid(_: Request, problem: Exception) -> Response:
    """Without the input, which is a text of the caller's and may not even be one that can be written."""
    assert isinstance(problem, RequestValidationError)
    return _refusal([{key: error[key] for key in ("type", "loc", "msg")} for error in problem.errors()])


def _refusal(detail: Any) -> Response:
    """Plain ASCII: what was sent may hold half a surrogate pair, which UTF-8 has no bytes for."""
    return Response(json.dumps({"detail": detail}), 422, media_type="application/json")
