"""The server: the page, its data, and the measures as jobs."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any

from whence import __version__
from whence.errors import InputError, MissingExtraError
from whence.serving import work
from whence.serving.guard import Guard
from whence.serving.jobs import Full, Job, Jobs
from whence.serving.limits import Limits
from whence.serving.shelf import Entry, Shelf, Traces, content_key

try:
    from fastapi import FastAPI, HTTPException, Path, Request, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import StreamingResponse

    from whence.serving import schemas
except ImportError as missing:  # pragma: no cover - the message is all there is to it
    raise MissingExtraError("the server needs FastAPI: pip install 'whence[web]'.") from missing

if TYPE_CHECKING:
    from whence.model.load import Model

log = logging.getLogger("whence.serving")

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
PAGE_FILES = re.compile(r"[a-z_]+\.(js|css)")
HEAD_BLOCK = re.compile(r"head/(encoder|decoder|cross)/(\d{1,4})/(\d{1,4})")
TraceId = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")]
JobId = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")]
REFUSED: dict[int | str, dict[str, Any]] = {
    403: {"model": schemas.Problem, "description": "Asked from another site"},
    413: {"model": schemas.Problem, "description": "Too large"},
    415: {"model": schemas.Problem, "description": "Not JSON"},
    421: {"model": schemas.Problem, "description": "A foreign host name"},
}
MISSING: dict[int | str, dict[str, Any]] = {404: {"model": schemas.Problem, "description": "Not here"}}
BUSY: dict[int | str, dict[str, Any]] = {
    400: {"model": schemas.Problem, "description": "Not JSON that can be read"},
    429: {"model": schemas.Problem, "description": "Too many jobs: wait and ask again"},
}

INDEX = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>whence</title><link rel="icon" href="data:,"><link rel="stylesheet" href="/page/style.css"></head>
<body><div id="whence"><noscript>This page needs its script.</noscript></div>
<script type="module" src="/page/main.js"></script></body></html>
"""


