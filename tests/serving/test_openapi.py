"""Schemathesis reads the OpenAPI description and tries what it allows, and what it does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.serving.tiny import tiny_model
from whence.serving.limits import Limits

create_app = pytest.importorskip("whence.serving.app", reason="the server comes with the extra 'web'").create_app
schemathesis = pytest.importorskip("schemathesis", reason="the test of the description needs schemathesis")

app = create_app([tiny_model()], limits=Limits(text=200, tokens=48, jobs=4, seconds=20))
schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers={"host": "localhost"})


@schema.parametrize()
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_api_keeps_its_word(case: Any) -> None:
    case.headers = {**(case.headers or {}), "host": "localhost"}
    answer = case.call(base_url="http://localhost")
    assert answer.status_code < 500
    known = case.operation.definition.raw["responses"]
    assert str(answer.status_code) in known or answer.status_code in (404, 405, 413, 415, 421, 422), answer.status_code
