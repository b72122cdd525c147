"""A server on loopback for as long as a test needs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Its address."""
    import uvicorn

    from whence.serving.server import listen

    socket = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    for _ in range(100):
        if server.started:
            break
        time.sleep(0.05)
    yield f"http://localhost:{socket.getsockname()[1]}/"
    server.should_exit = True
    thread.join(timeout=10)
    assert not thread.is_alive()
