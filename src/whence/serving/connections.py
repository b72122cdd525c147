"""Connections that do not shut others out: a request must arrive in time, and waiting ones give way to new ones."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from whence.serving.limits import Limits


def patient_protocol(limits: Limits) -> type[H11Protocol]:
    """uvicorn's HTTP protocol with limits of its own, so that one client (an address) cannot shut out the others.

    A connection whose next request's headers have not arrived `limits.arrival` seconds after they could have been sent
    is closed (the body has the same time, see `Guard`). A client that has more than `limits.waiting` connections whose
    request, headers or body, has not arrived loses the oldest; the same if it has more than `limits.client_connections`
    of any kind.
    """
    waiting: dict[str, OrderedDict[Any, None]] = {}
    connected: Counter[str] = Counter()

    class PatientProtocol(H11Protocol):  # type: ignore[misc, unused-ignore]
        """One connection."""

        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            connected[self._client()] += 1
            self._wait()
            if connected[self._client()] > limits.client_connections:
                next(iter(waiting[self._client()]))._give_up()

        def handle_events(self) -> None:
            before = self.cycle
            super().handle_events()
            cycle: Any = self.cycle  # None before the first request
            if cycle is not before:  # headers were read to their end; the body's time is Guard's
                self._forget_deadline()
            if cycle is not None and not cycle.more_body and not cycle.response_complete:
                self._stop_waiting()

        def on_response_complete(self) -> None:
            if not self.transport.is_closing():
                self._wait()  # first: what follows may begin the next request, if it has arrived already
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            connected[self._client()] -= 1
            if not connected[self._client()]:
                del connected[self._client()]
            super().connection_lost(exc)

        def _wait(self) -> None:
            self._stop_waiting()
            self._deadline = self.loop.call_later(limits.arrival, self._give_up)
            mine = waiting.setdefault(self._client(), OrderedDict())
            mine[self] = None
            if len(mine) > limits.waiting:
                next(iter(mine))._give_up()

        def _stop_waiting(self) -> None:
            self._forget_deadline()
            mine = waiting.get(self._client(), OrderedDict())
            mine.pop(self, None)
            if not mine:
                waiting.pop(self._client(), None)

        def _forget_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _give_up(self) -> None:
            self._stop_waiting()
            self.transport.close()

        def _client(self) -> str:
            return self.client[0] if self.client else ""

    return PatientProtocol
