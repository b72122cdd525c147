"""Hooks that act on the passes of one thread alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn


def of_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for passes of the thread that calls this; passes of other threads go by it unchanged.

    torch puts a hook among a module's, and takes it away, before it notes whether the hook wants keyword arguments: a
    pass of another thread may call it with or without them in between, which must not break that pass.
    """
    mine = threading.get_ident()

    def guarded(module: nn.Module, *given: Any) -> Any:
        return hook(module, *given) if threading.get_ident() == mine else None

    return guarded
