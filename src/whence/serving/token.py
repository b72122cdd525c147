"""The token of a server that others can reach: in the link once, in a cookie from then on."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, MutableMapping
from typing import Any
from urllib.parse import parse_qs


class Token:
    """One secret. Requests carry it as `Authorization: Bearer …`, as a cookie, or once as `/?token=…`."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        # Browsers share cookies between the ports of a host: two servers must not use one name.
        self.cookie = f"whence-{hashlib.sha256(self._secret).hexdigest()[:12]}"

    def is_in(self, scope: MutableMapping[str, Any], headers: Mapping[str, str]) -> bool:
        """Whether the request carries it."""
        kind, _, given = headers.get("authorization", "").partition(" ")
        offered = [given] if kind.lower() == "bearer" else []
        # http.cookies would give up at the first odd cookie, and other servers of this host set whatever they like.
        for cookie in headers.get("cookie", "").split(";"):
            name, _, value = cookie.strip().partition("=")
            offered += [value.strip('"')] if name == self.cookie else []
        offered += self._in_link(scope)
        return any(hmac.compare_digest(one.strip().encode(), self._secret) for one in offered)

    def entrance(self, scope: MutableMapping[str, Any]) -> list[tuple[bytes, bytes]] | None:
        """Headers that set the cookie and lead to the page without the token in its address; None: no such link."""
        if not self._in_link(scope):
            return None
        cookie = f"{self.cookie}={self._secret.decode()}; Path=/; HttpOnly; SameSite=Strict"
        return [(b"location", b"/"), (b"set-cookie", cookie.encode()), (b"cache-control", b"no-store")]

    @staticmethod
    def _in_link(scope: MutableMapping[str, Any]) -> list[str]:
        if scope["method"] != "GET" or scope["path"] != "/":
            return []
        return parse_qs(scope["query_string"].decode("latin-1")).get("token", [])[:1]
