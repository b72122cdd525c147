"""One JSON line per event on standard error. No text that was asked about is ever in it."""

from __future__ import annotations

import json
import logging
import sys
import time


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line = {
            "time": stamp,
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "data", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)  # ASCII: no line separator, control or direction mark of a caller reaches a terminal


def start_logging(*, quiet: bool = False) -> None:
    """Send the server's events to standard error; `quiet`: only what went wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    for name in ("whence.serving", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.WARNING if quiet or name.startswith("uvicorn") else logging.INFO)
