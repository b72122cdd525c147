"""What the jobs do: each takes the shelf, a trace, the request and a step to report, and gives json_value data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whence import method_table
from whence.errors import InputError
from whence.results.progress import Step
from whence.serving.limits import Limits
from whence.serving.shelf import Entry, Shelf, Traces

if TYPE_CHECKING:
    from whence.serving.schemas import CertifyRequest, MethodRequest, RowRequest, StackRequest, TraceRequest


BUDGET = 1.0


def make_trace(
    shelf: Shelf, traces: Traces, key: str, request: TraceRequest, limits: Limits, step: Step
) -> dict[str, Any]:
    """Trace, look, keep; the result names the trace."""
    from whence.reading.tokenised import position_limit
    from whence.reading.tracing import trace
    from whence.reporting.analysis import Analysis
    from whence.reporting.document import build

    step(f"Loading {request.model}", 0.0)
    with shelf.borrowed(request.model) as model:
        step("Reading the text", 0.1)
        if model.tokenizer is not None:
            parts = [model.tokenizer(request.text, request.text_pair, verbose=False)]
            parts += [model.tokenizer(request.continuation, verbose=False)] if request.continuation else []
            count = sum(len(part["input_ids"]) for part in parts) + (request.max_new_tokens or 0)
            longest = position_limit(model.model)
            if limits.truncate and longest is not None:
                count = min(count, longest)
            if count > limits.tokens:
                raise InputError(f"this text has {count} tokens; this server takes {limits.tokens} at most.")
        found = trace(
            model, request.text, request.text_pair, request.target, continuation=request.continuation,
            max_new_tokens=request.max_new_tokens, chat=request.chat or None, truncate=limits.truncate,
        )  # fmt: skip
        document = build(
            found,
            budget=BUDGET,
            analysis=Analysis(found, epsilon=request.epsilon),
            with_heads=False,
            step=lambda what, done, total=1.0, /: step(what, 0.15 + 0.85 * done / total),
        )
    traces.put(key, Entry(request.model, found, dict(document.manifest), dict(document.blocks)))
    return {"trace": key}


def head_block(entry: Entry, stack: str, layer: int, head: int) -> bytes:
    """The pictures and rows of one head; an InputError where there is no such head."""
    from whence.reporting.heads import alternatives_of, detail_of, head_blocks

    key = f"head/{stack}/{layer}/{head}"
    with entry.lock:
        if key not in entry.blocks:
            found = entry.trace.of(stack)
            part = found[layer].select([head])
            others = alternatives_of(part)
            detail = detail_of("standard", len(found.tokens))
            entry.blocks[key] = head_blocks(part, detail, others.by_head())[head]
        return entry.blocks[key]


def identifiability(_: Shelf, entry: Entry, request: StackRequest, step: Step) -> dict[str, Any]:
    """The grid of a stack and every row's null share and dimension."""
    from whence.attention.identifiability import identifiability as measure
    from whence.reporting.attention import json_value

    step("Null spaces", 0.1)
    found = measure(entry.trace, attention=request.attention)

    def nested(values: Any) -> Any:
        return [nested(v) for v in values] if isinstance(values, list) else json_value(values)

    return {
        "layers": list(found.layers),
        "heads": list(found.heads),
        "null_share": nested(found.values.tolist()),
        "head_r": nested(found.extra["head_r"].tolist()),
        "rank": nested(found.extra["rank"].tolist()),
        "simplex_null_dimension": nested(found.extra["simplex_null_dimension"].tolist()),
    }


def certify(_: Shelf, entry: Entry, request: CertifyRequest, step: Step) -> dict[str, Any]:
    """Exact intervals of one row."""
    from whence.attention.certify import certify as measure
    from whence.reporting.attention import listed

    step("Linear programs", 0.1)
    row = measure(
        entry.trace,
        request.layer,
        request.head,
        request.query,
        request.top,
        request.tolerance,
        attention=request.attention,
    )
    return listed(row)


def witness(shelf: Shelf, entry: Entry, request: RowRequest, step: Step) -> dict[str, Any] | None:
    """Another row, and what the model gave with it."""
    from whence.attention.witness import witness as measure
    from whence.reporting.counter_examples import counter_example

    step("Looking for another row", 0.1)
    row = measure(entry.trace, request.layer, request.head, request.query, attention=request.attention)
    with shelf.borrowed(entry.model):
        step("Putting it into the model", 0.3)
        return counter_example(entry.trace, row)


def contributions(shelf: Shelf, entry: Entry, request: MethodRequest, step: Step) -> dict[str, Any]:
    """A mixing method's manifest entry; its blocks join the trace's."""
    from whence.mixing.contributions import contributions as measure
    from whence.reporting.mixing import mixture_data

    method = offered(request.method, by_layer())
    step(method.title, 0.0)

    def steps(_what: str, done: float, of: float) -> None:
        step(method.title, 0.1 + 0.9 * done / of)

    with shelf.borrowed(entry.model):
        step(method.title, 0.1)
        options = {"progress": steps} if "progress" in method.options else {}
        document, blocks = mixture_data(measure(entry.trace, method.name, **options))
    entry.blocks.update(blocks)
    return document


def attribution(shelf: Shelf, entry: Entry, request: MethodRequest, step: Step) -> dict[str, Any]:
    """One line of the prediction view."""
    from whence.reporting.prediction import attribution_of

    method = offered(request.method, explaining())
    step(method.title, 0.1)
    with shelf.borrowed(entry.model) as model:
        step(method.title, 0.2)
        return attribution_of(model, entry.trace, method.name)


def answer(shelf: Shelf, entry: Entry, request: MethodRequest, step: Step) -> dict[str, Any]:
    """One method of the answer view; its scores join the trace's blocks."""
    from whence.mixing.span import has_answer, span_of
    from whence.reporting.answer import method_data

    method = offered(request.method, explaining())
    step(method.title, 0.1)
    with shelf.borrowed(entry.model) as model:
        if not has_answer(model, entry.trace):
            raise InputError("this trace has no answer: ask for one with continuation or max_new_tokens.")
        step(method.title, 0.2)
        document, blocks = method_data(span_of(model, entry.trace), method.name)
    entry.blocks.update(blocks)
    return document


def by_layer() -> tuple[method_table.Method, ...]:
    """The methods that can be computed on demand, layer by layer: those that the page shows."""
    return tuple(m for m in explaining() if m.gives in ("matrix", "contributions") and not m.contrast)


def explaining() -> tuple[method_table.Method, ...]:
    """Methods that can be asked what a prediction came from: those that the page shows."""
    return tuple(m for m in method_table.explaining() if m.shown)


def offered(name: str, methods: tuple[method_table.Method, ...]) -> method_table.Method:
    """The method of that name among those offered."""
    for method in methods:
        if method.name == name:
            return method
    raise InputError(f"method={name!r} is not one of {', '.join(m.name for m in methods)}.")
