"""What every request meets first: is it from here, is it small enough; and what every answer carries.

A page of another site must not be able to use this server through its reader's browser: foreign Host headers (which DNS
rebinding brings) and cross-site requests are refused before anything reads them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException

from whence.serving.jobs import CLIENT
from whence.serving.limits import Limits
from whence.serving.token import Token

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


JSON_ONLY = re.compile(r"/api/traces(/[^/]+/[a-z]+)?")  # what takes a body
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?", re.IGNORECASE)


class Guard:
    """ASGI middleware."""

    def __init__(
        self, app: Any, hosts: frozenset[str], limits: Limits, any_address: bool = False, token: str | None = None
    ) -> None:
        self.app = app
        self.hosts = frozenset(host.lower() for host in hosts)
        self.limits = limits
        self.any_address = any_address
        self.token = None if token is None else Token(token)
        self._too_large = f"The request is larger than {limits.body} bytes."

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, pass on, add the headers, write a line."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin = time.monotonic()
        status = 0

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", []),
                    *((name.encode(), value.encode()) for name, value in HEADERS.items()),
                ]
            await send(message)

        CLIENT.set((scope.get("client") or ("",))[0])
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope, headers)
        entrance = None if refusal or self.token is None else self.token.entrance(scope)
        try:
            if refusal is not None:
                await _answer(sending, *refusal)
            elif entrance is not None:
                await sending({"type": "http.response.start", "status": 303, "headers": entrance})
                await sending({"type": "http.response.body", "body": b""})
            else:
                await self.app(scope, self._bounded(receive, begin), sending)
        finally:
            data = {"method": scope["method"][:10], "path": scope["path"][:200], "status": status}
            data["ms"] = round(1000 * (time.monotonic() - begin), 1)
            log.info("request", extra={"data": data})

    def _bounded(self, receive: Receive, begin: float) -> Receive:
        """`receive` that gives up on a body that is too large or too slow."""
        read, arrived = 0, False

        async def receiving() -> MutableMapping[str, Any]:
            nonlocal read, arrived
            if arrived:  # what comes after the body is the end of the connection, for which one may wait long
                return await receive()
            left = begin + self.limits.arrival - time.monotonic()
            try:
                message = await asyncio.wait_for(receive(), max(left, 0.01))
            except TimeoutError:
                raise HTTPException(408, f"The request did not arrive within {self.limits.arrival:g} s.") from None
            read += len(message.get("body", b""))
            arrived = not message.get("more_body", False)
            if read > self.limits.body:
                raise HTTPException(413, self._too_large)
            return message

        return receiving

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if not self._answers_to(host):
            return 421, "This server does not answer to that host name."
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return 403, "Requests from other sites are refused."
        navigating = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate" and scope["path"] == "/"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not navigating:
            return 403, "Requests from other sites are refused."
        if self.token is not None and not self.token.is_in(scope, headers):
            return 401, "This server needs its token: open the link that it printed when it started."
        if (
            scope["method"] == "POST"
            and JSON_ONLY.fullmatch(scope["path"])
            and headers.get("content-type", "").partition(";")[0].strip() != "application/json"
        ):
            return 415, "Send JSON, with the content type application/json."
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or int(length[:20]) > self.limits.body:
            return 413, self._too_large
        return None

    def _answers_to(self, host: str) -> bool:
        """Whether a Host header names this server; the whole of it counts, not how it begins."""
        parts = HOST.fullmatch(host)
        if parts is None:
            return False
        name = parts[1].lower()
        if name in self.hosts:
            return True
        if not self.any_address:
            return False
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


async def _answer(send: Send, status: int, detail: str) -> None:
    body = json.dumps({"detail": detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
