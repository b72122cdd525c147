"""Connections that do not shut others out: a request must arrive in time, and waiting ones give way to new ones."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from whence.serving.limits import Limits


def patient_protocol(limits: Limits) -> type[H11Protocol]:
    """uvicorn's HTTP protocol with two limits of its own.

    A connection whose next request has not begun to be answered `limits.arrival` seconds after it could have been sent
    is closed; and a client (an address) that has more than `limits.waiting` of such connections loses the oldest.
    """
    waiting: dict[str, OrderedDict[Any, None]] = {}

    class PatientProtocol(H11Protocol):  # type: ignore[misc, unused-ignore]
        """One connection."""

        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def handle_events(self) -> None:
            before = self.cycle
            super().handle_events()
            if self.cycle is not before:  # headers were read to their end
                self._stop_waiting()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self.transport.is_closing():
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _wait(self) -> None:
            self._stop_waiting()
            self._deadline = self.loop.call_later(limits.arrival, self._give_up)
            mine = waiting.setdefault(self._client(), OrderedDict())
            mine[self] = None
            if len(mine) > limits.waiting:
                next(iter(mine))._give_up()

        def _stop_waiting(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
            mine = waiting.get(self._client(), OrderedDict())
            mine.pop(self, None)
            if not mine:
                waiting.pop(self._client(), None)

        def _give_up(self) -> None:
            self._stop_waiting()
            self.transport.close()

        def _client(self) -> str:
            return self.client[0] if self.client else ""

    return PatientProtocol
