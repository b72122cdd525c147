"""What a server that is left on must stand: strangers, forged hosts, slow senders, much memory, signals."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

import whence
from tests.serving.tiny import TEXT, finished
from whence.serving.app import create_app
from whence.serving.jobs import Jobs
from whence.serving.limits import Limits
from whence.serving.logs import _Lines
from whence.serving.shelf import Entry, Shelf, Traces, tensor_bytes


@pytest.mark.parametrize(
    "host",
    [
        "[::1].evil.com",
        "[::1]evil.com:80",
        "localhost:80:80",
        "localhost:x",
        "evil.com:[::1]",
        "localhost ",
        "127.0.0.1.evil.com",
        "[::1",
    ],
)
def test_forged_hosts_are_refused(client: Any, host: str) -> None:
    assert client.get("/health", headers={"host": host}).status_code == 421


def test_a_token_is_needed_and_becomes_a_cookie(model: Any) -> None:
    app = create_app([model], token="s3cret", any_address=True)
    with TestClient(app, base_url="http://localhost") as stranger:
        for path in ("/", "/health", "/api/models", "/page/main.js", "/openapi.json"):
            answer = stranger.get(path)
            assert answer.status_code == 401
            assert "token" in answer.json()["detail"]
        assert stranger.get("/?token=wrong").status_code == 401
        assert stranger.get("/health?token=s3cret").status_code == 401  # only the page's link takes it
        assert stranger.post("/api/traces", json={"model": "tiny", "text": "the"}).status_code == 401
        assert stranger.get("/health", headers={"authorization": "Bearer s3cret"}).status_code == 200
        assert stranger.get("/health", headers={"cookie": "x; =;;\x7f"}).status_code == 401
    with TestClient(app, base_url="http://localhost") as guest:
        first = guest.get("/?token=s3cret", follow_redirects=False)
        assert (first.status_code, first.headers["location"]) == (303, "/")
        assert "HttpOnly" in first.headers["set-cookie"]
        assert "SameSite=Strict" in first.headers["set-cookie"]
        assert guest.get("/health").status_code == 200
        mine = first.headers["set-cookie"].split(";")[0]
        for odd in (
            "an odd one; ",
            '[x]={"y": 1}; ',
            'open="quote; ',
            "=; ;; ",
        ):  # other servers' cookies lock nobody out
            assert guest.get("/health", headers={"cookie": odd + mine}).status_code == 200
        assert guest.get("/health", headers={"host": "192.168.7.7:8899"}).status_code == 200
        assert guest.get("/health", headers={"host": "evil.example"}).status_code == 421


@pytest.mark.parametrize(
    ("options", "token"),
    [
        (["--host", "127.0.0.1"], False),
        (["--host", "::1"], False),
        (["--host", "0.0.0.0"], True),
        (["--host", "0.0.0.0", "--no-token"], False),
    ],
)
def test_the_command_asks_for_a_token_off_loopback(
    options: list[str], token: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from whence.cli import main

    asked: dict[str, Any] = {}

    class Socket:
        def getsockname(self) -> tuple[str, int]:
            return "", 1234

    monkeypatch.setattr("whence.serving.server.listen", lambda *_: Socket())
    monkeypatch.setattr("whence.serving.server.run", lambda *_, **given: asked.update(given))
    assert main(["serve", *options]) == 0
    said = capsys.readouterr().err
    assert (asked["token"] is not None) == token
    assert (f"token={asked['token']}" in said) == token
    if "0.0.0.0" in options:
        assert "every address of this machine, port 1234" in said.replace("\n", " ")
        assert ("EVERYBODY" in said) == (not token)


def test_a_log_line_stays_one_plain_line() -> None:
    record = logging.LogRecord("whence.serving", logging.INFO, "", 0, "request", None, None)
    record.data = {"path": '/a\n{"event": "forged"}\x1b[2J\u2028\u0085\u202e\x9b'}
    line = _Lines().format(record)
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["event"] == "request"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/health", 405), ("PUT", "/api/traces", 405), ("DELETE", "/api/models", 405), ("GET", "/api/traces", 405),
        ("POST", "/api/traces", 415), ("PATCH", f"/api/jobs/{'0' * 32}", 405), ("TRACE", "/health", 405),
    ],
)  # fmt: skip
def test_methods_as_the_description_says(client: Any, method: str, path: str, status: int) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    assert isinstance(answer.json()["detail"], str)
    if status == 405:
        assert answer.headers["allow"]
    described = client.get("/openapi.json").json()["paths"]
    assert all({"405", "413"} <= set(o["responses"]) for methods in described.values() for o in methods.values())


def test_identical_requests_under_way_share_one_job(model: Any) -> None:
    app = create_app([model])
    with TestClient(app, base_url="http://localhost") as client, app.state.shelf.borrowed("tiny"):
        ask = {"model": "tiny", "text": "the old nurse"}
        first, second = (client.post("/api/traces", json=ask).json() for _ in range(2))
        assert first["id"] == second["id"]
        assert app.state.jobs.waiting == 1


def test_one_client_leaves_room_for_others(model: Any) -> None:
    app = create_app([model], limits=Limits(jobs=3, client_jobs=2))
    one, other = (TestClient(app, base_url="http://localhost", client=(at, 1)) for at in ("10.0.0.1", "10.0.0.2"))
    with app.state.shelf.borrowed("tiny"):  # nothing is finished in here
        answers = [one.post("/api/traces", json={"model": "tiny", "text": "the " * n}) for n in (1, 2, 3)]
        assert [answer.status_code for answer in answers] == [202, 202, 429]
        assert answers[2].headers["retry-after"]
        assert "2 jobs of one client" in answers[2].json()["detail"]
        assert other.post("/api/traces", json={"model": "tiny", "text": "the " * 4}).status_code == 202
        assert "busy with 3 jobs" in other.post("/api/traces", json={"model": "tiny", "text": "the"}).json()["detail"]
    app.state.jobs.close()


def test_what_left_memory_is_computed_again(model: Any) -> None:
    app = create_app([model], limits=Limits(trace_bytes=1))  # room for the newest trace only
    with TestClient(app, base_url="http://localhost") as client:

        def trace(text: str) -> str:
            job = client.post("/api/traces", json={"model": "tiny", "text": text}).json()
            return str(finished(client, job)["result"]["trace"])

        key = trace(TEXT)
        asked = f"/api/traces/{key}/contributions"
        finished(client, client.post(asked, json={"method": "globenc"}).json())
        assert client.get(f"/api/traces/{key}/blocks/mix/globenc/1").status_code == 200
        trace("the old nurse")
        assert client.get(f"/api/traces/{key}").status_code == 404
        assert trace(TEXT) == key
        assert client.get(f"/api/traces/{key}/blocks/mix/globenc/1").status_code == 404
        again = finished(client, client.post(asked, json={"method": "globenc"}).json())
        assert again["state"] == "done"
        assert client.get(f"/api/traces/{key}/blocks/mix/globenc/1").status_code == 200


def test_traces_are_held_by_bytes(model: Any) -> None:
    entries = [Entry("tiny", whence.trace(model, "the " * n), {}) for n in (5, 10, 20, 40)]
    own = [tensor_bytes(entry.trace) for entry in entries]
    assert own == sorted(own)
    assert own[0] > entries[0].trace.attention.numel() * 4
    held = Traces(sum(own[1:]) + 100)
    for i, entry in enumerate(entries):
        held.put(str(i), entry)
    assert [held.get(str(i)) is not None for i in range(4)] == [False, True, True, True]
    entries[3].blocks["x"] = bytes(own[1])
    held.get("3")
    held.trim()
    assert held.get("1") is None
    assert held.bytes <= held.limit


def test_results_are_held_by_bytes() -> None:
    jobs = Jobs(Limits(result_bytes=10_000, workers=1))
    made = [jobs.submit("k", str(i), lambda _: "x" * 3_000) for i in range(8)]
    until = time.monotonic() + 20
    while jobs.waiting and time.monotonic() < until:
        time.sleep(0.01)
    last = jobs.submit("k", "last", lambda _: "x")
    assert jobs.get(made[0].id) is None
    assert jobs.get(made[7].id) is not None
    assert jobs.get(last.id) is not None
    jobs.close()


def test_two_folders_of_one_name_are_both_there(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent / "model").mkdir(parents=True)
    shelf = Shelf([str(tmp_path / "a" / "model"), str(tmp_path / "b" / "model"), str(tmp_path / "a" / "model")])
    assert shelf.names == ["model", "model (2)"]


# -- a real server -----------------------------------------------------------------------------------------------------

SERVER = """
import sys, threading, time
from tests.serving.tiny import tiny_model
from whence.serving import server, app as module, work
from whence.serving.limits import Limits
if sys.argv[1] == "stuck":  # a job that reports nothing for a long time, as a long computation does
    def stuck(*_):
        print("stuck", flush=True)
        time.sleep(60)
    work.make_trace = stuck
