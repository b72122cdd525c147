"""The addresses of the server: the page, traces with their blocks and measures, jobs with their events."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Request, Response
from fastapi.responses import StreamingResponse

from whence import __version__
from whence.errors import InputError
from whence.results.provenance import library_versions
from whence.serving import schemas, work
from whence.serving.shelf import content_key
from whence.serving.state import ServerState

PAGE_FILES = re.compile(r"[a-z_]+\.(js|css)")
HEAD_BLOCK = re.compile(r"head/(encoder|decoder|cross)/(\d{1,4})/(\d{1,4})")
TraceId = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")]
JobId = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")]
Responses = dict[int | str, dict[str, Any]]
REFUSED: Responses = {
    401: {"model": schemas.Problem, "description": "The token is missing"},
    403: {"model": schemas.Problem, "description": "Asked from another site"},
    405: {"model": schemas.Problem, "description": "Not with this method"},
    408: {"model": schemas.Problem, "description": "The request took too long to arrive"},
    413: {"model": schemas.Problem, "description": "Too large"},
    415: {"model": schemas.Problem, "description": "Not JSON"},
    421: {"model": schemas.Problem, "description": "A foreign host name"},
}
MISSING: Responses = {404: {"model": schemas.Problem, "description": "Not here"}}
BUSY: Responses = {
    400: {"model": schemas.Problem, "description": "Not JSON that can be read"},
    429: {"model": schemas.Problem, "description": "Too many jobs: wait and ask again"},
}
ANSWERS: Responses = {**REFUSED, **MISSING, **BUSY}

INDEX = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>whence</title><link rel="icon" href="data:,"><link rel="stylesheet" href="/page/style.css"></head>
<body><div id="whence"><noscript>This page needs its script.</noscript></div>
<script type="module" src="/page/main.js"></script></body></html>
"""


def page_routes() -> APIRouter:
    """The page and the files it is made of."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    def index() -> Response:
        return Response(INDEX, media_type="text/html; charset=utf-8", headers={"cache-control": "no-cache"})

    @router.get("/page/{name}")
    def page(name: str) -> Response:
        source = files("whence") / "page" / name
        if not PAGE_FILES.fullmatch(name) or not source.is_file():
            raise HTTPException(404, "The page has no such part.")
        kind = "text/javascript" if name.endswith(".js") else "text/css"
        return Response(source.read_bytes(), media_type=f"{kind}; charset=utf-8", headers={"cache-control": "no-cache"})

    return router


def status_routes(state: ServerState) -> APIRouter:
    """Whether the server works and what it offers."""
    router = APIRouter()

    @router.get("/health", responses=REFUSED)
    def health() -> schemas.Health:
        """Whether the server works, and how much it has to do."""
        return schemas.Health(status="ok", version=__version__, jobs=state.jobs.waiting)

    @router.get("/api/models", responses=REFUSED)
    def list_models() -> schemas.ModelsAnswer:
        """The models that can be asked, the methods that can be computed, and the limits."""
        shelf, limits = state.shelf, state.limits
        return schemas.ModelsAnswer(
            models=[schemas.ModelAnswer(name=name, loaded=shelf.is_loaded(name)) for name in shelf.names],
            methods=[schemas.MethodAnswer(name=m.name, title=m.title) for m in work.by_layer()],
            attributions=[schemas.MethodAnswer(name=m.name, title=m.title) for m in work.explaining()],
            limits=schemas.LimitsAnswer(
                text=limits.text, tokens=limits.tokens, jobs=limits.jobs, seconds=limits.seconds
            ),
            runs=list(state.runs),
            pair=state.pair,
            versions=dict(library_versions()),
        )

    return router


def trace_routes(state: ServerState) -> APIRouter:
    """Traces: made by a job, then read as a manifest and blocks."""
    router = APIRouter(prefix="/api/traces")

    @router.post("", status_code=202, responses=ANSWERS)
    def make_trace(request: schemas.TraceRequest) -> schemas.JobAnswer:
        """Trace a text and look at all heads; the job's result names the trace."""
        names, limits = state.shelf.names, state.limits
        if request.model not in names:
            raise HTTPException(404, f"No model is called {request.model!r} here; there are: {', '.join(names)}.")
        parts = (request.text, request.text_pair or "", request.target or "", request.continuation or "")
        if sum(map(len, parts)) > limits.text:
            raise HTTPException(413, f"The text is longer than {limits.text} characters.")
        key = content_key("trace", request.model_dump())
        if state.traces.get(key) is None:
            state.jobs.forget_finished(key)  # its trace has gone from memory; a job under way is shared
        return schemas.JobAnswer(
            **state.submit(
                "trace", key, lambda step: work.make_trace(state.shelf, state.traces, key, request, limits, step)
            )
        )

    @router.get("/{trace}", responses={**REFUSED, **MISSING})
    def manifest(trace: TraceId) -> dict[str, Any]:
        """Everything the page shows of a trace, but for the matrices."""
        return state.entry(trace).manifest

    @router.get(
        "/{trace}/blocks/{key:path}",
        response_class=Response,
        responses={**REFUSED, **MISSING, 200: {"content": {"application/octet-stream": {}}, "description": "A block"}},
    )
    def block(trace: TraceId, key: Annotated[str, Path(max_length=200)]) -> Response:
        """One block of matrices, compressed (see whence.reporting.quantise)."""
        entry = state.entry(trace)
        head = HEAD_BLOCK.fullmatch(key)
        try:
            data = work.head_block(entry, head[1], int(head[2]), int(head[3])) if head else entry.blocks.get(key)
        except InputError as problem:
            raise HTTPException(404, str(problem)) from None
        if data is None:
            raise HTTPException(404, "This trace has no such block.")
        state.traces.trim()
        return Response(data, media_type="application/octet-stream", headers={"cache-control": "private, max-age=3600"})

    return router