def create_app(
    models: Sequence[str | Model] = ("minilm",),
    *,
    limits: Limits | None = None,
    hosts: frozenset[str] = frozenset(),
    stopping: Callable[[], bool] = lambda: False,
) -> FastAPI:
    """The application. `models`: the only ones that can be asked. `hosts`: names it answers to, besides loopback's.

    `stopping`: tells streams that the server wants to end.
    """
    bounds = limits or Limits()
    shelf, traces, jobs = Shelf(models), Traces(bounds.traces), Jobs(bounds)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        log.info("started", extra={"data": {"models": shelf.names}})
        yield
        jobs.close()
        log.info("stopped")

    app = FastAPI(title="whence", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.jobs, app.state.shelf, app.state.traces = jobs, shelf, traces

    def entry_of(trace: str) -> Entry:
        found = traces.get(trace)
        if found is None:
            raise HTTPException(404, "There is no such trace, or no longer: ask for its text again.")
        return found

    def submit(kind: str, key: str, function: Callable[[Any], Any]) -> dict[str, Any]:
        try:
            return jobs.submit(kind, key, function).to_dict()
        except Full:
            detail = f"This server is busy with {bounds.jobs} jobs: ask again in a moment."
            raise HTTPException(429, detail, {"Retry-After": "2"}) from None

    def of_trace(
        kind: str, trace: str, request: Any, function: Callable[[Shelf, Entry, Any, Any], Any]
    ) -> dict[str, Any]:
        entry = entry_of(trace)
        key = content_key(kind, trace, request.model_dump())
        return submit(kind, key, lambda step: function(shelf, entry, request, step))

    @app.exception_handler(InputError)
    async def refused(_: Request, problem: InputError) -> Response:
        return _refusal(str(problem))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, problem: RequestValidationError) -> Response:
        # Without the input, which is a text of the caller's and may not even be one that can be written.
        return _refusal([{key: error[key] for key in ("type", "loc", "msg")} for error in problem.errors()])

    @app.get("/", include_in_schema=False)
    def index() -> Response:
        return Response(INDEX, media_type="text/html; charset=utf-8", headers={"cache-control": "no-cache"})

    @app.get("/page/{name}", include_in_schema=False)
    def page(name: str) -> Response:
        source = files("whence") / "page" / name
        if not PAGE_FILES.fullmatch(name) or not source.is_file():
            raise HTTPException(404, "The page has no such part.")
        kind = "text/javascript" if name.endswith(".js") else "text/css"
        return Response(source.read_bytes(), media_type=f"{kind}; charset=utf-8", headers={"cache-control": "no-cache"})

    @app.get("/health", responses=REFUSED)
    def health() -> schemas.Health:
        """Whether the server works, and how much it has to do."""
        return schemas.Health(status="ok", version=__version__, jobs=jobs.waiting)

    @app.get("/api/models", responses=REFUSED)
    def list_models() -> schemas.ModelsAnswer:
        """The models that can be asked, the methods that can be computed, and the limits."""
        return schemas.ModelsAnswer(
            models=[schemas.ModelAnswer(name=name, loaded=shelf.is_loaded(name)) for name in shelf.names],
            methods=[schemas.MethodAnswer(name=m.name, title=m.title) for m in work.by_layer()],
            attributions=[schemas.MethodAnswer(name=m.name, title=m.title) for m in work.explaining()],
            limits=schemas.LimitsAnswer(
                text=bounds.text, tokens=bounds.tokens, jobs=bounds.jobs, seconds=bounds.seconds
            ),
        )

    @app.post("/api/traces", status_code=202, responses={**REFUSED, **MISSING, **BUSY})
    def make_trace(request: schemas.TraceRequest) -> schemas.JobAnswer:
        """Trace a text and look at all heads; the job's result names the trace."""
        if request.model not in shelf.names:
            raise HTTPException(404, f"No model is called {request.model!r} here; there are: {', '.join(shelf.names)}.")
        parts = (request.text, request.text_pair or "", request.target or "")
        if sum(map(len, parts)) > bounds.text:
            raise HTTPException(413, f"The text is longer than {bounds.text} characters.")
        key = content_key("trace", request.model_dump())
        if traces.get(key) is None:
            jobs.forget(key)  # a finished job whose trace has gone from memory
        found = submit("trace", key, lambda step: work.make_trace(shelf, traces, key, request, bounds, step))
        return schemas.JobAnswer(**found)

    @app.get("/api/traces/{trace}", responses={**REFUSED, **MISSING})
    def manifest(trace: TraceId) -> dict[str, Any]:
        """Everything the page shows of a trace, but for the matrices."""
        return entry_of(trace).manifest

    @app.get(
        "/api/traces/{trace}/blocks/{key:path}",
        response_class=Response,
        responses={**REFUSED, **MISSING, 200: {"content": {"application/octet-stream": {}}, "description": "A block"}},
    )
    def block(trace: TraceId, key: Annotated[str, Path(max_length=200)]) -> Response:
        """One block of matrices, compressed (see whence.reporting.quantise)."""
        entry = entry_of(trace)
        wanted = HEAD_BLOCK.fullmatch(key)
        try:
            data = (
                work.head_block(entry, wanted[1], int(wanted[2]), int(wanted[3])) if wanted else entry.blocks.get(key)
            )
        except InputError as problem:
            raise HTTPException(404, str(problem)) from None
        if data is None:
            raise HTTPException(404, "This trace has no such block.")
        return Response(data, media_type="application/octet-stream", headers={"cache-control": "private, max-age=3600"})

    answers = {**REFUSED, **MISSING, **BUSY}

    @app.post("/api/traces/{trace}/identifiability", status_code=202, responses=answers)
    def identifiability(trace: TraceId, request: schemas.StackRequest) -> schemas.JobAnswer:
        """Rank, null space, null share and correlation of every row of a stack."""
        return schemas.JobAnswer(**of_trace("identifiability", trace, request, work.identifiability))

    @app.post("/api/traces/{trace}/certify", status_code=202, responses=answers)
    def certify(trace: TraceId, request: schemas.CertifyRequest) -> schemas.JobAnswer:
        """The exact interval of each of a row's heaviest weights, with checked proofs."""
        return schemas.JobAnswer(**of_trace("certify", trace, request, work.certify))

    @app.post("/api/traces/{trace}/witness", status_code=202, responses=answers)
    def witness(trace: TraceId, request: schemas.RowRequest) -> schemas.JobAnswer:
        """Another row with the same output, put into the model; null where there is none."""
        return schemas.JobAnswer(**of_trace("witness", trace, request, work.witness))

    @app.post("/api/traces/{trace}/contributions", status_code=202, responses=answers)
    def contributions(trace: TraceId, request: schemas.MethodRequest) -> schemas.JobAnswer:
        """What every hidden token is made of, by a method; its matrices become blocks of the trace."""
        return schemas.JobAnswer(**of_trace("contributions", trace, request, work.contributions))

    @app.post("/api/traces/{trace}/attribution", status_code=202, responses=answers)
    def attribution(trace: TraceId, request: schemas.MethodRequest) -> schemas.JobAnswer:
        """Which input tokens the prediction came from, by a method."""
        return schemas.JobAnswer(**of_trace("attribution", trace, request, work.attribution))

    def job_of(job: str) -> Job:
        found = jobs.get(job)
        if found is None:
            raise HTTPException(404, "There is no such job, or no longer.")
        return found

    @app.get("/api/jobs/{job}", responses={**REFUSED, **MISSING})
    def get_job(job: JobId) -> schemas.JobAnswer:
        """Where a job stands."""
        return schemas.JobAnswer(**job_of(job).to_dict())

    @app.delete("/api/jobs/{job}", responses={**REFUSED, **MISSING})
    def cancel_job(job: JobId) -> schemas.JobAnswer:
        """Stop a job at its next step."""
        found = job_of(job)
        jobs.cancel(found)
        return schemas.JobAnswer(**found.to_dict())

    @app.get(
        "/api/jobs/{job}/events",
        response_class=StreamingResponse,
        responses={
            **REFUSED,
            **MISSING,
            200: {"content": {"text/event-stream": {}}, "description": "progress …, then end"},
        },
    )
    async def events(job: JobId, request: Request) -> StreamingResponse:
        """Server-sent events: `progress` as it changes, then one `end`."""
        found = job_of(job)

        async def stream() -> AsyncIterator[str]:
            last = None
            while not found.finished and not stopping() and not await request.is_disconnected():
                now = {"progress": found.progress, "message": found.message, "state": found.state}
                if now != last:
                    yield _event("progress", now)
                    last = now
                await asyncio.sleep(0.05)
            yield _event("end", found.to_dict())

        return StreamingResponse(stream(), media_type="text/event-stream", headers={"cache-control": "no-store"})

    app.add_middleware(Guard, hosts=LOOPBACK | hosts, limits=bounds)
    return app


def _refusal(detail: Any) -> Response:
    """Plain ASCII: what was sent may hold half a surrogate pair, which UTF-8 has no bytes for."""
    return Response(json.dumps({"detail": detail}), 422, media_type="application/json")


def _event(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data, allow_nan=False)}\n\n"
