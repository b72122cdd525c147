"""A server in this process with a tiny random model: everything but the numbers is as in earnest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server comes with the extra 'web'")
pytest.importorskip("httpx", reason="the tests of the server need httpx")

from fastapi.testclient import TestClient

from tests.serving.tiny import TEXT, finished, tiny_model
from whence.serving.app import create_app
from whence.serving.limits import Limits


@pytest.fixture(scope="session")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="session")
def limits() -> Limits:
    return Limits(body=4096, text=600, tokens=64, jobs=4, seconds=60, trace_bytes=4_000_000)


@pytest.fixture(scope="session")
def client(model: Any, limits: Limits) -> Iterator[TestClient]:
    with TestClient(create_app([model], limits=limits), base_url="http://localhost") as made:
        yield made


@pytest.fixture(scope="session")
def traced(client: TestClient) -> str:
    job = client.post("/api/traces", json={"model": "tiny", "text": TEXT}).json()
    return str(finished(client, job)["result"]["trace"])