def measure_routes(state: ServerState) -> APIRouter:
    """Measures of a trace, each a job."""
    router = APIRouter(prefix="/api/traces/{trace}")

    for name, request, says in MEASURES:
        router.post(f"/{name}", name=name, description=says, status_code=202, responses=ANSWERS)(
            _measure(state, name, request)
        )
    return router


MEASURES: tuple[tuple[str, type[Any], str], ...] = (
    ("identifiability", schemas.StackRequest, "Rank, null space, null share and correlation of every row of a stack."),
    ("certify", schemas.CertifyRequest, "The exact interval of each of a row's heaviest weights, with checked proofs."),
    ("witness", schemas.RowRequest, "Another row with the same output, put into the model; null where there is none."),
    (
        "contributions",
        schemas.MethodRequest,
        "What every hidden token is made of; its matrices become blocks of the trace.",
    ),
    ("attribution", schemas.MethodRequest, "Which input tokens the prediction came from, by a method."),
    (
        "answer",
        schemas.MethodRequest,
        "What every token of the answer came from; its scores become a block of the trace.",
    ),
)


def _measure(state: ServerState, name: str, kind: type[Any]) -> Callable[..., schemas.JobAnswer]:
    def measure(trace: TraceId, request: Any) -> schemas.JobAnswer:
        return schemas.JobAnswer(**state.measure(name, trace, request, getattr(work, name)))

    measure.__annotations__["request"] = kind  # by which FastAPI reads the body
    return measure


def job_routes(state: ServerState) -> APIRouter:
    """Jobs: watched and stopped."""
    router = APIRouter(prefix="/api/jobs")

    @router.get("/{job}", responses={**REFUSED, **MISSING})
    def get_job(job: JobId) -> schemas.JobAnswer:
        """Where a job stands."""
        return schemas.JobAnswer(**state.job(job).to_dict())

    @router.delete("/{job}", responses={**REFUSED, **MISSING})
    def cancel_job(job: JobId) -> schemas.JobAnswer:
        """Stop a job at its next step."""
        known = state.job(job)
        state.jobs.cancel(known)
        return schemas.JobAnswer(**known.to_dict())

    @router.get(
        "/{job}/events",
        response_class=StreamingResponse,
        responses={
            **REFUSED,
            **MISSING,
            200: {"content": {"text/event-stream": {}}, "description": "progress …, then end"},
        },
    )
    async def events(job: JobId, request: Request) -> StreamingResponse:
        """Server-sent events: `progress` as it changes, then one `end`."""
        known = state.job(job)

        async def stream() -> AsyncIterator[str]:
            last = None
            while not known.finished and not state.stopping() and not await request.is_disconnected():
                now = {"progress": known.progress, "message": known.message, "state": known.state}
                if now != last:
                    yield _event("progress", now)
                    last = now
                await asyncio.sleep(0.05)
            yield _event("end", known.to_dict())

        return StreamingResponse(stream(), media_type="text/event-stream", headers={"cache-control": "no-store"})

    return router


def _event(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data, allow_nan=False)}\n\n"
