"""What every request meets first: is it from here, is it small enough; and what every answer carries.

A page of another site must not be able to use this server through its reader's browser: foreign Host headers (which DNS
rebinding brings) and cross-site requests are refused before anything reads them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException

from whence.serving.limits import Limits

log = logging.getLogger("whence.serving")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Guard:
    """ASGI middleware."""

    def __init__(self, app: Any, hosts: frozenset[str], limits: Limits) -> None:
        self.app = app
        self.hosts = hosts
        self.limits = limits
        self._too_large = f"The request is larger than {limits.body} bytes."

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, pass on, add the headers, write a line."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin = time.monotonic()
        seen: dict[str, int] = {}
        read = 0

        async def sending(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                seen["status"] = message["status"]
                message["headers"] = [
                    *message.get("headers", []),
                    *((name.encode(), value.encode()) for name, value in HEADERS.items()),
                ]
            await send(message)

        async def receiving() -> MutableMapping[str, Any]:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.limits.body:
                raise HTTPException(413, self._too_large)
            return message

        refusal = self._refusal(scope)
        try:
            if refusal is not None:
                await _answer(sending, *refusal)
            else:
                await self.app(scope, receiving, sending)
        finally:
            log.info(
                "request",
                extra={
                    "data": {
                        "method": scope["method"],
                        "path": scope["path"],
                        "status": seen.get("status", 0),
                        "ms": round(1000 * (time.monotonic() - begin), 1),
                    }
                },
            )

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if _name(host) not in self.hosts:
            return 421, "This server does not answer to that host name."
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return 403, "Requests from other sites are refused."
        navigating = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate" and scope["path"] == "/"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not navigating:
            return 403, "Requests from other sites are refused."
        if (
            scope["method"] == "POST"
            and headers.get("content-type", "").partition(";")[0].strip() != "application/json"
        ):
            return 415, "Send JSON, with the content type application/json."
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self.limits.body:
            return 413, self._too_large
        return None


def _name(host: str) -> str:
    """The host without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if ":" in host else host


async def _answer(send: Send, status: int, detail: str) -> None:
    body = json.dumps({"detail": detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
