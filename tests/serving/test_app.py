"""What the server answers: the same numbers as Python, jobs with progress, and limits that say which was met."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import whence
from tests.serving.tiny import TEXT, finished
from whence.reporting.quantise import unpack
from whence.serving.app import create_app
from whence.serving.limits import Limits


def test_health_and_models(client: Any) -> None:
    assert client.get("/health").json()["status"] == "ok"
    assert client.get("/api/models").json()["models"][0]["name"] == "tiny"
    assert client.get("/").headers["content-security-policy"].startswith("default-src 'none'")
    assert client.get("/page/main.js").status_code == 200
    for name in ("../__init__.py", "..%2f__init__.py", "main.py", "no.js"):
        assert client.get(f"/page/{name}").status_code == 404


def test_trace_manifest_and_blocks_are_those_of_python(client: Any, traced: str, model: Any) -> None:
    manifest = client.get(f"/api/traces/{traced}").json()
    trace = whence.trace(model, TEXT)
    found = whence.identifiability(trace)
    assert manifest["stacks"][0]["grid"]["null_share"][1][0] == pytest.approx(
        float(found.values[1, 0].mean()), rel=1e-6
    )
    assert manifest["prediction"]["output"]["kind"] == "classes"
    block = client.get(f"/api/traces/{traced}/blocks/head/encoder/1/0")
    arrays, _ = unpack(block.content)
    keys, weights = arrays["keys"].astype(int), arrays["weight"]
    for q in range(len(trace.tokens)):
        for k, w in zip(keys[q], weights[q], strict=True):
            if k < 65535:
                assert w == pytest.approx(float(trace[1].attention[0, q, k]), abs=1e-5)
    for key in ("head/encoder/9/0", "head/encoder/0/9", "head/decoder/0/0", "mix/alti/77", "nonsense", "..%2f..%2fx"):
        assert client.get(f"/api/traces/{traced}/blocks/{key}").status_code == 404


def test_the_verdict_is_that_of_python_and_its_threshold_can_be_set(client: Any, model: Any) -> None:
    trace = whence.trace(model, TEXT)
    names = []
    for epsilon in (0.05, 0.6):
        asked = {"model": "tiny", "text": TEXT, "epsilon": epsilon}
        job = finished(client, client.post("/api/traces", json=asked).json())
        manifest = client.get(f"/api/traces/{job['result']['trace']}").json()
        verdict = whence.verdict(trace, epsilon=epsilon)
        assert manifest["epsilon"] == epsilon
        assert manifest["stacks"][0]["verdict"]["names"] == verdict.names()
        assert manifest["stacks"][0]["findings"][: len(verdict.sentences())] == verdict.sentences()
        names.append(verdict.names())
    assert names[0] != names[1]
    for wrong in (0, 1, -0.1, "0.05"):
        assert client.post("/api/traces", json={"model": "tiny", "text": TEXT, "epsilon": wrong}).status_code == 422


def test_every_measure_as_a_job(client: Any, traced: str, model: Any) -> None:
    trace = whence.trace(model, TEXT)
    row = {"layer": 0, "head": 1, "query": 3}
    exact = whence.certify(trace, 0, 1, 3, top=5)
    found = finished(client, client.post(f"/api/traces/{traced}/certify", json=row).json())
    assert found["result"]["lower"] == pytest.approx(exact.lower.tolist(), abs=1e-9)
    assert found["result"]["checked"] is True
    found = finished(client, client.post(f"/api/traces/{traced}/witness", json=row).json())
    assert found["result"]["path"][-1]["logits"] < 1e-5
    found = finished(client, client.post(f"/api/traces/{traced}/identifiability", json={}).json())
    assert found["result"]["layers"] == [0, 1]
    found = finished(client, client.post(f"/api/traces/{traced}/contributions", json={"method": "globenc"}).json())
    assert found["state"] == "done", found["error"]
    assert client.get(f"/api/traces/{traced}/blocks/mix/globenc/1").status_code == 200
    found = finished(client, client.post(f"/api/traces/{traced}/attribution", json={"method": "rollout"}).json())
    assert found["result"]["values"] == pytest.approx(
        whence.attribute(model, trace, "rollout").values.tolist(), abs=1e-6
    )


def test_what_cannot_be_done_is_said(client: Any, traced: str) -> None:
    for what, body, words in (
        ("certify", {"layer": 7, "head": 0, "query": 0}, "no layer 7"),
        ("certify", {"layer": 0, "head": 0, "query": 900}, "out of range"),
        ("witness", {"layer": 0, "head": 5, "query": 0}, "no head 5"),
        ("contributions", {"method": "magic"}, "not one of"),
        ("attribution", {"method": "magic"}, "not one of"),
    ):
        found = finished(client, client.post(f"/api/traces/{traced}/{what}", json=body).json())
        assert found["state"] == "failed"
        assert words in found["error"]


def test_same_content_is_computed_once(client: Any, traced: str) -> None:
    first = client.post("/api/traces", json={"model": "tiny", "text": TEXT}).json()
    assert first["state"] == "done"
    assert first["result"] == {"trace": traced}
    assert client.post("/api/traces", json={"model": "tiny", "text": TEXT}).json()["id"] == first["id"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "localhost.evil.example"}, 421),
        ({"host": "127.0.0.1:8080"}, 200),
        ({"host": "[::1]:8080"}, 200),
        ({"host": ""}, 421),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
    ],
)
def test_foreign_requests_are_refused(client: Any, headers: dict[str, str], status: int) -> None:
    assert client.get("/health", headers=headers).status_code == status


def test_limits(client: Any) -> None:
    ask = lambda **body: client.post("/api/traces", json={"model": "tiny", "text": "the", **body})  # noqa: E731
    assert ask(text="").status_code == 422
    assert ask(text="x" * 601).status_code == 413
    assert ask(text="x" * 5000).status_code == 413
    assert ask(extra=1).status_code == 422
    for name in ("/etc/passwd", "../tiny", "minilm", "bert-base-uncased"):
        answer = ask(model=name)
        assert answer.status_code == 404
        assert "tiny" in answer.json()["detail"]
    assert client.post("/api/traces", content=b"text=x", headers={"content-type": "text/plain"}).status_code == 415
    broken = client.post("/api/traces", content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 422
    found = finished(client, ask(text="the " * 80).json())
    assert found["state"] == "failed"
    assert "64 at most" in found["error"]

    def pieces() -> Any:
        for _ in range(10):
            yield b" " * 1000

    sent = client.post("/api/traces", content=pieces(), headers={"content-type": "application/json"})
    assert sent.status_code == 413


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "😀" * 200,
        "שלום עולם",
        "a\u202eb\u0000c",
        "\x1b[31m",
        "{{7*7}}",
        "'; --",
        " \n\t the",
    ],
)
def test_hostile_texts_are_texts(client: Any, text: str) -> None:
    found = finished(client, client.post("/api/traces", json={"model": "tiny", "text": text}).json())
    assert found["state"] in ("done", "failed")
    if found["state"] == "done":
        assert client.get(f"/api/traces/{found['result']['trace']}").json()["text"] == text


def test_what_is_no_text_is_refused_and_not_repeated(client: Any) -> None:
    """Half a surrogate pair can be written in JSON and in no answer; what was sent never comes back in a refusal."""
    headers = {"content-type": "application/json"}
    half = rb'{"model": "tiny", "text": "secret \ud83d"}'
    answer = client.post("/api/traces", content=half, headers=headers)
    assert answer.status_code == 422
    assert "secret" not in answer.text
    odd = client.post("/api/traces", content=rb'{"model": "tiny", "text": "the", "\ud83d": 1}', headers=headers)
    assert odd.status_code in (400, 422)
    assert client.get("/health").status_code == 200


def test_cancel_and_busy(model: Any) -> None:
    from fastapi.testclient import TestClient

    app = create_app([model], limits=Limits(jobs=2, workers=1))
    release = threading.Event()

    def slow(step: Any) -> str:
        for i in range(2000):
            step("waiting", i / 2000)
            if release.wait(0.01):
                return "free"
        return "late"

    with TestClient(app, base_url="http://localhost") as client:
        running = app.state.jobs.submit("slow", "a", slow)
        queued = app.state.jobs.submit("slow", "b", slow)
        busy = client.post("/api/traces", json={"model": "tiny", "text": "the old"})
        assert busy.status_code == 429
        assert busy.headers["retry-after"]
        assert client.delete(f"/api/jobs/{queued.id}").json()["state"] == "cancelled"
        assert client.delete(f"/api/jobs/{running.id}").status_code == 200
        end = finished(client, running.to_dict())
        assert end["state"] == "cancelled"
        release.set()
        again = client.post("/api/traces", json={"model": "tiny", "text": "the old"})
        assert finished(client, again.json())["state"] == "done"
        assert client.get("/api/jobs/" + "0" * 32).status_code == 404


def test_time_limit(model: Any) -> None:
    from whence.serving.jobs import Jobs

    jobs = Jobs(Limits(seconds=0.05))

    def slow(step: Any) -> None:
        for i in range(1000):
            threading.Event().wait(0.01)
            step("…", i / 1000)

    job = jobs.submit("slow", "a", slow)
    for _ in range(300):
        if job.finished:
            break
        threading.Event().wait(0.02)
    assert job.state == "failed"
    assert "longer than 0.05 s" in str(job.error)
    jobs.close()


def test_thirty_two_clients_are_all_answered(client: Any) -> None:
    texts = [f"the old doctor told {'the nurse ' * (i % 5 + 1)}" + "because " * (i // 5) for i in range(32)]

    def ask(text: str) -> int:
        answer = client.post("/api/traces", json={"model": "tiny", "text": text})
        if answer.status_code == 202:
            assert finished(client, answer.json())["state"] in ("done", "cancelled")
        return int(answer.status_code)

    with ThreadPoolExecutor(32) as pool:
        codes = list(pool.map(ask, texts))
    assert set(codes) <= {202, 429}
    assert 202 in codes
    assert client.get("/health").json() == {"status": "ok", "version": whence.__version__, "jobs": 0}


def test_logs_are_json_without_the_text(capsys: pytest.CaptureFixture[str], model: Any) -> None:
    import logging

    from fastapi.testclient import TestClient

    from whence.serving.logs import start_logging

    loggers = [logging.getLogger(name) for name in ("whence.serving", "uvicorn.error")]
    before = [(log.handlers, log.propagate, log.level) for log in loggers]
    start_logging()
    try:
        with TestClient(create_app([model]), base_url="http://localhost") as client:
            finished(client, client.post("/api/traces", json={"model": "tiny", "text": "secret doctor"}).json())
    finally:
        for log, (handlers, propagate, level) in zip(loggers, before, strict=True):
            log.handlers, log.propagate = handlers, propagate
            log.setLevel(level)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert {"started", "request", "job", "stopped"} <= {line["event"] for line in lines}
    assert not any("secret" in json.dumps(line) for line in lines)