at = server.listen("127.0.0.1", 0)
print(at.getsockname()[1], flush=True)
server.run([tiny_model()], at, limits=Limits(arrival=float(sys.argv[2]), waiting=20, client_connections=60), quiet=True)
"""


@contextlib.contextmanager
def server(how: str = "plain", arrival: float = 1.0):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, how, str(arrival)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        for _ in range(300):
            with contextlib.suppress(OSError):
                if get(port)[0] == 200:
                    break
            time.sleep(0.1)
        yield process, port
    finally:
        process.kill()
        process.wait()


def get(port: int, path: str = "/health", timeout: float = 20, source: str = "127.0.0.1") -> tuple[int, bytes]:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout, source_address=(source, 0))
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def submitted(port: int) -> str:
    """The id of a job that was just asked for."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        body = json.dumps({"model": "tiny", "text": "the"})
        connection.request("POST", "/api/traces", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 202
        return str(json.load(answer)["id"])
    finally:
        connection.close()


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it; what it said before is read and dropped."""
    connection.settimeout(0.001)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


def closed_within(connection: socket.socket, seconds: float) -> bytes:
    """What the server still says before it closes; an error if it does not."""
    connection.settimeout(seconds)
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(4096):
            said += piece
    return said


def test_slow_senders_shut_nobody_out() -> None:
    with server() as (_, port):
        slow = []
        for _ in range(270):  # half a request each, and no more
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
            slow.append(connection)
        assert get(port)[0] == 200
        body = socket.create_connection(("127.0.0.1", port))
        body.sendall(HALF_A_BODY)
        assert get(port)[0] == 200
        said = closed_within(body, 15)
        assert b"408" in said.split(b"\r\n")[0]
        closed_within(slow[0], 5)  # gave way to newer ones
        closed_within(slow[-1], 15)  # did not arrive in time
        assert get(port)[0] == 200
        for connection in [*slow, body]:
            connection.close()


HALF_A_BODY = (
    b"POST /api/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
)


def test_slow_bodies_give_way_to_newer_ones() -> None:
    with server(arrival=60.0) as (_, port):
        slow = []
        for _ in range(40):
            slow.append(socket.create_connection(("127.0.0.1", port)))
            slow[-1].sendall(HALF_A_BODY)
        assert closed_within(slow[0], 10) == b""
        assert closed_within(slow[15], 10) == b""
        assert get(port)[0] == 200
        slow[39].sendall(b" " * 48 + b"}")  # the newest is still heard
        assert b"422" in slow[39].recv(4096).split(b"\r\n")[0]
        for connection in slow:
            connection.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127/8")
def test_the_streams_of_one_client_shut_no_other_out() -> None:
    with server("stuck", 20.0) as (_, port):
        job = submitted(port)
        streams = []
        for _ in range(70):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.settimeout(20)
            with contextlib.suppress(ConnectionError):  # refused while it was asking
                connection.sendall(b"GET /api/jobs/%s/events HTTP/1.1\r\nHost: localhost\r\n\r\n" % job.encode())
                connection.recv(1)  # it is answered, or closed, before the next one comes
            streams.append(connection)
        assert [is_closed(one) for one in streams] == [False] * 60 + [True] * 10
        assert get(port, source="127.0.0.2")[0] == 200
        for connection in streams:
            connection.close()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_within_five_seconds_with_a_job_running(how: signal.Signals) -> None:
    with server("stuck", 20.0) as (process, port):
        submitted(port)
        assert process.stdout is not None
        assert process.stdout.readline() == "stuck\n"
        begun = time.monotonic()
        process.send_signal(how)
        process.wait(timeout=5)
        assert time.monotonic() - begun < 5
        with pytest.raises(ConnectionError):
            get(port, timeout=1)
